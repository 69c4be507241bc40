"""Costs and memory of one MoE layer, and what the paper says of its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.moe.costs import (
    BACKWARD,
    DIRECTIONS,
    FORWARD,
    Kind,
    LayerCosts,
    LayerShape,
    Line,
    chunk_rows,
    chunk_times,
)
from megatron_ext.moe.layout import DISPATCH_FIRST, Layout, Ring
from megatron_ext.moe.memory import (
    Load,
    footprint,
    ring_bytes,
    saved_bytes,
    temporary_bytes,
)
from tests.unit.moe.papers import WORK, savings

MODULES = ["costs", "layout", "memory", "search", "select", "simulate"]


def test_the_choice_loads_no_torch(repo_root: Path) -> None:
    code = "import sys\n" + "".join(f"import megatron_ext.moe.{name}\n" for name in MODULES)
    code += "assert not {'torch', 'numpy', 'megatron'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=repo_root, check=True)


def test_a_line_has_a_floor() -> None:
    line = Line(2.0, 1.0, 4.0)
    assert [line(v) for v in (0, 1, 1.5, 2)] == [4, 4, 4, 5]


@pytest.mark.parametrize("line", [Line(0.5, 2.0, 10.0), Line(3.0), Line(0.25, 7.0), Line(0.0, 5.0)])
def test_a_line_through_its_own_samples(line: Line) -> None:
    volumes = [1, 2, 4, 8, 16, 32, 64, 128]
    fitted = Line.through([(v, line(v)) for v in reversed(volumes)])
    assert [fitted(v) for v in volumes] == pytest.approx([line(v) for v in volumes])
    assert fitted.alpha_ms >= -1e-9 and fitted.beta_ms >= 0


def test_a_line_never_has_negative_latency() -> None:
    fitted = Line.through([(1, 0.5), (2, 3.0), (3, 6.0)])
    assert fitted.alpha_ms >= 0


@pytest.mark.parametrize("samples", [[], [(1, 2)], [(1, 2), (1, 3)], [(1, 0), (2, 1)], [(-1, 1)]])
def test_samples_that_make_no_line(samples: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="volume"):
        Line.through(samples)


def test_chunks_differ_by_one_row_at_most() -> None:
    assert chunk_rows(10, 4) == [2, 3, 2, 3]
    assert chunk_rows(2, 4) == [0, 1, 0, 1]
    assert all(
        sum(chunk_rows(r, n)) == r and max(chunk_rows(r, n)) == -(-r // n)
        for r in range(40)
        for n in range(1, 10)
    )
    with pytest.raises(ValueError, match="0 chunks"):
        chunk_rows(4, 0)


@pytest.mark.parametrize("strategy", WORK)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_plan_does_the_papers_work(strategy: str, direction: str) -> None:
    """In units of one GEMM's, one exchange's and T_DI's copy's time."""
    shape = LayerShape(64, 256, "relu", ranks=2, kept_per_ffn=1)
    one_exchange = 1 / shape.exchange_bytes(1, False)
    one_copy = 1 / (64 * 2)
    costs = LayerCosts(*[Line(one_exchange)] * 2, *[Line(1.0)] * 2, *[Line(one_copy)] * 2)
    times = costs.times(shape, 1)
    streams = Layout(1, strategy).streams(direction)
    sums = [sum(times[op.kind] for op in ops) for ops in streams.values()]
    comm, comp, copy = sums
    gemms, exchanges, copies = WORK[strategy][DIRECTIONS.index(direction)]
    assert (comp, copy) == (gemms, copies)
    # One probability a row travels along.
    assert comm == pytest.approx(exchanges, rel=1 / 64)


def test_times_follow_rows_and_bytes() -> None:
    shape = LayerShape(100, 40, "swiglu", top_k=2, ranks=4)
    costs = LayerCosts(
        Line(1.0), Line(2.0), Line(3.0), Line(5.0), Line(7.0), Line(11.0), fc1_backward=Line(13.0)
    )
    small, large = chunk_times(shape, costs, 15, 2)
    assert large is not small
    assert large[Kind.DISPATCH] == large[Kind.REDISPATCH] == 8 * 101 * 2 * 3 / 4
    assert large[Kind.GRAD_DISPATCH] == 8 * 100 * 2 * 3 / 4
    both = large[Kind.DISPATCH] + large[Kind.GRAD_DISPATCH]
    assert large[Kind.BOTH_DISPATCH] == both
    assert large[Kind.COMBINE] == 2 * large[Kind.GRAD_DISPATCH]
    assert large[Kind.GRAD_COMBINE] == 2 * large[Kind.DISPATCH]
    assert (large[Kind.FC1], large[Kind.FC2], small[Kind.FC2]) == (24, 40, 35)
    assert (large[Kind.FC1_BACKWARD], large[Kind.FC2_BACKWARD]) == (104, 80)
    assert large[Kind.SAVE_MIDDLE] == 7 * 8 * 6 * 40 * 2
    assert large[Kind.LOAD_INPUT] == 11 * 8 * 100 * 2


@pytest.mark.parametrize("field", ["hidden", "ffn", "top_k", "ranks", "element_bytes"])
def test_sizes_are_positive(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        LayerShape(**{"hidden": 8, "ffn": 8, field: 0})


def test_unknown_activation() -> None:
    with pytest.raises(ValueError, match="tanh"):
        LayerShape(8, 8, "tanh")


@pytest.mark.parametrize(
    ("activation", "kappa"), [("swiglu", 6), ("fused-swiglu", 3), ("gelu", 3), ("relu", 2)]
)
def test_saved_bytes_are_what_was_measured(activation: str, kappa: int) -> None:
    """R * (M + 1 + kappa*F) * e, and all but the probabilities goes with a strategy."""
    shape, rows = LayerShape(64, 96, activation, element_bytes=4), 50
    assert saved_bytes(shape, rows, "none") == rows * (64 + 1 + kappa * 96) * 4
    for strategy in ("s1", "s2", "s3", "s4"):
        assert saved_bytes(shape, rows, strategy) == rows * 4


def test_ring_bytes() -> None:
    """R_chunk * e * (2M + kappa*F + 2M) forward; gradients besides in backward."""
    shape = LayerShape(64, 96, "relu")
    layout = Layout(8, "s4")
    assert ring_bytes(shape, 800, layout, FORWARD) == 100 * 2 * (2 * 64 + 2 * 96 + 2 * 64)
    back = 100 * 2 * (2 * 64 + 2 * 96 + 2 * 64 + 2 * 96 + 2 * 64)
    assert ring_bytes(shape, 800, layout, BACKWARD) == back
    deeper = Layout(8, "s4", ring=Ring(3, 2, 3))
    assert ring_bytes(shape, 800, deeper, FORWARD) == 100 * 2 * (3 * 64 + 2 * 2 * 96 + 3 * 64)
    # Without reuse, only what lives besides what is saved.
    assert ring_bytes(shape, 800, Layout(8), FORWARD) == 100 * 2 * 2 * 64
    assert ring_bytes(shape, 800, Layout(8, order=DISPATCH_FIRST), FORWARD) == 100 * 2 * 8 * 64
    assert ring_bytes(shape, 800, Layout(1), FORWARD) == 800 * 2 * 64
    assert temporary_bytes(shape, 801, 8) == 2 * 101 * 64 * 2
    other = footprint(shape, Load(801, copies=8), layout)
    assert other.temporary_bytes == temporary_bytes(shape, 801, 8, 8) == 8 * 101 * 64 * 2


def test_rings_are_paid_once_and_saved_bytes_by_all() -> None:
    shape, layout = LayerShape(64, 96), Layout(4, "s1")
    one = footprint(shape, Load(400), layout)
    many = footprint(shape, Load(400, layers=6, in_flight=4), layout)
    assert many.ring_bytes == one.ring_bytes == ring_bytes(shape, 400, layout, BACKWARD)
    assert many.saved_bytes == 24 * one.saved_bytes
    assert many.peak_bytes == many.saved_bytes + many.ring_bytes + many.temporary_bytes
    with pytest.raises(ValueError, match="layers=0"):
        Load(1, 0)


@pytest.mark.parametrize("strategy", ["s1", "s2", "s3", "s4"])
def test_the_peak_falls_with_more_chunks(strategy: str) -> None:
    shape = LayerShape(64, 96)
    layouts = [Layout(n, strategy) for n in (1, 2, 4, 8, 16)]
    peaks = [footprint(shape, Load(1000), one).peak_bytes for one in layouts]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(
    ("sizes", "pipelined", "sequential"),
    [
        ((2048, 8192, 64, 8192), (16.6, 33.3, 41.6), (4.8, 23.8, 33.3)),
        ((768, 3072, 64, 32768), (23.9, 47.7, 59.7), None),
    ],
)
def test_the_papers_savings(sizes: tuple[int, ...], pipelined: object, sequential: object) -> None:
    """Two of table III's models, n = 2, 4, 8, against both baselines, in per cent."""
    found = [[round(100 * share, 1) for share in savings(*sizes, n)] for n in (2, 4, 8)]
    phi, other = zip(*found)
    assert phi == pipelined
    assert sequential in (None, other)


def test_a_pipelined_layer_without_reuse_needs_more() -> None:
    """16 B*M where the layer that is not pipelined has 13, for many tokens."""
    assert savings(64, 256, 1, 10**9, 1) == pytest.approx((0, -3 / 13), abs=1e-6)
