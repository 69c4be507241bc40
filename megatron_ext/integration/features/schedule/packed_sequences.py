"""Packed sequences: every stage has the lengths of the documents, and counts them once.

Attention over packed documents (``thd``) needs their lengths on all stages, so ``get_batch`` of
Megatron's scripts fetches on all of them. With ``--sft`` the scripts build a dataset on every
stage, but with ``--dataloader-inter-document-masking`` on the first and the last alone: a stage
between them, as a V or virtual stages have already on two ranks, would find no data.

Every forward step adds its documents to what Megatron reports as throughput, so with several model
chunks a rank each document counts as often.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ...feature import Run
from ...hooks import Hook
from ...targets import DATASETS, SEQLEN_COUNT


def hooks(run: Run) -> Sequence[Hook]:
    """What ``run`` needs; nothing where Megatron's loader packs no documents."""
    found: list[Hook] = []
    masked = getattr(run.args, "dataloader_inter_document_masking", False)
    if masked:
        found.append(DATASET)
    if (masked or getattr(run.args, "sft", False)) and run.chunks > 1 and SEQLEN_COUNT.exists:
        found.append(count(run.chunks))
    return found


def _builder_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(
        self: Any,
        cls: Any,
        sizes: Any,
        is_built_on_rank: Callable[[], bool],
        config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        from megatron.core import parallel_state

        def on_all_stages() -> bool:
            return int(parallel_state.get_tensor_model_parallel_rank()) == 0

        original(self, cls, sizes, on_all_stages, config, *args, **kwargs)

    return __init__


DATASET = Hook(
    DATASETS,
    _builder_init,
    "stages between the first and the last would have no lengths of packed documents",
)


def count(chunks: int) -> Hook:
    """Counts documents once that were seen by ``chunks`` model chunks of each rank."""

    def make(original: Callable[[], tuple[float | None, float | None]]) -> Callable[[], Any]:
        @functools.wraps(original)
        def consume_seqlen_stats_in_iteration() -> tuple[float | None, float | None]:
            tokens, squares = original()
            if tokens is None or squares is None:
                return None, None
            return tokens / chunks, squares / chunks

        return consume_seqlen_stats_in_iteration

    return Hook(SEQLEN_COUNT, make, "throughput would be a multiple of the truth")
