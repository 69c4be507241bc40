"""The pairs of features that count as tested are those of the tests of equality."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from pprint import pformat
from typing import Any

from megatron_ext._input import values_of
from megatron_ext.integration.feature import Run
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.integration.tested import MEGATRONS, TESTED, combined, untested
from megatron_ext.schedule import AUTO
from tests.configurations import CONFIGURATIONS, TRAINED, of_ours
from tests.support.stand_ins import megatron_args

_MOE = "--num-experts 4"
_DOCUMENTS = "--dataloader-inter-document-masking"
_BOTH = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_FULL = "--recompute-granularity full"
# (schedules, flags, flags of which each runs with these) of test_slices, test_slices_exact,
# test_lengths, test_moe_script.
MORE = (
    (
        "v-half zb-h1 v-zb interleaved gis-h",
        "--pp-slices 3",
        ("", "--pp-microbatch-costs lengths"),
    ),
    ("v-half", "--pp-slices 4", (_FULL, _BOTH, f"--tensor-model-parallel-size 2 {_DOCUMENTS}")),
    (
        "v-half zb-h1 v-zb",
        "--pp-slices 3 --pp-vocab-parallel",
        ("", f"{_FULL} {_BOTH}", "--tensor-model-parallel-size 2"),
    ),
    (
        "v-half zb-h1",
        "--pp-slices 3",
        (
            f"--pp-offload full {_MOE}",
            "--pp-offload half --recompute-granularity selective",
            "--mtp-num-layers 1",
            f"{_DOCUMENTS} --mtp-num-layers 1",
            f"--pp-slice-weights joined --pp-offload half {_DOCUMENTS} --mtp-num-layers 1",
            f"{_MOE} --expert-model-parallel-size 2",
            f"{_MOE} --moe-pipeline-chunks 2 --pp-slice-weights joined",
            "--window-size 5,0 --transformer-impl local",
            "--multi-latent-attention --recompute-granularity selective",
        ),
    ),
    (
        "v-half zb-h1",
        "--pp-microbatch-costs lengths --pp-reorder-microbatches",
        (
            f"{_DOCUMENTS} --tensor-model-parallel-size 2",
            f"{_DOCUMENTS} --context-parallel-size 2",
            f"{_DOCUMENTS} {_MOE}",
        ),
    ),
    (
        "zb-h1 v-half interleaved",
        f"--moe-pipeline-chunks 2 {_MOE}",
        ("--pp-offload full", "--expert-model-parallel-size 2"),
    ),
)


def flags_of(text: str) -> dict[str, Any]:
    return {n: int(v) if str(v).isdigit() else v for n, v in values_of(text.split()).items()}


def lines() -> Iterator[tuple[str, str]]:
    """(schedule, flags) of every run that is compared with stock's."""
    for row in CONFIGURATIONS.values():
        for schedule in row.schedules:
            yield schedule, " ".join(of_ours(row, schedule)[0])
    for schedules, flags, others in MORE:
        for schedule, other in product(schedules.split(), others):
            yield schedule, f"--untie-embeddings-and-output-weights {flags} {other}"


def run_of(schedule: str, text: str) -> Run:
    given = flags_of(text)
    given.setdefault("untie_embeddings_and_output_weights", False)
    cap = "0.8" if schedule == "v-cap" else None
    request = ScheduleRequest.of(schedule, memory_cap=cap)
    return Run(megatron_args(**given), "0.0.0", request=request)


def test_pairs_are_those_of_the_tests() -> None:
    found: dict[str, set[str]] = {}
    for schedule, text in lines():
        if schedule not in (AUTO, "file"):
            run = run_of(schedule, text)
            for one, other in combinations(combined(run.args, run.request), 2):
                if one not in MEGATRONS:
                    found.setdefault(one, set()).add(other)
    derived = {one: tuple(sorted(others)) for one, others in sorted(found.items())}
    assert derived == TESTED, pformat(derived, width=96, compact=True)


def test_the_line() -> None:
    run = run_of("v-half", f"{TRAINED} --pp-offload half --num-experts 4")
    assert untested(run) == []
    run = run_of("v-half", f"{TRAINED} --pp-slices 2 --fp8-format hybrid --fp4-format e2m1")
    (line,) = untested(run)
    assert line.startswith("not tested together: V placement with FP8, ")
    assert "slices with FP4" in line and "FP8 with FP4" not in line
