"""What the machine refuses, in a line: a disk that takes no more is nobody's bug and needs no traceback."""

from __future__ import annotations

import errno

_MESSAGES_BY_ERRNO = {
    errno.ENOSPC: "no room is left on the disk; make some, and go on",
    errno.EDQUOT: "the disk quota is used up; make room, and go on",
    errno.EFBIG: "files may not grow that far here (ulimit -f)",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.EIO: "the disk reports an input/output error",
    errno.EMFILE: "too many files are open (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine",
    errno.EAGAIN: "no further process or thread may be started (ulimit -u)",
    errno.ENOMEM: "out of memory",
}


def system_error_message(error: OSError) -> str | None:
    """Return what the machine had no more of, with the file if that is known; None for any other error."""
    trouble = _MESSAGES_BY_ERRNO.get(error.errno) if error.errno is not None else None
    if trouble is None:
        return None
    return trouble if error.filename is None else f"{error.filename}: {trouble}"
