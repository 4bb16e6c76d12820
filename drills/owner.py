"""Whose the state is: what root makes under `<state_dir>/drills` is given to whom that folder belongs.

drilld has a user of its own. A run that root began by hand was root's, and drilld could neither read nor heal it.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

FOLDER_MODE = 0o700


def make_folder(folder: Path) -> None:
    """A folder that only its owner may look into: the owner of the one above it. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=FOLDER_MODE)
        give(folder)


def give(path: Path) -> None:
    """Give something of root's to the owner of the folder that it is in, and a folder with all the files in it.

    Others cannot give anything away. What cannot be given stays root's, which is no reason not to go on.
    """
    if os.geteuid() != 0:
        return
    with suppress(OSError):
        above = path.parent.stat()
        if above.st_uid == 0:
            return
        # By descriptors that follow no link: who owns the folder must not choose what else root gives away.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _give(fd, above.st_uid, above.st_gid)
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                return
            for name in os.listdir(fd):  # noqa: PTH208  (a Path takes no descriptor)
                with suppress(OSError):
                    inner = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
                    try:
                        _give(inner, above.st_uid, above.st_gid)
                    finally:
                        os.close(inner)
        finally:
            os.close(fd)


def _give(fd: int, uid: int, gid: int) -> None:
    """Only what is root's, has no second name elsewhere, and is a file or a folder."""
    found = os.fstat(fd)
    is_ours = stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink == 1)
    if found.st_uid == 0 and is_ours:
        os.fchown(fd, uid, gid)
