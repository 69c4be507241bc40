"""Flags that plan, the launcher and the conflicts read, compared with Megatron's own parsers."""

from __future__ import annotations

import pytest

from megatron_ext import _megatron_flags as table
from megatron_ext.plan.flags import FLAGS, NOT_MODELLED
from megatron_ext.releases import TAGS
from tests.support.checkouts import MAIN_TAG, Serve, version

# Not of the newest parser: what a launcher says, fields of recipes, other versions and branches.
OUTSIDE = {"--world-size", "--disable-parameter-transpose-cache", "--cpu-offloading"}
OUTSIDE |= {"--use-custom-fsdp", "--original-max-position-embeddings"}
OUTSIDE |= {"--use-legacy-models", "--enable-mhc-connections", "--enable-hyper-connections"}
OUTSIDE |= {"--output-logit-dtype", "--overlap-dispatch-backward-with-experts-wgrad"}
# Types that Megatron reads with a function of its own, whose text plan reads itself.
OWN = {"enum_type_handler", "moe_freq_type", "la_freq_type", "tuple_type"}


OURS = ("--pp-", "--moe-pipeline-", "--moe-memory-")


def other_types(flags: dict[str, str]) -> list[str]:
    """Flags that plan reads in another way than Megatron."""
    names = {bool: "switch", list: "list", int: "int", float: "float", str: "str"}
    return [
        f"{flag}: {names[kind]}, not {flags[flag]}"
        for flag, kind in FLAGS.items()
        if flag in flags and flags[flag] != names[kind] and not (kind is str and flags[flag] in OWN)
    ]


@pytest.mark.parametrize("tag", [version(tag) for tag in TAGS])
def test_the_table_is_that_of_the_parser(tag: str, serve: Serve) -> None:
    flags = serve(tag).flags()
    assert other_types(flags) == []
    assert other_types({**flags, "--num-layers": "str"}) == ["--num-layers: int, not str"]
    if tag == MAIN_TAG:
        used = {*FLAGS, *NOT_MODELLED, *table.CPU_NEEDS, *table.CPU_DEFAULTS, *table.CPU_SWITCHES}
        used = {name for name in {*used, *table.NEUTRAL} if not name.startswith(OURS)}
        assert used - set(flags) - OUTSIDE == set()
