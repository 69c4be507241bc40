"""A budget in bytes."""

from __future__ import annotations

import re

from ..schedule.reading import shown
from .model import PlanError


def parse_bytes(text: str) -> int:
    """``40GiB``, ``80GB``, ``1.5TiB``, or a plain number of bytes.

    Raises:
        PlanError: it is none of these, or not > 0.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:[eE][0-9]+)?)\s*([KMGT]i?B|B)?\s*", text)
    unit = found[2] or "B" if found else "B"
    power = "BKMGT".index(unit[0]) if unit != "B" else 0
    try:
        size = int(float(found[1] if found else "") * (1024 if "i" in unit else 1000) ** power)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise PlanError(f"a size must be a number of bytes > 0 such as 40GiB, got {shown(text)}")
    return size
