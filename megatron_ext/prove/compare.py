"""Compares two runs tensor by tensor, and says what the first difference looks like.

Sums in another order differ by rounding. The bound on that is

    eps * 16 * layers * sqrt(terms) * 8**(step - 1)

relative to a tensor's largest element, or to a thousandth of the largest of its kind where the
tensor is nearly zero: eps is the precision's, terms the most that one element sums (tokens of a
batch times the widest matrix), and each step starts from the one before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .tensors import Key, Step, read, read_states

EPSILON = {"double": 2.0**-52, "single": 2.0**-23}
_GROUPS = ("tp", "cp", "dp", "ep", "pp", "microbatches")
_FLOOR = 1e-3


@dataclasses.dataclass(frozen=True)
class Difference:
    """A tensor that is not the reference's.

    Attributes:
        step: of training, from 1.
        key: which tensor.
        relative: largest difference over the tensor's largest element.
        bound: that rounding explains.
        ranks: that have a part of it.
        where: what of it differs.
        cause: what the numbers look like.
    """

    step: int
    key: Key
    relative: float
    bound: float
    ranks: tuple[int, ...]
    where: str
    cause: str

    @property
    def text(self) -> str:
        """A sentence."""
        ranks = ", ".join(map(str, self.ranks)) or "none"
        off = f" is {self.relative:.1e} off (rounding: {self.bound:.0e})"
        off = off if math.isfinite(self.relative) else ""
        return f"step {self.step}: {self.key}{self.where} on rank {ranks}{off}: {self.cause}"

    @property
    def json(self) -> dict[str, Any]:
        """For the report's file."""
        return {
            "step": self.step,
            "pass": self.key.what,
            "name": self.key.name,
            "microbatch": None if self.key.sample < 0 else self.key.sample,
            "relative": self.relative if math.isfinite(self.relative) else None,
            "bound": self.bound,
            "ranks": list(self.ranks),
            "where": self.where.strip(),
            "cause": self.cause,
        }


@dataclasses.dataclass
class Comparison:
    """What a comparison of two runs found.

    Attributes:
        differences: the first of each step and kind, in the order of computation.
        tensors: that were compared.
        largest: difference within the bounds, relative, by kind.
        skipped: what could not be compared, and why.
        absent: what only the reference has.
    """

    differences: list[Difference]
    tensors: int
    largest: dict[str, float]
    skipped: dict[str, str]
    absent: list[str]

    @property
    def equal(self) -> bool:
        """True if nothing differs by more than rounding."""
        return not self.differences

    @property
    def omitted(self) -> list[str]:
        """What was not compared, and why."""
        hidden = [f"{name} (this layout does not show it)" for name in self.absent]
        return hidden + [f"{name}: {why}" for name, why in self.skipped.items()]


def compare(
    folder: Path,
    world: int,
    reference: Path,
    steps: int,
    precision: str,
    alone: int = 1,
    first: int = 1,
) -> Comparison:
    """Compare a recorded run with a reference.

    Args:
        folder: of the run,
        world: on so many ranks.
        reference: its folder,
        steps: trained,
        alone: on so many ranks.
        precision: of ``EPSILON``, or ``exact``: the same bits are expected.
        first: the reference's step that is the run's first.

    Raises:
        OSError: a rank's file is missing.
    """
    result = Comparison([], 0, {}, {}, [])
    before: Step | None = None
    for number in range(first, steps + 1):
        wanted = read(reference, alone, number)
        found = read(folder, world, number - first + 1)
        bound = 0.0 if precision == "exact" else _bound(wanted, precision, number)
        for key, why in {**wanted.skipped, **found.skipped}.items():
            result.skipped.setdefault(_kind(key), why)
        for difference in _differences(wanted, found, before, number, bound, result):
            result.differences.append(difference)
        before = wanted
        if result.differences:
            break
    return result


def lost_states(saved: Path, resumed: Path, world: int, steps: int) -> Iterator[Difference]:
    """What a checkpoint did not keep of schedules and random numbers.

    Args:
        saved: folder of a run that saved after ``steps - 1`` and took one more,
        resumed: of one that took the last step again,
        world: on as many ranks.
        steps: trained by the first.
    """
    for kind, before, after in (("schedule", steps, 1), ("random", steps - 1, 0)):
        found = read_states(resumed, world, after, kind)
        wrong: dict[str, list[int]] = {}
        for (rank, name), tensor in read_states(saved, world, before, kind).items():
            mine = found.get((rank, name))
            if mine is None or not torch.equal(mine, tensor):
                wrong.setdefault(name, []).append(rank)
        for name, ranks in wrong.items():
            cause = "the checkpoint does not have it, or it was not loaded"
            yield Difference(steps, Key("state", name), math.inf, 0.0, tuple(ranks), "", cause)


