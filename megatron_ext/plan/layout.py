"""Division of the layers over stages, in Megatron's words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from .._input import shown
from .model import Job, PlanError

_LONGEST = 100_000  # characters


class Stage(NamedTuple):
    """What one stage holds.

    Attributes:
        layers: numbers of its decoder layers, from 0.
        first, last: it has the embedding, or the output layer and the loss.
        predicts: it has the layers of multi-token prediction, if the model has some.
    """

    layers: range
    first: bool = False
    last: bool = False
    predicts: bool = False


@dataclass(frozen=True)
class Split:
    """Layers of every stage, in model order; the embedding is on the first, the loss on the last.

    Attributes:
        counts: decoder layers per stage.
        even: Megatron's own split, without a layout flag.
        predicts: the stage with multi-token prediction; -1 is the last.
    """

    counts: tuple[int, ...]
    even: bool = False
    predicts: int = -1

    @property
    def first_layers(self) -> list[int]:
        """The number, from 0, of each stage's first layer."""
        return [sum(self.counts[:stage]) for stage in range(len(self.counts))]

    @property
    def stages(self) -> list[Stage]:
        """Every stage."""
        last = len(self.counts) - 1
        return [
            Stage(range(begin, begin + n), s == 0, s == last, s == self.predicts % (last + 1))
            for s, (begin, n) in enumerate(zip(self.first_layers, self.counts))
        ]

    def text(self, predictions: int = 0) -> str:
        """For ``--pipeline-model-parallel-layout``, with so many layers of prediction."""
        texts = ["t" * count for count in self.counts]
        texts[0] = "E" + texts[0]
        texts[self.predicts] += "m" * predictions
        texts[-1] += "L"
        return "|".join(texts)

    def flag(self, job: Job) -> tuple[str, str]:
        """The flag of a layout other than Megatron's even one, and its value."""
        return "--pipeline-model-parallel-layout", self.text(len(job.mtp_layers))


def even_split(layers: int, stages: int) -> Split | None:
    """Equally many layers on every stage; None if that cannot be."""
    return None if layers % stages else Split((layers // stages,) * stages, even=True)


def _spread(job: Job, stages: int, chunks: int) -> Split | None:
    """Megatron's own split: evenly, but for what the job's flags say of both ends."""
    counts = spread(
        job.num_layers,
        stages,
        job.decoder_first_pipeline_num_layers,
        job.decoder_last_pipeline_num_layers,
        (
            int(job.account_for_embedding_in_pipeline_split),
            int(job.account_for_loss_in_pipeline_split),
        ),
        chunks,
    )
    return None if counts is None else Split(tuple(counts), even=True)


def spread(
    layers: int,
    stages: int,
    first: int | None = None,
    last: int | None = None,
    taken: tuple[int, int] = (0, 0),
    chunks: int = 1,
) -> list[int] | None:
    """Layers of each stage, evenly but for the first and the last; None if that cannot be.

    Args:
        first, last: layers of the first and the last stage; None: as the others.
        taken: 1 where the embedding, and where the loss, counts as a layer.
        chunks: of a rank in Megatron's own placement, where first and last are all chunks of a
            rank, in equal parts; 1 where stages are placed as a V.
    """
    if chunks > 1 and (first, last) != (None, None):
        ranks = spread(layers, stages // chunks, first, last, taken)
        if ranks is None or any(count % chunks for count in ranks):
            return None
        return [count // chunks for count in ranks] * chunks
    middle = layers + sum(taken) - (first or 0) - (last or 0)
    even = stages - (first is not None) - (last is not None)
    each, rest = divmod(middle, even) if even else (0, middle)
    if layers < 1 or middle < 0 or rest or each < max(taken):
        return None
    counts = [each] * stages
    counts[0] = each - taken[0] if first is None else first
    counts[-1] = each - taken[1] if last is None else last
    return counts


def expanded(text: str) -> str:
    """A pipeline layout without commas, its repetitions written out.

    Raises:
        ValueError: it stands for more than ``_LONGEST`` layers and stages.
    """
    plain = text.replace(",", "").replace(" ", "")
    # One layer's repetitions first, then those of what stands in brackets.
    for pattern in (r"([^()*\d])\*(\d+)", r"\(([^()*]*)\)\*(\d+)"):
        while (found := re.search(pattern, plain)) is not None:
            if len(plain) + len(found[1]) * int(found[2][:9]) > _LONGEST:
                raise ValueError(f"stands for more than {_LONGEST} layers and stages")
            plain = plain[: found.start()] + found[1] * int(found[2]) + plain[found.end() :]
    return plain


def read_layout(text: str, layers: int) -> Split:
    """The split of ``--pipeline-model-parallel-layout``.

    Understands what Megatron's own parser does: ``E`` embedding, ``t`` layer, ``m`` multi-token
    prediction, ``L`` loss, ``|`` between stages, commas for reading, ``x*3`` and ``(xy)*3`` for
    repetition.

    Raises:
        PlanError: it is no such string, or lists another number of layers.
    """
    flag = f"--pipeline-model-parallel-layout {shown(text)}"
    try:
        plain = expanded(text)
    except ValueError as error:
        raise PlanError(f"{flag} {error}; --num-layers is {layers}") from None
    if re.search(r"[^EtmL|]", plain) or not plain.startswith("E") or not plain.endswith("L"):
        raise PlanError(f"{flag}: plan reads E, t, m, L, | and repetitions, E first and L last")
    stages = plain.split("|")
    if any("E" in stage for stage in stages[1:]) or any("L" in stage for stage in stages[:-1]):
        raise PlanError(
            f"{flag}: plan expects the embedding on the first and the loss on the last stage"
        )
    predicting = [number for number, stage in enumerate(stages) if "m" in stage]
    if len(predicting) > 1:
        raise PlanError(f"{flag}: plan expects all of multi-token prediction (m) on one stage")
    counts = tuple(stage.count("t") for stage in stages)
    if sum(counts) != layers:
        raise PlanError(f"{flag} has {sum(counts)} layers, but --num-layers is {layers}")
    where = predicting[0] if predicting and predicting[0] != len(stages) - 1 else -1
    return Split(counts, predicts=where)


def check_stages(job: Job) -> None:
    """Refuse given stages that the ranks do not share evenly, as Megatron does.

    Raises:
        PlanError: with the numbers and the fix; or as ``read_layout``.
    """
    if job.layout is None or "|" not in job.layout:
        return
    pp, counts = job.pipeline_model_parallel_size, read_layout(job.layout, job.num_layers).counts
    if len(counts) % pp:
        raise PlanError(
            f"--pipeline-model-parallel-layout lists {len(counts)} stages, no multiple of "
            f"--pipeline-model-parallel-size {pp}; give equally many for every rank"
        )


def split_of(job: Job, stages: int, chunks: int = 1) -> Split | None:
    """The split that the job's own flags ask for with so many stages; None if it has none.

    Args:
        chunks: as ``spread``.

    Raises:
        PlanError: as ``read_layout``.
    """
    if job.layout is None:
        return _spread(job, stages, chunks)
    split = read_layout(job.layout, job.num_layers)
    return split if len(split.counts) == stages else None
