"""DualPipeV against its closed form, and against torch.distributed.pipelining's order.

``torch_dualpipev.json`` holds the actions of torch 2.15.0's ScheduleDualPipeV, in torch's notation
(made by benchmarks/torch_lists.py).
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from megatron_ext.schedule import Costs, check, generate, lower, simulate
from megatron_ext.schedule.actions import Action, AnyAction, Joint, Op
from tests.support.grids import sampled

TORCH = json.loads(Path(__file__).with_name("torch_dualpipev.json").read_text())


@pytest.mark.parametrize("pp", sampled([*range(2, 17), 32], (2, 3, 4, 7, 8)))
def test_closed_form(pp: int) -> None:
    """Chunk units; for m >= 2p that is the published bubble (p-1)(F&B + BW - 3W)."""
    for m in (1, 2, pp - 1, pp, pp + 1, 2 * pp - 1, 2 * pp, 2 * pp + 1, 3 * pp - 1, 5 * pp):
        run = simulate(generate("dualpipev", pp, m))
        if m <= pp:
            expected = 4 * m + 5 * pp - 3
        else:
            expected = 4 * m + 6 * pp - 2 if m < 2 * pp else 6 * m + 2 * (pp - 1)
        assert run.makespan == Fraction(expected, 2)
        assert run.peak_sets == [min(2 * m, m + 1 + i, 2 * pp + 1) for i in range(pp)]


OPS = {"F": Op.F, "I": Op.B, "W": Op.W, "B": Op.BW}  # by torch's letters


def action_of(cell: str) -> AnyAction:
    """``0F3``: stage, letter, microbatch; ``(0F3;7B1)OVERLAP_F_B``: a joint action."""
    parts = [
        Action(OPS[letter], int(stage), int(microbatch))
        for stage, letter, microbatch in re.findall(r"(\d+)([FIWB])(\d+)", cell)
    ]
    return parts[0] if len(parts) == 1 else Joint(*parts)


@pytest.mark.parametrize("size", TORCH)
def test_torchs_order(size: str) -> None:
    pp, m = (int(part.split("=")[1]) for part in size.split())
    ours = generate("dualpipev", pp, m)
    assert ours.ranks == tuple(tuple(map(action_of, row.split())) for row in TORCH[size])


@pytest.mark.parametrize("pp", [2, 5])
def test_the_order_is_the_same_at_any_costs(pp: int) -> None:
    fixed = generate("dualpipev", pp, 3 * pp)
    costs = Costs.of(1, "1.3", "0.6", "0.1")
    assert generate("dualpipev", pp, 3 * pp, costs=costs).ranks == fixed.ranks
    assert check(lower(replace(fixed, costs=costs))) == check(fixed)


def test_it_is_more_joint_than_not() -> None:
    """All of the steady state: every F and BW of a rank but those of filling and draining."""
    for rank, row in enumerate(generate("dualpipev", 4, 40).ranks):
        joint = sum(len(action.parts) == 2 for action in row)
        alone = sum(str(a).startswith("F") and len(a.parts) == 1 for a in row)
        assert joint == 2 * 40 - alone
        assert alone <= 3 * 4 + 1, f"rank {rank}"
