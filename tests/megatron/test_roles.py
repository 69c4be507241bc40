"""Who holds an end of the model under V placement, asked in every way that trainers ask."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import utils

from megatron_ext.integration.errors import ConfigError
from megatron_ext.integration.features.v_placement import VPlacement
from megatron_ext.integration.features.v_placement.roles import Roles
from megatron_ext.integration.hooks import Hooks, declared
from megatron_ext.integration.targets import BRIDGE_EMBEDDINGS
from tests.support.stand_ins import started

PP, CHUNKS = 4, 2


@pytest.fixture
def on_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``on_rank(r)``: this process is pipeline rank r of four, with the hooks in force; ``running``
    is that of ``Roles``."""
    hooks, roles = Hooks("a test"), Roles()
    hooks.apply(declared(roles))

    def be(rank: int, running: bool = True) -> Any:
        roles.running = running
        monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: PP)
        monkeypatch.setattr(
            parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: CHUNKS
        )
        monkeypatch.setattr(utils, "get_pg_rank", lambda group: group.rank())
        monkeypatch.setattr(utils, "get_pg_size", lambda group: group.size())
        return SimpleNamespace(rank=lambda: rank, size=lambda: PP)

    yield be
    hooks.revert()


def _is_last(group: Any, stage: int) -> bool:
    """As Megatron's builders and its wrapper for fp32 outputs ask."""
    from megatron.core.pipeline_parallel.utils import is_pp_last_stage, is_vp_last_stage

    return is_vp_last_stage(vp_stage=stage, vp_size=CHUNKS) and is_pp_last_stage(group)


@pytest.mark.parametrize("rank", range(PP))
@pytest.mark.parametrize("stage", range(CHUNKS))
@pytest.mark.parametrize("running", [True, False])
def test_the_ends_of_the_model(on_rank: Any, rank: int, stage: int, running: bool) -> None:
    """Another model may be built between two steps, or this one called by itself."""
    group = on_rank(rank, running)
    assert _is_last(group, stage) == (rank == 0 and stage == 1)
    groups = (
        utils.is_pp_first_stage(group) and utils.is_vp_first_stage(stage, CHUNKS),
        utils.is_pp_last_stage(group) and utils.is_vp_last_stage(vp_stage=stage, vp_size=CHUNKS),
    )
    state = (
        parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
    )
    assert groups == state == (rank == 0 and stage == 0, rank == 0 and stage == 1)


@pytest.mark.parametrize("rank", range(PP))
def test_the_rank_that_returns_values(on_rank: Any, rank: int) -> None:
    """One by ``parallel_state``: trainers broadcast from it. A process group's question is also
    half of the one for the model's end, so rank 0 answers it too."""
    group = on_rank(rank)
    assert parallel_state.is_pipeline_last_stage() == (rank == PP - 1)
    assert utils.is_pp_last_stage(group) == (rank in (0, PP - 1))
    assert utils.is_vp_last_stage(None, None)  # a model without virtual stages


def _is_last_rank(group: Any) -> bool:
    return utils.is_pp_last_stage(group)


@pytest.mark.parametrize("rank", range(PP))
def test_the_rank_that_has_returned_values(on_rank: Any, rank: int) -> None:
    """Once a call has returned, one: losses are logged and summed by it."""
    assert _is_last_rank(on_rank(rank, running=False)) == (rank == PP - 1)


def _tied(first: float, last: float) -> list[Any]:
    class Chunk(SimpleNamespace):
        __hash__ = object.__hash__

    chunks = []
    for value in (first, last):
        weight = torch.full((2, 3), value)
        chunks.append(
            Chunk(
                share_embeddings_and_output_weights=True,
                shared_embedding_or_output_weight=lambda w=weight: w,
            )
        )
    return chunks


def _step(chunks: list[Any]) -> Any:
    call = SimpleNamespace(iteration=SimpleNamespace(models=chunks))
    return SimpleNamespace(call=call, plan=SimpleNamespace(name="v-half"), training=True)


def test_tied_copies_that_differ_are_refused(on_rank: Any) -> None:
    on_rank(0)
    check = started(VPlacement)._require_equal_copies
    check(_step(_tied(1.0, 1.0)))
    with pytest.raises(ConfigError, match="but they differ; load a torch_dist"):
        check(_step(_tied(1.0, 2.0)))
    on_rank(1)
    check(_step(_tied(1.0, 2.0)))


def test_tied_copies_that_are_trained_apart_are_refused(on_rank: Any) -> None:
    """A trainer may finalize gradients without Megatron's function, and without adding them."""
    on_rank(0)
    feature, chunks = started(VPlacement), _tied(1.0, 1.0)
    weights = [chunk.shared_embedding_or_output_weight() for chunk in chunks]
    for _ in range(2):  # no optimizer between
        feature._require_equal_copies(_step(chunks))
    for weight in weights:
        weight.grad = torch.full_like(weight, 3.0)
    for _ in range(2):
        feature.gradients_reduced(_step(chunks))
        assert [float(weight.grad.sum()) for weight in weights] == [36, 36]  # once
    feature._require_equal_copies(_step(chunks))
    weights[0].data += 1
    with pytest.raises(ConfigError, match="differ; finalize gradients"):
        feature._require_equal_copies(_step(chunks))


def test_the_bridge_loads_both_copies(on_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own function takes rank 0, with the last chunk, for a receiver of the weights."""
    module = ModuleType("megatron.bridge.models.conversion.model_bridge")

    class MegatronModelBridge:
        def _broadcast_shared_embeddings(self, megatron_model: Any) -> None:
            raise AssertionError

    module.MegatronModelBridge = MegatronModelBridge  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = [h for h in started(VPlacement).hooks() if h.target is BRIDGE_EMBEDDINGS]
    assert found
    on_rank(0)
    hooks, chunks = Hooks("a test"), _tied(1.0, 2.0)
    hooks.apply(found)
    MegatronModelBridge()._broadcast_shared_embeddings(chunks)
    hooks.revert()
    assert float(chunks[1].shared_embedding_or_output_weight()[0, 0]) == 1.0
