"""The file in which a part keeps what it has: whole at any moment, whoever ends the process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def keep(path: Path, result: dict[str, Any], *under: str) -> None:
    """Replace what ``path`` holds, or with keys the entry ``under`` them, by ``result``."""
    whole = result
    if under:
        whole = kept(path)
        place = whole
        for key in under[:-1]:
            place = place.setdefault(key, {})
        place[under[-1]] = result
    new = path.with_suffix(".new")
    new.write_text(json.dumps(whole))
    new.replace(path)


def kept(path: Path) -> dict[str, Any]:
    """What ``path`` holds; nothing if it does not exist."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found
