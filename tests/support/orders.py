"""Searched orders, shared by all processes of a test run, and by runs of the same sources.

Four ranks, several workers and many cases ask for the same few orders, and a search takes as long
as a small model's training. Command lines and training scripts that a test starts as a user would
search for themselves; tests of their own check that all processes find the same orders.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

from megatron_ext.schedule.generators import cap

_ROOT = Path(__file__).resolve().parents[2]
FOLDER = "MEGATRON_EXT_TESTS_ORDERS"  # the variable that names one


def kept_folder(parent: Path) -> Path:
    """In ``parent``, that of the sources as they are now; those of others are removed."""
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted((_ROOT / "megatron_ext" / "schedule").rglob("*.py")):
        digest.update(path.read_bytes())
    folder = parent / digest.hexdigest()[:16]
    for other in parent.iterdir():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    return folder


def share() -> None:
    """Keep what is searched in the folder, if one is named, and look it up there first."""
    named = os.environ.get(FOLDER)
    if named and not isinstance(cap.searched, _Shared):
        cap.searched = _Shared(cap.searched, Path(named))


class _Shared:
    def __init__(self, search: Any, folder: Path) -> None:
        functools.update_wrapper(self, search)
        self._search, self._folder = search, folder

    def __call__(self, *request: Any) -> Any:
        kept = self._folder / hashlib.sha256(repr(request).encode()).hexdigest()
        # A run of other sources, or by another Python, may remove the folder at any time.
        with contextlib.suppress(FileNotFoundError):
            return pickle.loads(kept.read_bytes())
        found = self._search(*request)
        own = kept.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            own.write_bytes(pickle.dumps(found))
            own.replace(kept)  # at once: others read meanwhile
        return found

    def cache_clear(self) -> None:
        """Forget what was searched so far."""
        self._search.cache_clear()
        for file in self._folder.glob("*"):
            file.unlink(missing_ok=True)
