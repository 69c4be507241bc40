"""What one MoE layer costs on one rank: time per operation and chunk, bytes on device and host.

Names as in MPipeMoE (section III): rows travel T_I -dispatch-> T_DI -fc1-> T_M -fc2-> T_DO
-combine-> T_O. All of it is per rank; where ranks differ, rows are those of the busiest one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

Cost = Callable[[float], float]  # milliseconds for a volume: bytes, or rows

FORWARD, BACKWARD = "forward", "backward"
DIRECTIONS = (FORWARD, BACKWARD)


class Kind(Enum):
    """An operation of one chunk. Backward's adjoints have the names of what they undo."""

    DISPATCH = "S"
    FC1 = "C1"  # with the activation
    FC2 = "C2"
    COMBINE = "R"
    SAVE_INPUT = "OUT_DI"
    SAVE_MIDDLE = "OUT_M"
    GRAD_DISPATCH = "S'"  # dT_O to the experts: combine's adjoint has dispatch's pattern
    FC2_BACKWARD = "B2"  # both of fc2's gradients and the activation's
    FC1_BACKWARD = "B1"  # both of fc1's gradients
    GRAD_COMBINE = "R'"
    REDISPATCH = "S2"
    BOTH_DISPATCH = "S'+S2"  # the two above in one message
    REPEAT_FC1 = "C1again"
    LOAD_INPUT = "IN_DI"
    LOAD_MIDDLE = "IN_M"


Times = Mapping[Kind, float]  # one chunk's milliseconds


@dataclass(frozen=True)
class Line:
    """``max(min_ms, alpha_ms + beta_ms * volume)``: latency, a rate, and a floor below the knee."""

    beta_ms: float
    alpha_ms: float = 0.0
    min_ms: float = 0.0

    def __call__(self, volume: float) -> float:
        return max(self.min_ms, self.alpha_ms + self.beta_ms * volume)

    @classmethod
    def through(cls, samples: Sequence[tuple[float, float]]) -> Line:
        """Fit (volume, milliseconds) pairs; the relative error counts, squared.

        Every sample may be the first one above the knee; those below are averaged.

        Raises:
            ValueError: fewer than two volumes, or a time or volume out of range.
        """
        points = sorted(samples)
        if any(v < 0 or t <= 0 for v, t in points):
            raise ValueError(f"volumes must be >= 0 and times > 0, got {points}")
        if len({v for v, _ in points}) < 2:
            raise ValueError(f"a line needs samples of two volumes at least, got {points}")
        lines = [_fit(points[:knee], points[knee:]) for knee in range(len(points) - 1)]
        return min(lines, key=lambda line: sum((line(v) / t - 1) ** 2 for v, t in points))


def _fit(flat: list[tuple[float, float]], rising: list[tuple[float, float]]) -> Line:
    """Least squares of the relative error: the mean of ``flat`` and a line through ``rising``."""
    weights = [1 / t**2 for _, t in rising]
    total = sum(weights)
    v0 = sum(w * v for w, (v, _) in zip(weights, rising)) / total
    t0 = sum(w * t for w, (_, t) in zip(weights, rising)) / total
    spread = sum(w * (v - v0) ** 2 for w, (v, _) in zip(weights, rising))
    joint = sum(w * (v - v0) * (t - t0) for w, (v, t) in zip(weights, rising))
    beta = max(0.0, joint / spread) if spread > 0 else 0.0
    if t0 - beta * v0 < 0:  # no negative latency: through the origin
        squares = sum(w * v * v for w, (v, _) in zip(weights, rising))
        beta = sum(w * v * t for w, (v, t) in zip(weights, rising)) / squares
        t0 = v0 = 0.0
    floor = sum(1 / t for _, t in flat) / sum(1 / t**2 for _, t in flat) if flat else 0.0
    return Line(beta, t0 - beta * v0, floor)


# Elements that megatron-core's experts keep per row and element of the FFN, besides T_DI and the
# router's probability: the activation's inputs and outputs by unique storage, measured.
KEPT_PER_FFN = {"swiglu": 6, "fused-swiglu": 3, "gelu": 3, "relu": 2}


