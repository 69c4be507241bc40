"""Files that a run writes into a folder which others may write to as well, such as /tmp."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TextIO


def folder(path: str | Path) -> Path:
    """Make a folder, and those above it, that nobody but the owner can write to.

    Also under a umask that would allow more; a folder that is there stays as it is.

    Raises:
        OSError: it cannot be made, or is something else.
    """
    path = Path(path)
    for part in (*reversed(path.parents), path):
        with contextlib.suppress(FileExistsError):
            part.mkdir(mode=0o755)
    if not path.is_dir():
        raise NotADirectoryError(20, "it is no directory", str(path))
    return path


def create(path: str | Path) -> TextIO:
    """A new text file in place of one that is there, not through it.

    What lies there, which may be a link that somebody has put there, is taken away first; the
    file it leads to is not touched.

    Raises:
        OSError: it cannot be written, or something came back meanwhile.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o644), "w", encoding="utf-8")