def _kind(key: Key) -> str:
    return key.name if key.sample < 0 else f"{key.what} of {key.name}"


def _bound(step: Step, precision: str, number: int) -> float:
    """The bound of the module's text, for one step."""
    tokens = widest = 1
    layers = 1
    for key, whole in step.wholes.items():
        if key.what == "F" and key.name.startswith("tokens"):
            tokens = max(tokens, whole.tensor.numel() * (key.sample + 1))
        elif key.what == "gradient":
            widest = max(widest, *whole.tensor.shape)
        if key.what == "F" and "layer " in key.name:
            layers += key.sample == 0
    return EPSILON[precision] * 16 * layers * math.sqrt(tokens * widest) * 8.0 ** (number - 1)


def _differences(
    wanted: Step,
    found: Step,
    before: Step | None,
    number: int,
    bound: float,
    result: Comparison,
) -> Iterator[Difference]:
    """The differences of one step, one of each kind of tensor."""
    largest: dict[str, float] = {}
    for key, whole in wanted.wholes.items():
        largest[key.what] = max(largest.get(key.what, 0.0), _size(whole.tensor))
    kinds: set[str] = set()
    for key, whole in wanted.wholes.items():
        mine = found.wholes.get(key)
        if mine is None:
            if key not in found.skipped:
                if key.sample < 0:
                    if key.what not in kinds:
                        kinds.add(key.what)
                        yield Difference(
                            number, key, math.inf, bound, (), "", "no rank has this parameter"
                        )
                elif (kind := _kind(key)) not in result.absent:
                    result.absent.append(kind)
            continue
        if mine.tensor.shape != whole.tensor.shape and key.sample < 0:
            if key.what not in kinds:
                kinds.add(key.what)
                cause = f"shape {tuple(mine.tensor.shape)} for {tuple(whole.tensor.shape)}"
                yield Difference(number, key, math.inf, bound, tuple(mine.ranks), "", cause)
            continue
        if mine.tensor.shape != whole.tensor.shape:
            result.skipped[_kind(key)] = (
                f"shape {tuple(mine.tensor.shape)}, of one process {tuple(whole.tensor.shape)}"
            )
            continue
        result.tensors += 1
        # Weights are no results of a sum: what they differ by comes from gradients.
        scale = max(_size(whole.tensor), _FLOOR * largest[key.what])
        allowed = bound * (8 if key.what in ("B", "gradient") or key.sample < 0 else 1)
        off = _off(mine.tensor, whole.tensor, scale)
        copies = max((_off(part, mine.tensor[at], scale) for _, at, part in mine.parts), default=0)
        if off <= allowed and copies <= allowed:
            result.largest[key.what] = max(result.largest.get(key.what, 0.0), off, copies)
            continue
        if key.what in kinds:
            continue
        kinds.add(key.what)
        if off <= allowed:
            cause = _copies(mine, found.places, scale, allowed)
            yield Difference(number, key, copies, allowed, tuple(mine.ranks), "", cause)
            continue
        where = _where(mine, whole.tensor, scale, allowed)
        ranks = tuple(rank for rank in mine.ranks if rank in where[1]) or tuple(mine.ranks)
        cause = _cause(key, mine.tensor, wanted, found, before)
        if mine.missing():
            cause = "a part of it is on no rank"
        elif copies > allowed:
            cause += "; " + _copies(mine, found.places, scale, allowed)
        yield Difference(number, key, off, allowed, ranks, where[0], cause)


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _off(a: torch.Tensor, b: torch.Tensor, scale: float) -> float:
    """The largest difference over ``scale``; infinite where either is no number, or that is 0."""
    difference = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
    if math.isnan(difference) or (difference and not scale):
        return math.inf
    return difference / scale if difference else 0.0


def _where(mine: Any, whole: torch.Tensor, scale: float, bound: float) -> tuple[str, list[int]]:
    """(text, ranks) of the parts that differ; an empty text if all do."""
    bad = [(rank, at) for rank, at, part in mine.parts if _off(part, whole[at], scale) > bound]
    text = ""
    if whole.dim() > 1 and len(bad) < len(mine.parts) and bad:
        spans = [f"{s.start}:{s.stop}" if s.start is not None else ":" for s in bad[0][1]]
        text = f" [{', '.join(spans)}]"
    return text, [rank for rank, _ in bad]