@dataclass(frozen=True)
class LayerShape:
    """One MoE layer as one rank has it.

    Attributes:
        hidden: elements of a row, M.
        ffn: an expert's FFN width on this rank, F (the paper's H); without the gate's share.
        activation: one of ``KEPT_PER_FFN``; unfused unless it says so.
        top_k: experts a token goes to.
        ranks: over which the experts are spread, N; 1/N of an exchange stays at home.
        element_bytes: 2 for bf16.
        kept_per_ffn: in place of ``KEPT_PER_FFN``'s, for experts that keep less.
    """

    hidden: int
    ffn: int
    activation: str = "swiglu"
    top_k: int = 1
    ranks: int = 8
    element_bytes: int = 2
    kept_per_ffn: float | None = None

    def __post_init__(self) -> None:
        if self.activation not in KEPT_PER_FFN:
            raise ValueError(
                f"the activation must be one of {', '.join(KEPT_PER_FFN)}, got {self.activation!r}"
            )
        for name in ("hidden", "ffn", "top_k", "ranks", "element_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def gated(self) -> bool:
        """fc1 is twice as wide, and half of it gates the other half."""
        return self.activation.endswith("swiglu")

    @property
    def middle(self) -> float:
        """Elements of T_M per row, with all that the activation keeps: kappa * F."""
        kept = KEPT_PER_FFN[self.activation] if self.kept_per_ffn is None else self.kept_per_ffn
        return kept * self.ffn

    @property
    def middle_grad(self) -> float:
        """Elements of T_M's gradients per row: before and after the activation."""
        return (3 if self.gated else 2) * self.ffn

    def exchange_bytes(self, rows: float, probabilities: bool = True) -> float:
        """What travels to the busiest rank; the probabilities go in the same exchange."""
        elements = rows * (self.hidden + probabilities)
        return elements * self.element_bytes * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class LayerCosts:
    """Milliseconds of every kind of operation.

    Attributes:
        dispatch, combine: an all-to-all, by the bytes of ``LayerShape.exchange_bytes``.
        fc1, fc2: all local experts' GEMMs with what belongs to them, by rows.
        to_host, to_device: copies, by bytes.
        fc1_backward, fc2_backward: both gradients, by rows; None: twice forward's.
    """

    dispatch: Cost
    combine: Cost
    fc1: Cost
    fc2: Cost
    to_host: Cost
    to_device: Cost
    fc1_backward: Cost | None = None
    fc2_backward: Cost | None = None

    def times(self, shape: LayerShape, rows: float) -> Times:
        """Milliseconds of every operation of a chunk that has ``rows`` on the busiest rank."""
        with_probabilities, without = (shape.exchange_bytes(rows, p) for p in (True, False))
        input_bytes = rows * shape.hidden * shape.element_bytes
        middle_bytes = rows * shape.middle * shape.element_bytes
        fc1, fc2 = self.fc1(rows), self.fc2(rows)
        dispatch = self.dispatch(with_probabilities)
        return {
            Kind.DISPATCH: dispatch,
            Kind.FC1: fc1,
            Kind.FC2: fc2,
            Kind.COMBINE: self.combine(without),
            Kind.SAVE_INPUT: self.to_host(input_bytes),
            Kind.SAVE_MIDDLE: self.to_host(middle_bytes),
            Kind.GRAD_DISPATCH: self.dispatch(without),
            Kind.FC2_BACKWARD: 2 * fc2 if self.fc2_backward is None else self.fc2_backward(rows),
            Kind.FC1_BACKWARD: 2 * fc1 if self.fc1_backward is None else self.fc1_backward(rows),
            Kind.GRAD_COMBINE: self.combine(with_probabilities),
            Kind.REDISPATCH: dispatch,
            Kind.BOTH_DISPATCH: self.dispatch(
                shape.exchange_bytes(rows) + shape.exchange_bytes(rows, False)
            ),
            Kind.REPEAT_FC1: fc1,
            Kind.LOAD_INPUT: self.to_device(input_bytes),
            Kind.LOAD_MIDDLE: self.to_device(middle_bytes),
        }


def chunk_rows(rows: int, chunks: int) -> list[int]:
    """``rows`` in ``chunks`` parts that differ by one at most; empty ones where there are too few.

    The borders of few parts are among those of many if the one number divides the other.

    Raises:
        ValueError: fewer than 0 rows or than 1 chunk.
    """
    if rows < 0 or chunks < 1:
        raise ValueError(f"{rows} rows cannot be cut into {chunks} chunks")
    cuts = [rows * k // chunks for k in range(chunks + 1)]
    return [after - before for before, after in pairwise(cuts)]


def chunk_times(shape: LayerShape, costs: LayerCosts, rows: int, chunks: int) -> tuple[Times, ...]:
    """Every chunk's times; ``rows`` are those of the whole layer on the busiest rank."""
    parts = chunk_rows(rows, chunks)
    known = {part: costs.times(shape, part) for part in set(parts)}
    return tuple(known[part] for part in parts)
