"""How tests wait: for an event, with a limit that only bounds a hang."""

from __future__ import annotations

import time
from collections.abc import Callable

# Far beyond what any step takes on a machine with ten times more to do than cores, and less than a
# test may take (``timeout`` in pyproject.toml), so that what is said at the end of it is seen.
PATIENCE = 400.0  # seconds


def wait_until(
    done: Callable[[], object],
    otherwise: str | Callable[[], str],
    seconds: float = PATIENCE,
    every: float = 0.02,
) -> None:
    """Return as soon as ``done()`` is true.

    Args:
        done: asked ``every`` so many seconds.
        otherwise: what the AssertionError says that comes instead after ``seconds``.
    """
    limit = time.monotonic() + seconds
    while not done():
        if time.monotonic() > limit:
            text = otherwise if isinstance(otherwise, str) else otherwise()
            raise AssertionError(f"waited {seconds:g} s in vain: {text}")
        time.sleep(every)
