"""The planner's bytes of many models against a golden file, stage by stage.

Other tests hold them against papers and against Megatron, within a per cent or on one rank; here a
rebuild changes none of them. UPDATE_GOLDEN=1 writes the file anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.layout import split_of
from megatron_ext.plan.memory import stage_bytes
from megatron_ext.plan.model import PlanError
from tests.unit.plan.shapes import FLAGS_ALONE, SHAPES, tokens

GOLDEN = Path(__file__).parent / "bytes.json"
MODELS = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
PARALLEL = "--bf16 --tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer"


def cases() -> Iterator[tuple[str, list[str], int]]:
    """Name, flags and stages."""
    for name in SHAPES | FLAGS_ALONE:
        yield name, tokens(name), 2
    for name, line in MODELS.items():
        words = f"{line} --seq-length 4096".split()
        yield name, words, 1
        yield f"{name}, parallel", [*words, *PARALLEL.split(), "--world-size", "64"], 1
        yield f"{name}, recomputed", [*words, "--pp-cheap-recompute"], 1


def stages(words: list[str], count: int) -> str | list[list[int]]:
    """Parameters, states and an activation set of every stage, or why there are none."""
    try:
        job = job_of(read(words)[0])
        split = split_of(job, count)
    except PlanError as error:
        return str(error)
    if split is None:
        return "no split"
    found = stage_bytes(job, split)
    return [[*astuple(one.parameters), *astuple(one.states), *one.sets] for one in found]


def test_no_byte_has_changed() -> None:
    now = {name: stages(words, count) for name, words, count in cases()}
    if os.environ.get("UPDATE_GOLDEN"):
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(now[name])}" for name in now)
        GOLDEN.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    before = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert now.keys() == before.keys()
    assert {name: now[name] for name in now if now[name] != before[name]} == {}
