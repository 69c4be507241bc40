"""Comparison of a recorded run with one process, by name.

In float64, sums in another order differ by far less than ``BOUND`` of a tensor's largest element.
A tensor that is nearly zero is measured by a thousandth of the largest of its kind.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

BOUND = 1e-10
_FLOOR = 1e-3


@dataclass
class Comparison:
    """What a comparison of two runs found.

    Attributes:
        differences: a sentence for each tensor or loss that differs, of the first step that has
            any, in the order losses, gradients, weights.
        compared: number of tensors and losses.
        largest: relative difference found, by kind (``loss``, ``gradient``, ``weight``).
        skipped: names that could not be compared.
    """

    differences: list[str] = field(default_factory=list)
    compared: int = 0
    largest: dict[str, float] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)

    def add(self, step: int, kind: str, what: str, off: float, bound: float) -> None:
        """Count one relative difference."""
        self.compared += 1
        self.largest[kind] = max(self.largest.get(kind, 0.0), off)
        if not off <= bound:  # NaN is none of both
            self.differences.append(f"step {step}: {what} is {off:.1e} off")


def compare(
    folder: Path, world: int, reference: Path, steps: int, bound: float = BOUND, alone: int = 1
) -> Comparison:
    """Compare the run of ``world`` ranks in ``folder`` with that of ``alone`` in ``reference``.

    Raises:
        OSError: a rank's file is missing.
    """
    result = Comparison()
    for step in range(1, steps + 1):
        mine, right = losses(folder)[step - 1], losses(reference)[step - 1]
        for name, value in right.items():
            scale = max(abs(value), 1e-300)
            off = abs(mine.get(name, float("nan")) - value) / scale
            result.add(step, "loss", name, off, bound)
        whole, _, _ = read(reference, alone, step)
        found, copies, result.skipped = read(folder, world, step)
        sizes: dict[str, float] = {}
        for (kind, _), tensor in whole.items():
            sizes[kind] = max(sizes.get(kind, 0.0), float(tensor.abs().max()))
        for key in sorted(whole):
            kind, name = key
            if name in result.skipped:
                continue
            what, own = f"{kind} of {name}", found.get(key)
            if own is None or own.shape != whole[key].shape:
                result.differences.append(f"step {step}: {what} is on no rank")
                continue
            scale = max(float(whole[key].abs().max()), _FLOOR * sizes[kind]) or 1.0
            off = float((own - whole[key]).abs().max()) / scale
            result.add(step, kind, what, off, bound)
            if (spread := copies.get(key, 0.0) / scale) > bound:
                ranks = f"{what}, between the ranks that have a copy,"
                result.differences.append(f"step {step}: {ranks} is {spread:.1e} off")
        if result.differences:
            break
    return result


Tensors = dict[tuple[str, str], torch.Tensor]


def read(
    folder: Path, world: int, step: int
) -> tuple[Tensors, dict[tuple[str, str], float], set[str]]:
    """One step's tensors of all ranks, put together to what one process has.

    Returns:
        by (kind, name): the tensors, NaN where no rank has a part; the largest difference between
        copies of a part; names of what has no place in checkpoints.
    """
    tensors: Tensors = {}
    copies: dict[tuple[str, str], float] = {}
    skipped: set[str] = set()
    for rank in range(world):
        file: list[Any] = torch.load(folder / f"rank{rank}-step{step}.pt", weights_only=True)
        for kind, name, offset, shape, part in file:
            if offset is None:
                skipped.add(name)
                continue
            if (kind, name) not in tensors:
                empty = torch.full(shape, float("nan"), dtype=torch.float64)
                tensors[kind, name] = empty
            where = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
            there, part = tensors[kind, name][where], part.double()
            if bool(torch.isnan(there).any()):
                tensors[kind, name][where] = part
            elif part.numel():
                off = float((there - part).abs().max())
                copies[kind, name] = max(copies.get((kind, name), 0.0), off)
    return tensors, copies, skipped


def losses(folder: Path) -> list[dict[str, float]]:
    """Losses and the gradients' norm of every step, as the launcher's ``--loss-log`` has them."""
    found = []
    for line in (folder / "losses.jsonl").read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        values = {**data["losses"], "gradient norm": data["grad_norm"]}
        found.append({k: float.fromhex(v) for k, v in values.items() if v is not None})
    return found
