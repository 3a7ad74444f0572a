"""Files of processes that were killed: a lock, which ends with its process, tells them from those in use.

Process ids would not do: servers in several containers may share a folder, and each has ids of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

FOLDER_PREFIX = "sglang-lora-tree-"
"""Of folders that :data:`LOCK` marks as in use."""
LOCK = "in_use"
ROWS_PREFIX = "lora-tree-rows-"
"""Of files that lie alone in the scratch folder."""


def mark_in_use(path: Path) -> IO[bytes]:
    """Make a lock file; what is returned must be kept open as long as its folder is in use.

    On a file system without locks there is none, and the folder is never taken for a leftover.
    """
    draft = path.with_name(path.name + ".draft")  # nobody must find it before it is locked
    lock = draft.open("wb")
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)
        draft.rename(path)
    return lock


def make_locked_file(prefix: str, folder: str | None) -> tuple[int, str]:
    """A new file that lies alone: its descriptor, to be kept open as long as it is in use, and its path."""
    while True:
        handle, path = tempfile.mkstemp(prefix=prefix, dir=folder)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, path
        os.close(handle)  # somebody took it for a leftover before it was locked


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove what no living process has locked.

    Args:
        folder: where to look.
        pattern: of lock files. One in a folder of its own goes with that folder, one that lies in ``folder`` alone.
    """
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError), path.open("rb") as lock:  # another user's, in use, or gone by now
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.parent == folder:
                os.unlink(path)
            else:
                shutil.rmtree(path.parent, ignore_errors=True)


def remove_all_leftovers(spool_dir: str | None) -> None:
    """Remove what any killed process of this package has left on this machine."""
    for folder in dict.fromkeys((spool_dir or tempfile.gettempdir(), tempfile.gettempdir())):
        remove_leftovers(Path(folder), f"{FOLDER_PREFIX}*/{LOCK}")
    remove_leftovers(Path(scratch_folder() or tempfile.gettempdir()), ROWS_PREFIX + "*")


def scratch_folder() -> str | None:
    """Memory if the system has a file system for it, else the temporary folder."""
    shared = Path("/dev/shm")
    try:
        status = os.statvfs(shared)
    except OSError:
        return None
    return str(shared) if status.f_bavail * status.f_frsize > 1 << 30 and os.access(shared, os.W_OK) else None
