"""One step's tensors of all ranks, put together to what one process would have."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Key(NamedTuple):
    """What a tensor is.

    Attributes:
        what: ``F`` (a module's output), ``B`` (its gradient), ``gradient``, ``weight``,
            ``exp_avg`` and other state of the optimizer, ``buffer``, ``log`` (what Megatron
            logs), ``evaluation`` (a loss after the last step), ``state`` (of a schedule or of
            random numbers).
        name: the module's, or the parameter's in checkpoints.
        sample: the microbatch, counted as one process does; -1 for parameters.
    """

    what: str
    name: str
    sample: int = -1

    def __str__(self) -> str:
        if self.what == "log":
            return f"the logged {self.name}"
        if self.what == "evaluation":
            return f"the evaluation's {self.name}"
        if self.what == "state":
            return f"the state of {self.name}"
        if self.sample < 0:
            return f"{self.what} of {self.name}"
        tensor = "output" if self.what == "F" else "output's gradient"
        return f"{tensor} of {self.name}, microbatch {self.sample} ({self.what})"


@dataclasses.dataclass
class Whole:
    """A tensor and where it comes from.

    Attributes:
        tensor: put together; NaN where no rank had a part.
        parts: (rank, slices, tensor) as the ranks wrote them.
    """

    tensor: torch.Tensor
    parts: list[tuple[int, tuple[slice, ...], torch.Tensor]]

    @property
    def ranks(self) -> list[int]:
        """Those that have a part."""
        return sorted({rank for rank, _, _ in self.parts})

    def missing(self) -> bool:
        """True if some part is on no rank."""
        covered = torch.zeros(self.tensor.shape, dtype=torch.bool)
        for _, where, _ in self.parts:
            covered[where] = True
        return not bool(covered.all())


@dataclasses.dataclass
class Step:
    """One training step.

    Attributes:
        wholes: by key, in the order of the first rank that wrote each.
        places: of the ranks.
        skipped: keys whose parts do not fit together, and why.
    """

    wholes: dict[Key, Whole]
    places: list[dict[str, int]]
    skipped: dict[Key, str]


def read(folder: Path, world: int, step: int) -> Step:
    """Put a step together from the ranks' files.

    Raises:
        OSError: a file is missing.
    """
    files = [torch.load(folder / f"rank{r}-step{step}.pt", weights_only=True) for r in range(world)]
    places = [file["place"] for file in files]
    parts: dict[Key, list[Any]] = {}
    shapes: dict[Key, tuple[int, ...]] = {}
    skipped: dict[Key, str] = {}
    for rank, file in enumerate(files):
        place = file["place"]
        lengths = [b - a for a, b in pairwise([0, *file["ends"]])] or [place["sequence"]]
        for what, microbatch, number, name, tensor in file["passes"]:
            label = f"{name}, slice {number}" if file["ends"] else name
            key = Key(what, label, microbatch * place["dp"] + place["dp_rank"])
            try:
                shape, pieces = _in_pass(name, tensor, place, lengths[number])
            except ValueError as error:
                skipped[key] = str(error)
                continue
            if what == "B" and not place["per_token"]:
                # The mean over data and context-parallel ranks comes later.
                pieces = [(where, piece / (place["dp"] * place["cp"])) for where, piece in pieces]
            shapes.setdefault(key, shape)
            if shapes[key] != shape:
                skipped[key] = f"shapes {shapes[key]} and {shape}"
                continue
            parts.setdefault(key, []).extend((rank, where, piece) for where, piece in pieces)
        for what, name, offset, shape, tensor in file["values"]:
            key = Key(what, name)
            if offset is None:
                skipped[key] = "no name in checkpoints"
                continue
            where = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
            shapes[key] = shape
            parts.setdefault(key, []).append((rank, where, tensor))
    logged = {Key("log", name): value for name, value in _logged(folder, step).items()}
    for key, value in {**logged, **_evaluated(folder, world, step)}.items():
        shapes[key], parts[key] = (), [(world - 1, (), torch.tensor(value, dtype=torch.float64))]
    wholes = {}
    for key, given in parts.items():
        if key in skipped:
            continue
        tensor = torch.full(shapes[key], float("nan"), dtype=torch.float64)
        for _, where, part in reversed(given):  # the first rank's part counts
            tensor[where] = part.double()
        wholes[key] = Whole(tensor, given)
    # In the order of a step; passes are in the order in which they were written.
    after = {"gradient": 1, "log": 2, "evaluation": 4}
    order = sorted(wholes, key=lambda key: after.get(key.what, 0 if key.sample >= 0 else 3))
    return Step({key: wholes[key] for key in order}, places, skipped)


def _logged(folder: Path, step: int) -> dict[str, float]:
    """Losses and the gradients' norm of a step, as the launcher's ``--loss-log`` has them."""
    try:
        lines = (folder / "losses.jsonl").read_text().splitlines()
        line = json.loads(lines[step - 1])
    except (OSError, IndexError):
        return {}
    found = {**line["losses"], "gradient norm": line["grad_norm"]}
    return {name: float.fromhex(value) for name, value in found.items() if value is not None}


def _evaluated(folder: Path, world: int, step: int) -> dict[Key, float]:
    """Losses of an evaluation after this step, as the last rank that has them prints them."""
    for rank in reversed(range(world)):
        path = folder / f"rank{rank}-evaluation.pt"
        if path.is_file():
            found = torch.load(path, weights_only=True)
            here = found["losses"].items() if found["step"] == step else ()
            return {Key("evaluation", name): float(loss) for name, loss in here}
    return {}


def read_states(folder: Path, world: int, step: int, kind: str) -> dict[tuple[int, str], Any]:
    """(rank, name) -> tensor of the states of this ``kind`` (``schedule``, ``random``).

    Args:
        folder: of the run.
        world: its ranks.
        step: that the states were written in; 0: at the start.
        kind: of the states.
    """
    found: dict[tuple[int, str], Any] = {}
    for rank in range(world):
        path = folder / f"rank{rank}-step{step}.pt"
        if path.is_file():
            states = torch.load(path, weights_only=True)["states"].get(kind, {})
            found |= {(rank, name): tensor for name, tensor in states.items()}
    return found


def _in_pass(
    name: str, tensor: torch.Tensor, place: dict[str, int], tokens: int
) -> tuple[tuple[int, ...], list[tuple[tuple[slice, ...], torch.Tensor]]]:
    """(shape of the whole, parts) of what a rank had of one microbatch, or of a slice of one.

    Args:
        tokens: of the slice; the model's input and its losses are the microbatch's.

    Raises:
        ValueError: its shape is that of no division known here.
    """
    axis = 1 if name in ("tokens", "loss") else 0
    cp, tp = place["cp"], place["tp"]
    sequence = place["sequence"] if axis else tokens
    if tensor.dim() <= axis:
        raise ValueError(f"shape {tuple(tensor.shape)}")
    own, shape = tensor.shape[axis], list(tensor.shape)
    shape[axis] = sequence
    start, width = 0, None
    if name.startswith("output_layer") and own == sequence // cp:
        shape[-1] *= tp
        width = tensor.shape[-1]
        start = place["tp_rank"] * width
    elif own == sequence // cp // tp and place["sequence_parallel"] and tp > 1:
        start = place["tp_rank"] * own
    elif own != sequence // cp:
        raise ValueError(f"shape {tuple(tensor.shape)} at sequence length {sequence}")
    pieces = []
    for index in range(own):
        local = index if width is not None else start + index
        pieces.append((_position(local, sequence, cp, place["cp_rank"]), index))
    parts = []
    for at, index, number in _runs(pieces):
        where = [slice(None)] * tensor.dim()
        where[axis] = slice(at, at + number)
        if width is not None:
            where[-1] = slice(start, start + width)
        parts.append((tuple(where), tensor.narrow(axis, index, number)))
    return tuple(shape), parts


def _position(local: int, sequence: int, cp: int, rank: int) -> int:
    """Where a context-parallel rank's token stands: each has a chunk of the first half and its
    mirror image of the second, so that causal attention is balanced."""
    if cp == 1:
        return local
    chunk = sequence // (2 * cp)
    index, at = divmod(local, chunk)
    return (rank if index == 0 else 2 * cp - 1 - rank) * chunk + at


def _runs(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(position, index, length) of stretches where both count up."""
    runs: list[list[int]] = []
    for at, index in pairs:
        if runs and runs[-1][0] + runs[-1][2] == at:
            runs[-1][2] += 1
        else:
            runs.append([at, index, 1])
    return [(at, index, number) for at, index, number in runs]
