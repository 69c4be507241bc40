"""Rows of the feature matrix: stock's features under our schedules, on unmodified checkouts.

``benchmarks/feature_matrix.py`` runs all of it; here are the rows with hooks of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.releases import TAGS
from tests.support.architectures import ARCHITECTURES
from tests.support.checkouts import Serve, version
from tests.support.feature_runs import run_feature
from tests.support.features import FEATURES
from tests.support.server import ScriptServer

# (version, feature) -> schedules. The oldest and the newest version differ most. Those behind
# ``NIGHTLY_TOO`` are in tier matrix: the others share their placement or their W passes.
NIGHTLY_TOO = " and at night "
ROWS = {
    "core_v0.19.0": {
        "TP 2, sequence parallel": f"v-half{NIGHTLY_TOO}zb-h1",
        "CP 2": "v-half",
        "MoE, EP 2, bf16, both overlaps": f"v-half{NIGHTLY_TOO}interleaved-zb",
        "evaluation, other batch": "v-half",
        "batch-size ramp-up": "v-cap",
        "fewer first and last layers": "v-half",
        "layer layout": f"v-min{NIGHTLY_TOO}zb-h1,gis,interleaved-zb",
        "MTP, bf16, both overlaps": "zb-h1,v-half",
        "per-token loss": "v-half",
        "dropout (the same run twice)": "v-half",
        "offload, half, MoE, EP 2, bf16, both overlaps": "v-zb",
        "offload, auto, measured, evaluation": "v-half",
        "offload, full, TP 2, sequence parallel": "zb-h1",
        "offload, full, recompute selective, ramp-up": "v-half",
        "offload, full, cheap recompute": "zb-h1",
        "DeepSeek-V3, offload, full": "v-zb",
        "packed sequences": "v-half",
        "MLA, TP 2, sequence parallel": "zb-h1,v-half",
        "MoE, allgather dispatcher, EP 2": "interleaved-zb,v-half",
        "DeepSeek-V3: MLA, dense first layers, MoE, MTP; EP 2, both overlaps": "zb-h1,v-zb",
        "DeepSeek-V3, recompute of MLA's up projection and shared experts": "interleaved-zb,v-half",
        "MTP on a stage of its own": "zb-h1,interleaved-zb",
        "Qwen3: QK norm, GQA, MoE, vocabulary of 152k": "zb-h1,v-half",
        "GPT-OSS: sliding window, sinks, clamped GLU, MoE": "interleaved-zb,v-half",
        "heterogeneous layers": "zb-h1",
        "packed sequences, PP 4": "zb-h1,interleaved-zb,v-zb",
        "packed sequences, MLA": "v-half",
        "packed sequences, TP 2": "interleaved-zb,v-half",
        "packed sequences, CP 2": "zb-h1,v-half",
        "optimizer on the CPU": "zb-h1,v-half",
        "attention mask of each document": "zb-h1",
        "attention mask of each document, beside stock's interleaving": "interleaved-zb",
        "decoder sequence length": "interleaved-zb",
        "hybrid": "interleaved-zb",
        "hybrid, tied, DP 2, bf16, both overlaps, offload": "1f1b,zb-h1,interleaved",
        "hybrid, MoE, EP 2, MTP": "zb-h1,interleaved-zb",
        "vocabulary": f"v-half{NIGHTLY_TOO}1f1b,interleaved,zb-h1,v-min,v-zb,v-cap,gis,po,auto",
        "vocabulary, tied, clipping, evaluation": "zb-h1,v-half",
        "vocabulary, TP 2, DP 2, sequence parallel, bf16, both overlaps": "zb-h1,v-half",
        "vocabulary, TP 2, sequence parallel": "1f1b,v-zb",
        "vocabulary, TP 2, tied": "interleaved-zb,v-half",
        "vocabulary, tied, DP 2, bf16, both overlaps": "1f1b,zb-h1,v-zb",
        "vocabulary, CP 2, per-token loss": "zb-h1,v-half",
        "vocabulary, MoE, EP 2, bf16, both overlaps": "interleaved-zb,v-half",
        "vocabulary, fp16, loss scaling, recompute full, ramp-up": "v-min,po",
        "vocabulary, offload, trace": "po,v-half",
        "vocabulary, PP 8": "1f1b,v-half",
        "pairs, EP 2": f"v-zb{NIGHTLY_TOO}1f1b,zb-h1,zb-h2,v-min,v-half,v-cap,dualpipev,auto",
        "pairs, EP 2, both overlaps, beside stock's": "interleaved,interleaved-zb,gis,gis-h,po",
        "pairs, PP 4, EP 2, delayed weight gradients, cheap recompute": "zb-h1,v-half",
        "pairs, TP 2, sequence parallel, EP 2, evaluation, fp16": "zb-h1,v-zb",
        "pairs, EP 2, CP 2, ramp-up, per-token loss, recompute selective": "v-half,dualpipev",
        "DeepSeek-V3, pairs": "zb-h1,v-zb",
        "vocabulary, fused cross entropy": "v-half",
        "vocabulary, MTP": f"v-half{NIGHTLY_TOO}1f1b,interleaved-zb",
        "vocabulary, MTP, tied, evaluation": "1f1b,v-zb",
        "vocabulary, MTP, TP 2, sequence parallel, detached heads": "zb-h1,v-half",
        "vocabulary, MTP, CP 2, per-token loss": "interleaved,v-min",
        "vocabulary, MTP, tied, bf16, both overlaps": "zb-h1,v-half",
    },
    "core_v0.18.2": {
        "vocabulary": "v-half",
        "vocabulary, MTP": "zb-h1,v-half",
        "vocabulary, TP 2, tied": "zb-h1",
        "vocabulary, MoE, EP 2, bf16, both overlaps": "v-zb",
        "tied, bf16, both overlaps": "zb-h1,v-half",
        "offload, full": "v-half",
        "hybrid": "interleaved-zb",
        "pairs, EP 2, both overlaps, beside stock's": "interleaved",
        "pairs, PP 4, EP 2, delayed weight gradients, cheap recompute": "v-half",
        "DeepSeek-V3, pairs": "v-zb",
    },
    "core_v0.20.0-d98e8a64": {
        "vocabulary": "v-half",
        "vocabulary, MTP": "zb-h1,v-half",
        "vocabulary, TP 2, tied": "zb-h1",
        "vocabulary, MoE, EP 2, bf16, both overlaps": "v-zb",
        "tied, bf16, both overlaps": "zb-h1,v-half",
        "MoE, EP 2, bf16, both overlaps": "interleaved-zb",
        "offload, full": "v-zb",
        "MTP": "v-half",
        "pairs, EP 2, both overlaps, beside stock's": "interleaved",
        "pairs, PP 4, EP 2, delayed weight gradients, cheap recompute": "v-half",
        "DeepSeek-V3, pairs": "v-zb",
    },
}
assert ROWS.keys() == set(TAGS)


# In tier matrix: what the other rows, or tests of one feature, nearly cover.
NIGHTLY = (
    *("MoE, EP 2, bf16, both overlaps", "layer layout", "hybrid"),
    *("fewer first and last layers", "per-token loss", "batch-size ramp-up", "CP 2"),
    "evaluation, other batch",  # test_pretrain_script, and test_numerics with other microbatches
    *("MTP, bf16, both overlaps", "offload, half, MoE, EP 2, bf16, both overlaps"),
    "offload, full, TP 2, sequence parallel",
    *("dropout (the same run twice)", "offload, auto, measured, evaluation"),
    "offload, full, recompute selective, ramp-up",
    "offload, full, cheap recompute",
    *(feature.name for feature in ARCHITECTURES),
    "hybrid, tied, DP 2, bf16, both overlaps, offload",
    "hybrid, MoE, EP 2, MTP",
    "vocabulary, tied, clipping, evaluation",
    "vocabulary, TP 2, DP 2, sequence parallel, bf16, both overlaps",
    "vocabulary, TP 2, tied",
    "vocabulary, TP 2, sequence parallel",
    "vocabulary, tied, DP 2, bf16, both overlaps",
    "vocabulary, CP 2, per-token loss",
    "vocabulary, MoE, EP 2, bf16, both overlaps",
    "vocabulary, fp16, loss scaling, recompute full, ramp-up",
    "vocabulary, PP 8",
    "vocabulary, offload, trace",
    "pairs, EP 2, both overlaps, beside stock's",
    "pairs, PP 4, EP 2, delayed weight gradients, cheap recompute",
    "pairs, TP 2, sequence parallel, EP 2, evaluation, fp16",
    "pairs, EP 2, CP 2, ramp-up, per-token loss, recompute selective",
    "vocabulary, fused cross entropy",
    "vocabulary, MTP",
    "vocabulary, MTP, tied, evaluation",
    "vocabulary, MTP, TP 2, sequence parallel, detached heads",
    "vocabulary, MTP, CP 2, per-token loss",
    "vocabulary, MTP, tied, bf16, both overlaps",
)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, serve: Serve) -> ScriptServer:
    """``pretrain_gpt.py`` of a checkout, imported and ready to fork ranks."""
    return serve(request.param)


def rows() -> Iterator[Any]:
    """A test for each row, and one for what it runs at night too."""
    for tag, features in ROWS.items():
        for name, schedules in features.items():
            daily, _, more = schedules.partition(NIGHTLY_TOO)
            yield version(tag, tag, name, daily, nightly=name in NIGHTLY)
            if more:
                yield version(tag, tag, name, more, nightly=True)


@pytest.mark.parametrize(
    ("server", "feature", "schedules"),
    list(rows()),
    indirect=["server"],
)
def test_losses_are_stocks(
    server: ScriptServer,
    feature: str,
    schedules: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Bit for bit, or, where another order of summands is unavoidable, as close as stated.

    By default stock runs without a pipeline, which has the same losses.
    """
    [row] = [row for row in FEATURES + ARCHITECTURES if row.name == feature]
    if request.node.get_closest_marker("matrix") is None:
        row = replace(row, alone=True)
    for cell in run_feature(server, row, schedules.split(","), tmp_path):
        assert cell.result == "equal" or cell.result.startswith("~"), cell
        # In Megatron's line, on the rank that prints it; without our flags nowhere.
        runs = ((cell.schedule, row.world), ("stock", row.stock.world))
        logs = [(tmp_path / run / f"rank{world - 1}.log").read_text() for run, world in runs]
        ours, stocks = (len(re.findall(r" iteration +\d+/", log)) for log in logs)
        assert len(LOGGED.findall(logs[0])) == ours == stocks > 0
        assert "pipeline bubble" not in logs[1]


LOGGED = re.compile(
    r" iteration +\d+/.*\| pipeline bubble: -?\S+ % .*\| peak activations: \S+ microbatches .*\|\n"
)


@pytest.mark.parametrize("server", ["core_v0.19.0"], indirect=True)
def test_the_comparison_can_fail(server: ScriptServer, tmp_path: Path) -> None:
    """Another learning rate is seen as different, a refused feature as rejected."""
    row = next(feature for feature in FEATURES if feature.name == "fp32")
    plain = replace(row, pp=2, world=2)
    more = {"zb-h1": ["--lr", "2e-3"], "zb-h2": ["--moe-paged-stash"]}

    class Changed:
        def run(self, argv: list[str], *args: object, **kwargs: object) -> object:
            own = [flag for name in more if name in argv for flag in more[name]]
            return server.run([*argv, *own], *args, **kwargs)  # type: ignore[arg-type]

    cells = run_feature(Changed(), plain, ["1f1b", *more], tmp_path)  # type: ignore[arg-type]
    assert [cell.result for cell in cells] == ["equal", "DIFFERENT", "rejected"], cells
    assert "--moe-paged-stash" in cells[2].detail
