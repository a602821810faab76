"""The one root of every error that reaches a user: what is wrong, the value seen, what to do.

Exit codes (the same for every command): 0 done; 1 failed; 2 wrong use or bad input;
3 will not fit or is not legal; 130 interrupted after saving.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class TercetError(Exception):
    """Something failed while running. `hint` says what to do about it."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class InputError(TercetError):
    """Wrong use or bad input: names the file and line, or the key, and the value seen."""

    exit_code = 2


class RunError(TercetError):
    """Raised on all ranks alike, after they have agreed: the message says itself whose fault it is."""


class NotLegalError(TercetError):
    """The run will not fit or the strategy is not legal; `why` holds one sentence per reason."""

    exit_code = 3

    def __init__(self, why: Iterable[str], hint: str | None = None):
        self.why = list(why)
        super().__init__("\n".join(self.why), hint)


class InterruptedRun(TercetError):
    """A signal ended the run after it had saved."""

    exit_code = 130


class CardFullError(TercetError):
    """A card had no memory left; a smaller micro-batch may do."""


def disk_full(error: BaseException) -> TercetError | None:
    """Return a full disk as a sentence, whichever library met it and however it wrapped what the system said; else None."""
    seen: BaseException | None = error
    while seen is not None:
        number = seen.errno if isinstance(seen, OSError) else None
        if (
            number in (errno.ENOSPC, errno.EDQUOT)
            or "(os error 28)" in str(seen)
            or "No space left on device" in str(seen)
        ):
            path = getattr(seen, "filename", None)
            where = f" ({os.fsdecode(path)})" if isinstance(path, str | bytes) else ""
            return TercetError(
                f"the disk is full: no space is left for what was being written{where}",
                "Make room there, or choose a folder on another disk.",
            )
        seen = seen.__cause__ or seen.__context__
    return None


def file_error(error: OSError) -> TercetError | None:
    """Return what the file system refused as a sentence: path, reason, and who may; None when it names no path."""
    if error.filename is None or isinstance(error, ConnectionError):
        return None
    path = Path(os.fsdecode(error.filename) if not isinstance(error.filename, int) else f"/dev/fd/{error.filename}")
    text = f"{path}: {error.strerror or error}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return InputError(f"{text}; {who_may(path)}", "Use a path that this user may use, or have its rights changed.")
    if error.errno == errno.EROFS:
        return InputError(text, "That file system can only be read: choose another folder.")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TercetError(text, "Make room there, or choose a folder on another disk.")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return TercetError(text, "Raise the limit of open files: ulimit -n 4096.")
    return InputError(text)


def who_may(path: Path) -> str:
    """Return "the folder /data belongs to alice (mode 0700), and this is bob" of the part that is in the way."""
    if not hasattr(os, "geteuid"):
        return "this user may not do that"
    blocking, found = path.absolute(), None
    for place in (*reversed(blocking.parents), blocking):
        try:
            found = place.stat()
        except OSError:  # not there, or hidden by the folder above it
            break
        blocking = place
    if found is None:
        return f"this is {_user(os.geteuid())}"
    kind = "folder" if stat.S_ISDIR(found.st_mode) else "file"
    owner, mode = _user(found.st_uid), stat.S_IMODE(found.st_mode)
    return f"the {kind} {blocking} belongs to {owner} (mode {mode:04o}), and this is {_user(os.geteuid())}"


def _user(number: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(number).pw_name
    except (ImportError, KeyError):
        return f"user number {number}"


def nearest(name: str, known: Iterable[str], limit: int = 3) -> str:
    """Return ": did you mean a, b?" for the closest known names, or "" when none is close."""
    # Hyphens and capitals are the usual slips and should not hide an otherwise exact match.
    folded = {k.replace("-", "_").lower(): k for k in known}
    matches = get_close_matches(name.replace("-", "_").lower(), list(folded), n=limit, cutoff=0.6)
    return f"; did you mean {', '.join(folded[m] for m in matches)}?" if matches else ""


def listed(names: set[str]) -> str:
    """Return "3 (a, b, c)", cut after eight names."""
    if not names:
        return "none"
    shown = ", ".join(sorted(names)[:8])
    return f"{len(names)} ({shown}{', …' if len(names) > 8 else ''})"
