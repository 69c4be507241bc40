"""Version of the installed Megatron, and whether it is supported."""

from __future__ import annotations

import logging
import os

from ..releases import NEWEST, RELEASES, TAGS, parse
from .errors import ConfigError

logger = logging.getLogger(__name__)


def untested(version: str) -> str:
    """A warning for a version that is newer than every supported one; empty for these.

    Raises:
        ConfigError: it is older than all of them, or not a version.
    """
    try:
        found = parse(version)
    except ValueError:
        raise ConfigError(f"cannot read Megatron's version {version!r}") from None
    if found[:2] < RELEASES[0].line:
        raise ConfigError(
            f"megatron-core {version} is not supported; megatron_ext supports {known()}: install "
            f"one of these, e.g. megatron-core=={NEWEST.version}"
        )
    if found[:2] <= RELEASES[-1].line:
        return ""
    return (
        f"megatron-core {version} is newer than what megatron_ext supports, {known()}. Every place "
        "that this run hooks is checked before it trains, and it ends there if one does not fit; "
        "what Megatron computes behind the same names is not checked. "
        "`megatron-ext doctor` looks for every hook"
    )


def require_supported(version: str) -> None:
    """Check that ``version`` can be hooked, with a warning (of rank 0) if it is too new.

    Raises:
        ConfigError: it is not supported.
    """
    warning = untested(version)
    if warning and os.environ.get("RANK", "0") == "0":
        logger.warning("%s", warning)


def known() -> str:
    """The supported versions, for a sentence."""
    oldest, newest = (".".join(map(str, one.line)) for one in (RELEASES[0], RELEASES[-1]))
    return f"{oldest} to {newest} (tested: {', '.join(TAGS)})"


def megatron_version() -> str:
    """Version of the Megatron that ``import megatron.core`` finds.

    Raises:
        ConfigError: there is none.
    """
    try:
        from megatron.core import package_info
    except ImportError as error:
        raise ConfigError(
            f"megatron.core cannot be imported ({error}); install megatron-core=={NEWEST.version} "
            "or put a Megatron-LM checkout on PYTHONPATH"
        ) from None
    return str(package_info.__version__)
