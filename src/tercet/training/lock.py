"""run.lock: keeps a second process out of a run folder, and tells a stale lock from a live one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
import psutil

from tercet.errors import TercetError
from tercet.locks import FileLock, is_alive, process_record


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


class RunLock:
    """Held by the supervisor while a run is running; `ranks()` adds the ranks' processes."""

    def __init__(self, path: Path):
        self._path = path
        while True:
            self._file = path.open("a+b")
            self._lock = FileLock(path)  # goes with this process, however it ends; the content names the holder
            if not self._lock.acquire():
                self._refuse(self._read())
            if _is_still(path, self._file.fileno()):
                break
            self._file.close()  # its last holder removed it between the two lines: a new one is needed
            self._lock.release()
        content = self._read()
        ranks = content.get("ranks")
        for record in (content.get("supervisor"), *(ranks if isinstance(ranks, list) else ())):
            if isinstance(record, dict) and record and is_alive(record) is not False:
                self._refuse(content, record)
        self._content: dict[str, Any] = {"supervisor": process_record(os.getpid()), "ranks": []}
        self._write()

    def _read(self) -> dict[str, Any]:
        self._file.seek(0)
        try:
            content = orjson.loads(self._file.read())
        except orjson.JSONDecodeError:
            return {}
        return content if isinstance(content, dict) else {}

    def _write(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(orjson.dumps(self._content))
        self._file.flush()

    def _refuse(self, content: dict[str, Any], record: dict[str, Any] | None = None) -> None:
        record = record or dict(content.get("supervisor") or {})
        self._file.close()
        self._lock.release()
        raise TercetError(
            f"{self._path.parent} is in use by process {record.get('pid', '?')} on {record.get('host', '?')}",
            f"Wait for it to end. If that machine is no longer running it, delete {self._path}.",
        )

    def ranks(self, pids: list[int | None]) -> None:
        """Note the ranks' processes in rank order; None for one on another machine, whose number means nothing here."""
        self._content["ranks"] = []
        for rank, pid in enumerate(pids):
            if pid is None:
                continue
            try:
                self._content["ranks"].append({"rank": rank, **process_record(pid)})
            except psutil.Error:
                continue  # ended already; the supervisor finds out why
        self._write()

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()
        self._lock.release()
