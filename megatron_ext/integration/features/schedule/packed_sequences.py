"""Packed sequences: every stage has the lengths of the documents, and counts them once.

Attention over packed documents (``thd``) needs their lengths on all stages, so ``get_batch`` of
Megatron's scripts fetches on all of them. With ``--sft`` the scripts build a dataset on every
stage, but with ``--dataloader-inter-document-masking`` on the first and the last alone: a stage
between them, as a V or virtual stages have already on two ranks, would find no data.

Every forward step adds its documents to what Megatron reports as throughput, so with several model
chunks a rank each document counts as often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...feature import Run
from ...hooks import Hook, around
from ...targets import DATASETS, SEQLEN_COUNT


def hooks(run: Run) -> Sequence[Hook]:
    """What ``run`` needs; nothing where Megatron's loader packs no documents."""
    found: list[Hook] = []
    masked = getattr(run.args, "dataloader_inter_document_masking", False)
    if masked:
        why = "stages between the first and the last would have no lengths of packed documents"
        found.append(Hook(DATASETS, around(_on_all_stages), why))
    if (masked or getattr(run.args, "sft", False)) and run.chunks > 1 and SEQLEN_COUNT.exists:

        def once(original: Callable[[], tuple[float | None, ...]]) -> tuple[float | None, ...]:
            counts = original()
            return tuple(None if None in counts else count / run.chunks for count in counts)  # type: ignore[operator]

        found.append(
            Hook(SEQLEN_COUNT, around(once), "throughput would be a multiple of the truth")
        )
    return found


def _on_all_stages(
    original: Callable[..., None],
    builder: Any,
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

    original(builder, cls, sizes, on_all_stages, config, *args, **kwargs)
