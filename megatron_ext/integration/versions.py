"""Version of the installed Megatron, and whether it is supported."""

from __future__ import annotations

import re

from ..releases import RELEASES
from .errors import ConfigError

# Of each line of releases, the newest that the tests have run on.
SUPPORTED = tuple(release.wheel for release in RELEASES)


def parse(version: str) -> tuple[int, int, int]:
    """``0.19.2+abc`` -> (0, 19, 2).

    Raises:
        ConfigError: not a version of that form.
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        raise ConfigError(f"cannot read Megatron's version {version!r}")
    return int(match[1]), int(match[2]), int(match[3])


def require_supported(version: str) -> tuple[int, int, int]:
    """The parsed version, if its release line is supported.

    Raises:
        ConfigError: it is not.
    """
    found = parse(version)
    lines = {parse(known)[:2] for known in SUPPORTED}
    lowest = parse(SUPPORTED[0])
    if found[:2] not in lines or found < lowest:
        known = ", ".join(f"{a}.{b}.x" for a, b in sorted(lines))
        raise ConfigError(
            f"megatron-core {version} is not supported; megatron_ext knows {known} "
            f"(from {SUPPORTED[0]} on): install one of these, e.g. megatron-core=={SUPPORTED[-1]}"
        )
    return found


def megatron_version() -> str:
    """Version of the Megatron that ``import megatron.core`` finds.

    Raises:
        ConfigError: there is none.
    """
    try:
        from megatron.core import package_info
    except ImportError as error:
        raise ConfigError(
            f"megatron.core cannot be imported ({error}); install megatron-core=={SUPPORTED[-1]} "
            "or put a Megatron-LM checkout on PYTHONPATH"
        ) from None
    return str(package_info.__version__)
