"""A lock between processes, on file systems that have the kernel's locks and on those that have none.

Where the kernel locks files, its lock goes with the process that held it. Network and user-space file systems may
refuse it (ENOLCK, ENOSYS, EOPNOTSUPP), and Windows has none of this kind: there a file names the holder, and a lock
whose holder is gone is taken over.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import psutil

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

NO_LOCKS = frozenset((errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP))
POLL_SECONDS = 0.2
UNNAMED_SECONDS = 60.0  # an owner file without a name is one being written, or one whose writer was killed just then


def process_record(pid: int) -> dict[str, Any]:
    """Return pid, host and start time: a process number alone may have been given to somebody else since."""
    return {"pid": pid, "host": socket.gethostname(), "started": psutil.Process(pid).create_time()}


def is_alive(record: dict[str, Any]) -> bool | None:
    """Return whether a recorded process still runs; None when it belongs to another host, so nobody here knows.

    A record that is damaged names no process: False.
    """
    try:
        if record["host"] != socket.gethostname():
            return None
        process = psutil.Process(record["pid"])
        return abs(process.create_time() - record["started"]) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False


class FileLock:
    """One holder at a time. Raises OSError only where the file cannot be made or opened."""

    def __init__(self, path: Path):
        self.path = path
        self.owner = path.with_name(f".{path.name}.owner")
        self._file: BinaryIO | None = None
        self._owns = False

    def acquire(self) -> bool:
        """Take the lock and return True, or return False at once when another process holds it."""
        if fcntl is not None:
            file = self.path.open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._file = file
                return True
            except BlockingIOError:
                file.close()
                return False
            except OSError as error:
                file.close()
                if error.errno not in NO_LOCKS:
                    raise
        self._owns = self._take_owner_file()
        return self._owns

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the lock without a word, and hold it for the length of the block."""
        while not self.acquire():
            time.sleep(POLL_SECONDS)
        try:
            yield
        finally:
            self.release()

    def holder(self) -> str:
        """Return who holds the lock, as far as its file says."""
        record = self._record()
        if not record:
            return "another process"
        return f"process {record['pid']} on {record['host']} (it holds {self.owner})"

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._owns:
            self._owns = False
            self.owner.unlink(missing_ok=True)

    def _take_owner_file(self) -> bool:
        while True:
            try:
                handle = os.open(self.owner, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            except FileExistsError:
                if not self._remove_if_left_behind():
                    return False
                continue
            with os.fdopen(handle, "wb") as file:
                file.write(orjson.dumps(process_record(os.getpid())))
            return True

    def _remove_if_left_behind(self) -> bool:
        """Remove an owner file whose process is gone; return False when it is held, or held as far as is known."""
        record = self._record()
        if record:
            if is_alive(record) is not False:
                return False
        else:
            try:
                if time.time() - self.owner.stat().st_mtime < UNNAMED_SECONDS:
                    return False
            except FileNotFoundError:
                return True
        # Renamed first, and looked at again: between the look and the removal somebody else may have taken it.
        aside = self.owner.with_name(f"{self.owner.name}.{os.getpid()}")
        try:
            self.owner.rename(aside)
        except FileNotFoundError:
            return True
        if self._record(aside) != record:
            aside.replace(self.owner)
            return False
        aside.unlink()
        return True

    def _record(self, path: Path | None = None) -> dict[str, Any]:
        try:
            return orjson.loads((path or self.owner).read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return {}


def kernel_locks_in(folder: Path) -> bool:
    """Return whether the kernel locks files in a folder; makes and removes one to find out."""
    if fcntl is None:
        return False
    probe = folder / f".lock-{os.getpid()}"
    try:
        with probe.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True
