"""Every schedule's exact actions against a golden file: a refactoring changes none of them.

UPDATE_GOLDEN=1 writes the file anew, in one process (--workers 1); a change of it needs a reason in
CHANGELOG.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.schedule import AUTO, NAMES, Costs, Link, Schedule, lower, offload_pass
from megatron_ext.schedule.generators import GENERATORS
from megatron_ext.schedule.generators.cap import v_cap_limits
from tests.support.grids import sampled
from tests.support.schedules import made

GOLDEN = Path(__file__).parent / "fingerprints.json"
COSTS = {
    "equal": Costs(),
    "unequal": Costs.of(1, "1.15", "0.85"),
    "b-long": Costs.of(2, 3, "1.5", "0.25"),
}


def options(name: str, pp: int) -> Iterator[dict[str, Any]]:
    """Chunk counts, group sizes and caps that ``name`` is fingerprinted with."""
    least, most = v_cap_limits(pp)
    caps = sorted({min(max(sets, least), most) for sets in (pp + 1, 3 * pp // 2 + 1, 2 * pp)})
    if name == AUTO:
        yield from ({}, {"memory_cap": pp + 1}, {"chunks": 1})
    elif GENERATORS[name].takes_memory_cap:
        yield from ({"memory_cap": sets} for sets in caps)
    elif GENERATORS[name].takes_group_size:
        yield from ({"group_size": size} for size in sorted({-(-pp // 2), pp}))
    elif GENERATORS[name].any_chunks:
        yield from ({"chunks": chunks} for chunks in (2, 3))
    else:
        yield {}


def heavy_last(schedule: Schedule) -> Costs:
    """Stage costs with a last stage half as long again."""
    stages = schedule.pp * schedule.chunks
    return Costs.of(1, 1, 1, "0.05", [[2, 2, 2]] * (stages - 1) + [[3, 3, 3]])


def fingerprints(name: str, pp: int) -> dict[str, str]:
    """Fingerprint by costs, microbatches and options; lowered and offloaded ones too."""
    found = {}
    for m in sorted({1, pp, 2 * pp + 1, 4 * pp}):
        for chosen in options(name, pp):
            text = " ".join(f"{key}={value}" for key, value in chosen.items())
            plain = None
            for label, costs in COSTS.items():
                plain = made(name, pp, m, costs=costs, **chosen)
                found[f"{label} m={m} {text}".strip()] = plain.fingerprint()
            assert plain is not None
            found[f"lowered m={m} {text}".strip()] = lower(plain).fingerprint()
            if name != AUTO:
                staged = made(name, pp, m, costs=heavy_last(plain), **chosen)
                found[f"heavy last m={m} {text}".strip()] = staged.fingerprint()
            if m == 2 * pp + 1:
                link = Link.of(pp, "0.3", policy="dual")
                found[f"offload m={m} {text}".strip()] = offload_pass(
                    plain, link, "half"
                ).schedule.fingerprint()
                span = made(name, pp, m, costs=COSTS["unequal"], objective="span", **chosen)
                found[f"span m={m} {text}".strip()] = span.fingerprint()
    return found


CASES = [(name, pp) for pp in (2, 3, 4, 7, 8) for name in (*NAMES, AUTO)]
# A plain run takes small pipelines, and of what takes long to generate the smallest.
LARGEST = {
    AUTO: 1,
    "v-cap": 2,
    "v-min": 3,
    "v-half": 3,
    "v-zb": 3,
    "interleaved-zb": 2,
    "gis": 3,
    "gis-h": 3,
}
CHEAP = [(name, pp) for name, pp in CASES if pp <= LARGEST.get(name, 4)]


@pytest.mark.parametrize(("name", "pp"), sampled(CASES, CHEAP))
@pytest.mark.usefixtures("some_effort")
def test_no_action_has_changed(name: str, pp: int) -> None:
    """Those that are searched for, with little effort."""
    key, found = f"{name} p={pp}", fingerprints(name, pp)
    every = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        every[key] = found
        lines = (f"{json.dumps(k)}: {json.dumps(every[k], sort_keys=True)}" for k in sorted(every))
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert found == every[key]