def _copies(mine: Any, places: list[dict[str, int]], scale: float, bound: float) -> str:
    """Which ranks hold different values of the same elements."""
    for index, (rank, at, part) in enumerate(mine.parts):
        for other, where, copy in mine.parts[index + 1 :]:
            if where == at and _off(part, copy, scale) > bound:
                groups = [
                    name.upper()
                    for name in ("tp", "cp", "dp", "ep", "pp")
                    if places[rank][f"{name}_rank"] != places[other][f"{name}_rank"]
                ]
                return (
                    f"ranks {rank} and {other} hold different values: a reduction over "
                    f"{' and '.join(groups) or 'their group'} is missing or took another turn"
                )
    return "its copies differ"


def _cause(key: Key, mine: torch.Tensor, wanted: Step, found: Step, before: Step | None) -> str:
    """What the numbers look like, from the most certain to the least."""
    right = wanted.wholes[key].tensor
    if not bool(torch.isfinite(mine).all()):
        return "not a number: a buffer was used before it was filled, or after it was released"
    if _size(mine) == 0.0:
        return "zero: nothing was added to it, or a reduction left it out"
    for other, whole in wanted.wholes.items():
        if other != key and other.what == key.what and _same(mine, whole.tensor):
            if other.name != key.name:
                return f"equal to that of {other.name}: layers or ranks are in another order"
            return f"equal to that of microbatch {other.sample}: messages or data are exchanged"
    if before is not None and key in before.wholes and _same(mine, before.wholes[key].tensor):
        return "equal to that of the step before: it was not updated, or read from an old buffer"
    return _ratio(mine, right, found.places) or _blocks(mine, right) or _inputs(key, found)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and _off(a, b, max(_size(b), 1e-300)) < 1e-7


def _ratio(mine: torch.Tensor, right: torch.Tensor, places: list[dict[str, int]]) -> str:
    """A sentence if one is a multiple of the other."""
    square = float((right * right).sum())
    factor = float((mine * right).sum()) / square if square else 0.0
    if not factor or not _same(mine, right * factor):
        return ""
    sizes = {name: places[0][name] for name in _GROUPS if places[0][name] > 1}
    for size in sorted(set(sizes.values())):
        for value, text in ((size, f"{size}"), (1 / size, f"1/{size}")):
            if abs(factor / value - 1) < 1e-6:
                what = " or ".join(
                    f"{size} {name if name == 'microbatches' else name.upper() + ' ranks'}"
                    for name in sizes
                    if sizes[name] == size
                )
                return (
                    f"{text} times the right value, and there are {what}: "
                    "a scale or a reduction over them is missing or applied twice"
                )
    return f"{factor:.6g} times the right value: a scale is wrong" if mine.dim() else ""


def _blocks(mine: torch.Tensor, right: torch.Tensor) -> str:
    """A sentence if its rows are the right ones in another order."""
    if mine.dim() < 2 or mine.shape[0] < 2:
        return ""
    rows = mine.reshape(mine.shape[0], -1)
    others = right.reshape(right.shape[0], -1)
    distance = torch.cdist(rows, others, p=float("inf"))
    limit = 1e-7 * max(_size(right), 1e-300)
    if bool((distance.min(1).values <= limit).all()):
        return "the right rows in another order: ranks or offsets are exchanged"
    return ""


def _inputs(key: Key, found: Step) -> str:
    """What to look at where the numbers themselves say nothing."""
    if key.what == "F" and key.name.startswith("tokens"):
        return "this rank reads other samples"
    if key.what in ("F", "B") and _received(key, found):
        return "the first of its stage: the message that came from the other one, or its own pass"
    if key.what == "F":
        return "computed from the right input: the module's own arithmetic, or its weights"
    if key.what == "B":
        return "all outputs are right: the backward pass of what follows"
    if key.what == "gradient":
        return "all passes are right: the gradient's sum, reduction or scale"
    if key.what == "log" and "norm" in key.name:
        return "all gradients are right: the norm counts one on too few ranks, or on too many"
    if key.what == "log":
        return "all tensors before it are right: the sum over ranks that is logged"
    if key.what == "evaluation":
        return "all weights are right: the passes of an evaluation, or the sum of its losses"
    return "all gradients are right: clipping, the optimizer, or its update of this parameter"


def _received(key: Key, found: Step) -> bool:
    """True for the first layer of a stage in F, the last in B: its input came in a message."""
    number = key.name.removeprefix("layer ")
    if not number.isdigit():
        return False
    other = key._replace(name=f"layer {int(number) + (1 if key.what == 'B' else -1)}")
    if other not in found.wholes:
        return False
    here, there = (
        {found.places[rank]["pp_rank"] for rank in found.wholes[one].ranks} for one in (key, other)
    )
    return here != there
