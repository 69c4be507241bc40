"""Division of the layers over stages, in Megatron's words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .._input import shown
from .model import Job, PlanError

_LONGEST = 100_000  # characters


@dataclass(frozen=True)
class Split:
    """Layers of every stage, in model order; the embedding is on the first, the loss on the last.

    Attributes:
        counts: transformer layers per stage.
        even: Megatron's own split, without a layout flag.
    """

    counts: tuple[int, ...]
    even: bool = False

    @property
    def first_layers(self) -> list[int]:
        """The number, from 0, of each stage's first layer."""
        return [sum(self.counts[:stage]) for stage in range(len(self.counts))]

    def text(self) -> str:
        """For ``--pipeline-model-parallel-layout``."""
        return layout_text(self.counts)


def layout_text(counts: Sequence[int]) -> str:
    """The layout string of stages with these numbers of layers, in model order."""
    texts = ["t" * count for count in counts]
    texts[0] = "E" + texts[0]
    texts[-1] += "L"
    return "|".join(texts)


def even_split(layers: int, stages: int) -> Split | None:
    """Equally many layers on every stage; None if that cannot be."""
    return None if layers % stages else Split((layers // stages,) * stages, even=True)


def read_layout(text: str, layers: int) -> Split:
    """The split of ``--pipeline-model-parallel-layout``.

    Understands what Megatron's own parser does: ``E`` embedding, ``t`` layer, ``L`` loss, ``|``
    between stages, commas for reading, ``x*3`` and ``(xy)*3`` for repetition.

    Raises:
        PlanError: it is no such string, or lists another number of layers.
    """
    flag = f"--pipeline-model-parallel-layout {shown(text)}"
    plain = text.replace(",", "").replace(" ", "")
    # One layer's repetitions first, then those of what stands in brackets.
    for pattern in (r"([^()*\d])\*(\d+)", r"\(([^()*]*)\)\*(\d+)"):
        while (found := re.search(pattern, plain)) is not None:
            if len(plain) + len(found[1]) * int(found[2][:9]) > _LONGEST:
                raise PlanError(
                    f"{flag} stands for more than "
                    f"{_LONGEST} layers and stages; --num-layers is {layers}"
                )
            plain = plain[: found.start()] + found[1] * int(found[2]) + plain[found.end() :]
    if re.search(r"[^EtL|]", plain) or not plain.startswith("E") or not plain.endswith("L"):
        raise PlanError(f"{flag}: plan reads E, t, L, | and repetitions, E first and L last")
    stages = plain.split("|")
    if any("E" in stage for stage in stages[1:]) or any("L" in stage for stage in stages[:-1]):
        raise PlanError(
            f"{flag}: plan expects the embedding on the first and the loss on the last stage"
        )
    counts = tuple(stage.count("t") for stage in stages)
    if sum(counts) != layers:
        raise PlanError(f"{flag} has {sum(counts)} layers, but --num-layers is {layers}")
    return Split(counts)


def split_of(job: Job, stages: int) -> Split | None:
    """The split that the job's own flags ask for with so many stages; None if it has none.

    Raises:
        PlanError: as ``read_layout``.
    """
    if job.layout is None:
        return even_split(job.num_layers, stages)
    split = read_layout(job.layout, job.num_layers)
    return split if len(split.counts) == stages else None
