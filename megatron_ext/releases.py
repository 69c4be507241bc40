"""The versions of Megatron-LM that are supported, read from ``releases.txt``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).with_name("releases.txt")
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:(a|b|rc)(\d+))?(\.?dev\d*)?")

Version = tuple[int, int, int, str, int, bool]


class Release(NamedTuple):
    """One line of the list.

    Attributes:
        tag: of the Megatron-LM repository, such as ``core_v0.19.0``; a name of ours for a commit.
        version: of the newest megatron-core of this line that the tests have run on; of a commit,
            what it says it is.
        torch: version that the tests run it with.
        commit: to fetch, in full; ``-``: the tag's.
    """

    tag: str
    version: str
    torch: str
    commit: str

    @property
    def line(self) -> tuple[int, int]:
        """Major and minor version: ``(0, 19)``."""
        return line(self.version)

    @property
    def tagged(self) -> bool:
        """NVIDIA released it; otherwise it is a commit of a development branch."""
        return self.commit == "-"


def parse(version: str) -> Version:
    """What orders versions as PEP 440 does, as far as Megatron uses it.

    ``1.2.0rc0.dev7 < 1.2.0rc0 < 1.2.0 < 1.2.1``; what follows (``+abc``) does not count.
    The first two items are major and minor number.

    Raises:
        ValueError: not a version of that form.
    """
    match = _VERSION.match(version)
    if match is None:
        raise ValueError(f"cannot read the version {version!r}")
    final = "release" if match[6] is None else ""  # "" < "a" < "b" < "rc" < "release"
    numbers = int(match[1]), int(match[2]), int(match[3])
    return (*numbers, match[4] or final, int(match[5] or 0), match[6] is None)


def line(version: str) -> tuple[int, int]:
    """Major and minor number of a version: ``0.19.2+abc`` -> ``(0, 19)``."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def read(text: str) -> tuple[Release, ...]:
    """The releases of a list, in its order."""
    rows = [row.split() for row in text.splitlines() if row and not row.startswith("#")]
    return tuple(Release(*row) for row in rows)


def closest(version: str) -> Release | None:
    """What stands for ``version``: of the same line, the newest that is not newer, else the oldest;
    None: none of that line is known.

    Raises:
        ValueError: ``version`` is not one.
    """
    found = parse(version)
    same = [release for release in RELEASES if release.line == found[:2]]
    older = [r for r in same if parse(r.tag.removeprefix("core_v")) <= found]
    return older[-1] if older else next(iter(same), None)


RELEASES = read(LIST.read_text())
TAGS = tuple(release.tag for release in RELEASES)
NEWEST = [release for release in RELEASES if release.tagged][-1]
"""The main target: what messages advise, and what the tests run on by default."""
PYTHON = 3, 12
"""The oldest Python that these releases run on."""
