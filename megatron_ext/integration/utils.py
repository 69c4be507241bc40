"""Small helpers that several features share."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..runtime.communicators import timeout_of
from ..runtime.draws import Draws
from ..runtime.watchdog import process_watchdog
from .arguments import MegatronArgs
from .errors import ConfigError

# For what looks at the pass that runs: which one that is, is not known when a layer is compiled.
untraced: Callable[[Any], Any] = torch.compiler.disable


def _tracked_states() -> list[Any]:
    """Of the generators that Megatron's random state tracker switches between, if it is loaded."""
    module = sys.modules.get("megatron.core.tensor_parallel")
    return [] if module is None else [*module.get_cuda_rng_tracker().get_states().values()]


Draws.others = _tracked_states


def nested(model: Any) -> Iterator[Any]:
    """What is around a model (data parallelism, mixed precision), outermost first, and itself."""
    yield model
    while hasattr(model, "module"):
        model = model.module
        yield model


def unwrapped(model: Any) -> Any:
    """The model inside Megatron's wrappers."""
    return [*nested(model)][-1]


def chunks_of(model: Any) -> list[Any]:
    """A model as Megatron passes it, one chunk or a list of them, as a list."""
    return model if isinstance(model, list) else [model]


def device_of(models: Sequence[Any]) -> torch.device:
    """Where this rank computes: its first parameter's, or, without any, Megatron's choice.

    Args:
        models: chunks; a layout may leave some of them empty.
    """
    for model in models:
        for parameter in model.parameters():
            found: torch.device = parameter.device
            return found
    return torch.empty(0, device=torch.cuda.current_device()).device


def time_limit_minutes(group: Any, device: torch.device) -> float:
    """What the trainer lets an operation of ``group``, or of the whole job, take at most."""
    every = [group, *([dist.group.WORLD] if dist.group.WORLD is not None else [])]
    return max(timeout_of(one, device).total_seconds() for one in every) / 60


class LastModels:
    """The models of the last time; it does not keep them alive."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[Any]] = []

    def are(self, models: Sequence[Any]) -> bool:
        """True if they were ``models``."""
        held = [model() for model in self._models]
        return len(held) == len(models) and all(a is b for a, b in zip(held, models))

    def set(self, models: Sequence[Any]) -> None:
        """From now on they are ``models``."""
        self._models = [weakref.ref(model) for model in models]


class Wrappers:
    """Wrappers of the data iterators of the last call: the same one for the same one.

    Args:
        kind: makes one of an iterator, its ``source``.

    Attributes:
        of_chunks: of the model's chunks; None where one has no data.
    """

    def __init__(self, kind: Callable[[Any], Any]) -> None:
        self._kind = kind
        self.of_chunks: list[Any] = []

    def over(self, iterators: Sequence[Any]) -> list[Any]:
        """``iterators``, wrapped."""
        known = {id(one.source): one for one in self.there}
        self.of_chunks = [
            None if it is None else known.get(id(it)) or self._kind(it) for it in iterators
        ]
        return self.of_chunks

    @property
    def there(self) -> list[Any]:
        """Those of chunks that have data."""
        return [one for one in self.of_chunks if one is not None]


def watched(detail: str) -> AbstractContextManager[None]:
    """The watchdog around what waits for other ranks: no rank may wait without end or report.

    Args:
        detail: what is waited for, for the report.
    """
    return process_watchdog().armed(detail)


def gather(value: Any, group: Any = None) -> list[Any]:
    """Every rank's value, in rank order; without a group, of all ranks of the job."""
    every: list[Any] = [None] * dist.get_world_size(group)
    with watched("for other ranks to agree"):
        dist.all_gather_object(every, value, group=group)
    return every


def gather_over(value: Any, groups: Sequence[Any]) -> list[Any]:
    """The values of all ranks that run a call together, by their rank in the job.

    Data replicas take no part: they may have other calls.

    Args:
        groups: of the call (see ``groups_of_call``).
    """
    known = {dist.get_rank(): value}
    for group in groups:
        for others in gather(known, group):
            known |= others
    return [known[rank] for rank in sorted(known)]


def full_batch(args: MegatronArgs) -> int | None:
    """Samples of the largest batch: ``--global-batch-size``, or the largest of a schedule of sizes
    (``--step-batch-size-schedule``, which Megatron allows only without the former); None where
    neither says it, before Megatron has set its default."""
    steps: str | None = args.step_batch_size_schedule
    if not steps:
        return args.global_batch_size
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    try:
        sizes = StepBatchsizeNumMicroBatchesCalculator._parse_schedule(steps, None)
        return max(int(size) for _, size in sizes)
    except ValueError:
        raise ConfigError(
            f"--step-batch-size-schedule {steps!r} is not of the form 'THRESHOLD:SIZE ...'; write "
            "e.g. '0:768 250B:1536'"
        ) from None


def most_microbatches(args: MegatronArgs) -> int:
    """Of a step with the full batch; ``args`` are validated by Megatron."""
    per_step = args.micro_batch_size * args.data_parallel_size
    return (full_batch(args) or per_step) // per_step


def file_contents(path: str) -> str:
    """A file by its contents, since its path may differ between nodes."""
    try:
        return f"a file with SHA-256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]}"
    except OSError as error:
        return f"a file that cannot be read ({error.strerror})"


def has_second_embedding(last_chunk: Any) -> bool:
    """True if a model's last stage has a copy of the word embeddings: tied weights, or MTP."""
    tied = getattr(last_chunk, "share_embeddings_and_output_weights", False)
    return bool(tied or getattr(last_chunk, "mtp_process", False))


def tied_embeddings(
    pp_rank: int, chunks: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Under V placement both copies of the word embeddings, of the first and the last chunk of rank
    0; None on a rank, or of a model, without."""
    if pp_rank != 0 or not has_second_embedding(chunks[-1]):
        return None
    first, last = (chunk.shared_embedding_or_output_weight() for chunk in (chunks[0], chunks[-1]))
    return None if first is None or last is None else (first, last)
