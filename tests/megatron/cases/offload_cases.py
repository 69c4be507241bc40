"""Offloads activation sets of small GPTs on four gloo ranks; see test_offload.

As gpt_cases.py and wgrad_cases.py. Every copy starts up to two milliseconds late, at random, and
device memory that was let go is filled with NaN.
"""

from __future__ import annotations

import functools
import os
import random
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

# Every tensor of these small models may leave.
os.environ["MEGATRON_EXT_OFFLOAD_MIN_BYTES"] = "1"

# First: it sets Apex's kernel up before it imports Megatron.
from tests.megatron.cases import wgrad_cases
from tests.support.case_server import serve

# isort: split
from megatron_ext.integration.features import profile
from megatron_ext.integration.features.offload import measure
from megatron_ext.offload.device import CpuDevice
from megatron_ext.schedule import Costs, generate, offload_pass
from megatron_ext.schedule.actions import Op
from megatron_ext.schedule.link import Link, travel_time
from megatron_ext.schedule.placement import Placement
from tests.support.faulty_device import Faults, FaultyDevice

_SEQUENTIAL_MOE = wgrad_cases.CASES["stock/moe"]["config"]
_FUSED = wgrad_cases.CASES["stock/fusion"]["config"]
_TWO, _OVERLAP = {"chunks": 2}, {"pp": 2, "bf16": True, "overlap": True}

# What is common to a stock case and those of ours that must equal it.
_MODELS: dict[str, dict[str, Any]] = {
    "": {},
    "interleaved": _TWO,
    "m3": {"m": 3},
    "overlap-bf16": _OVERLAP,
    "tied": {"tied": True},
    "lengths": {"lengths": True},
    "recompute": {"recompute": True},
    "moe": {"config": _SEQUENTIAL_MOE},
    "fusion": {"config": _FUSED},
}
# (schedule, model, how much), and what else differs.
_OURS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("1f1b", "", "full", {}),
    ("interleaved", "interleaved", "half", _TWO),
    ("zb-h1", "", "auto", {}),
    ("interleaved-zb", "", "full", _TWO),
    ("v-min", "", "half", _TWO),
    ("v-half", "", "full", _TWO),
    ("v-zb", "", "full", {**_TWO, "evaluate": True}),
    ("v-cap", "", "1", {**_TWO, "cap": "0.875"}),
    ("gis", "", "1", _TWO),
    ("gis-h", "", "full", _TWO),
    ("po", "", "half", _TWO),
    ("v-half", "m3", "auto", _TWO),
    ("1f1b", "fusion", "full", {}),
    ("v-zb", "fusion", "full", _TWO),
    ("zb-h1", "overlap-bf16", "full", {}),
    ("v-half", "overlap-bf16", "auto", _TWO),
    ("v-half", "tied", "full", _TWO),
    ("v-half", "lengths", "full", _TWO),
    ("interleaved-zb", "recompute", "full", _TWO),
    ("v-half", "moe", "full", _TWO),
]

CASES: dict[str, dict[str, Any]] = {}
for name, model in _MODELS.items():
    CASES[f"stock/{name}"] = {"pp": 4, **model, "overlap": False}
for schedule, name, wanted, more in _OURS:
    CASES[f"{schedule}/{name}"] = {
        "pp": 4,
        **_MODELS[name],
        "iterations": 3,
        **more,
        "schedule": schedule,
        "offload": wanted,
    }
# Nothing is given: times are measured; times of passes and rates are then replaced by
# steady ones, so that every stage's bytes decide.
CASES["v-half/measured"] = {**CASES["v-half/"], "offload": "auto"}
# A file says all.
_FILE = offload_pass(generate("v-half", 4, 8), Link.of(4, Fraction(1, 4)), "full").schedule
CASES["file/"] = {"pp": 4, **_TWO, "iterations": 3, "schedule": "FILE", "file": _FILE}
# Tensors that stay on the device, chosen by a policy of ours, or of the user's.
_OWN = "tests.megatron.cases.keep_policies:keep_mlp"
CASES["v-half/keep"] = {**CASES["v-half/"], "policy": "keep-attention-inputs"}
CASES["1f1b/keep"] = {**CASES["1f1b/"], "policy": _OWN}
CASES["interleaved-zb/keep-recompute"] = {**CASES["interleaved-zb/recompute"], "policy": _OWN}
# The order is made anew after two steps, without offload and with it. What is measured here is
# noise, so it is replaced: a last stage that takes half as long again.
_PROFILED = {"pp": 4, **_TWO, "profile": 2, "iterations": 3}
CASES["v-zb/profiled"] = {**_PROFILED, "schedule": "v-zb"}
CASES["v-cap/profiled"] = {
    **_PROFILED,
    "schedule": "v-cap",
    "cap": "0.75",
    "offload": "auto",
}
_HEAVY = [[2, 2, 2]] * 7 + [[3, 3, 3]]


def _faulty(*unused: Any) -> CpuDevice:
    rng = random.Random(os.getpid())
    return FaultyDevice(faults=Faults(delay=lambda _: rng.random() / 500, poison=True))


def _heavy(*args: Any, **kwargs: Any) -> Costs:
    measured = original_agree(*args, **kwargs)
    assert measured.stages is not None and len(measured.stages) == 8
    return Costs.of(hop=measured.hop, stages=_HEAVY)


def _steady(
    setup: Any,
    placement: Placement,
    rank: int,
    durations: Any,
    sizes: dict[int, int],
    groups: Any,
) -> Link:
    seconds = {(chunk, op): 0.1 for chunk in range(2) for op in (Op.F, Op.B, Op.W)}
    with (
        mock.patch.object(measure.TransferSetup, "bytes_per_second", lambda self: (4e6, 2e6)),
        mock.patch.object(measure, "pass_seconds", lambda *unused: seconds),
    ):
        found = original_link(setup, placement, rank, durations, sizes, groups)
    for chunk, stage in enumerate(placement.stages[rank]):
        want = tuple(travel_time(sizes[chunk], rate, 0.3) for rate in (4e6, 2e6))
        assert found.of_stage(placement, stage) == want, (rank, stage)
    # Rank 0 has the embedding's stage and, of the V, the loss's, whose sets are larger.
    assert found.of_stage(placement, 7) > found.of_stage(placement, 1), found
    assert len(found.to_host) == 8, found
    return found


def _quarter(setup: Any, placement: Placement, *unused: Any) -> Link:
    """Copies of a quarter of F+B+W, as the first step's plan assumes."""
    return Link.of(placement.pp, Fraction(1, 4))


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """As the others', with late copies, and the same costs measured every time."""
    with mock.patch.object(measure, "device_for", _faulty):
        agree = _heavy if "profile" in case else lambda *unused: None
        if case == CASES["v-half/measured"]:
            agree = original_agree
        args = functools.partial(original_args, pp_offload_policy=case.get("policy"))
        with mock.patch.object(profile, "agree", agree):
            steady = original_link if "profile" in case else _quarter
            if case == CASES["v-half/measured"]:
                steady = _steady
            with (
                mock.patch.object(gpt_cases, "megatron_args", args),
                mock.patch.object(measure, "link", steady),
            ):
                return original_run_case(case, folder)


# Not imported here: wgrad_cases has to prepare a module before Megatron is imported.
gpt_cases = wgrad_cases.gpt_cases
original_agree, original_run_case = profile.agree, gpt_cases.run_case
original_link = measure.link
original_args = gpt_cases.megatron_args
gpt_cases.run_case = run_case


if __name__ == "__main__":
    serve(CASES, gpt_cases.rank_main, gpt_cases.WORLD)
