"""What Megatron reports of packed documents where a rank has several model chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.integration.features.schedule import Schedule
from megatron_ext.integration.targets import Target
from tests.support.stand_ins import started


def hooks_of(monkeypatch: pytest.MonkeyPatch, chunks: int, **flags: Any) -> dict[str, Any]:
    """The hooks of a run with ``flags``, by target."""
    monkeypatch.setattr(Target, "exists", True)
    args: Any = SimpleNamespace(**flags)
    schedule = started(Schedule, args=args, training=False, chunks=chunks, pipeline=object())
    hooks = schedule.hooks()
    return {hook.target.places[0]: hook for hook in hooks}


def test_each_document_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks a rank see every document twice; a step without documents has no counts."""
    counts: list[tuple[float | None, float | None]] = [(20.0, 84.0), (None, None)]
    [(target, hook)] = hooks_of(monkeypatch, 2, sft=True).items()
    assert target == "megatron.training.training:consume_seqlen_stats_in_iteration"
    consume = hook.make(lambda: counts.pop(0))
    assert consume() == (10.0, 42.0)
    assert consume() == (None, None)


def test_hooks_only_where_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk counts right as it is, and ``--sft`` builds datasets on all stages itself."""
    assert not hooks_of(monkeypatch, 2)
    assert not hooks_of(monkeypatch, 1, sft=True)
    masked = hooks_of(monkeypatch, 1, dataloader_inter_document_masking=True)
    assert [target.split(":")[1] for target in masked] == ["BlendedMegatronDatasetBuilder.__init__"]
    assert len(hooks_of(monkeypatch, 2, dataloader_inter_document_masking=True)) == 2
