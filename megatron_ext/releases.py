"""The Megatron-LM releases that are supported, read from ``releases.txt``."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).with_name("releases.txt")


class Release(NamedTuple):
    """One line of the list.

    Attributes:
        tag: of the Megatron-LM repository, such as ``core_v0.19.0``.
        wheel: version of the newest megatron-core of this line that the tests have run on.
        python: oldest Python that it runs on, such as ``(3, 12)``.
        torch: version that the tests run it with.
    """

    tag: str
    wheel: str
    python: tuple[int, int]
    torch: str

    @property
    def line(self) -> tuple[int, int]:
        """Major and minor version: ``(0, 19)``."""
        return line(self.wheel)


def line(version: str) -> tuple[int, int]:
    """Major and minor number of a version: ``0.19.2+abc`` -> ``(0, 19)``."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def read(text: str) -> tuple[Release, ...]:
    """The releases of a list, in its order."""
    rows = [row.split() for row in text.splitlines() if row and not row.startswith("#")]
    return tuple(Release(tag, wheel, line(python), torch) for tag, wheel, python, torch in rows)


RELEASES = read(LIST.read_text())
TAGS = tuple(release.tag for release in RELEASES)
NEWEST = RELEASES[-1]
