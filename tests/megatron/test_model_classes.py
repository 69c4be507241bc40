"""Models that are not GPT: refused, or left to what they can be, before anything is loaded."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_ext.integration import ConfigError
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.integration.model_classes import (
    builds_chunks,
    builds_other_models,
)
from megatron_ext.integration.pipeline import ScheduledPipeline
from megatron_ext.runtime.wgrad import WeightGradStore
from megatron_ext.schedule import GENERATORS
from megatron_ext.schedule.select import ONE_CHUNK
from tests.support.stand_ins import before_megatron, megatron_args

BertModel: Any = None  # Megatron's, as a script imports it; see ``megatron``
GPTModel: Any = None


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    """Import Megatron's models only where a test of this file runs."""
    global BertModel, GPTModel
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt import GPTModel


def vlm(pre_process: bool = True, post_process: bool = True, add_encoder: bool = True) -> Any:
    """As in ``pretrain_vlm.py`` and ``pretrain_t5.py``: a rank has the whole of its stage."""


def bert(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
    """As in ``pretrain_bert.py``."""
    return BertModel(pre_process, post_process, vp_stage)


def gpt(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
    """As scripts of one's own."""
    return GPTModel(pre_process, post_process, vp_stage)


def generic(builder: Any, pre_process: bool = True, vp_stage: int | None = None) -> Any:
    """As ``model_provider.py`` of newer Megatrons."""
    return builder(pre_process, vp_stage)


def test_what_a_provider_can_build() -> None:
    assert not builds_chunks(vlm) and not builds_chunks(functools.partial(vlm, add_encoder=False))
    assert builds_chunks(bert) and builds_chunks(functools.partial(generic, gpt))
    assert builds_chunks(lambda **kwargs: None)
    assert builds_other_models(bert) and builds_other_models(functools.partial(bert, True))
    assert not any(builds_other_models(p) for p in (gpt, vlm, functools.partial(generic, gpt)))
    assert not builds_other_models(len)


def arguments(**changed: Any) -> Any:
    values: dict[str, Any] = {
        "pp_schedule": "as given",
        "pipeline_model_parallel_size": 2,
        "hybrid_layer_pattern": None,
        "num_layers": 4,
        "cuda_graph_impl": "none",
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "world_size": 2,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
    }
    return megatron_args(**{**values, **changed})


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Makes a function the ``model_provider`` of the running script."""

    def run(provider: Any) -> None:
        main = ModuleType("__main__")
        main.model_provider = provider  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "__main__", main)

    return run


def test_auto_takes_what_the_provider_builds(script: Callable[[Any], None]) -> None:
    def chosen() -> ScheduleRequest:
        return before_megatron(arguments(), ScheduleRequest.of("auto"))

    script(vlm)
    assert chosen().name in ONE_CHUNK
    assert "only these suit this model's layers and flags" in chosen().note
    script(bert)
    assert GENERATORS[chosen().name].placement == "loop"
    listed = arguments(pipeline_model_parallel_layout="Et|t|t|tL")
    assert not before_megatron(listed, ScheduleRequest.of("auto")).vee
    free = []
    for provider in (None, gpt, ModuleType("model_provider")):
        script(provider)
        free.append(chosen())
    assert len({request.name for request in free}) == 1
    assert all("only these suit" not in request.note for request in free)


def test_as_many_iterators_as_chunks() -> None:
    pipeline: Any = ScheduledPipeline(None, WeightGradStore(), 60.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"has 1 iterator\(s\), but this rank has 2 model chunk"):
        pipeline(
            forward_step_func=None,
            data_iterator=iter([]),
            model=[SimpleNamespace()] * 2,
            num_microbatches=4,
            seq_length=64,
            micro_batch_size=2,
        )


@pytest.mark.parametrize(("chunks", "length"), [(1, 32), (2, 64)])
def test_decoder_sequences_of_another_length(chunks: int, length: int) -> None:
    """Stock's interleaved schedule takes no notice of them."""
    config = SimpleNamespace(
        timers=None, variable_seq_lengths=False, sequence_parallel=False, hidden_size=8
    )
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    pipeline: Any = ScheduledPipeline(None, WeightGradStore(), 60.0)  # type: ignore[arg-type]

    class Begun(Exception):
        pass

    def begin(call: Any) -> Any:
        assert call.shape == (length, 2, 8) and call.batch == (length, 2)
        raise Begun

    pipeline._begin = begin
    models = [SimpleNamespace(config=config)] * chunks
    with pytest.raises(Begun):
        pipeline(
            forward_step_func=None,
            data_iterator=[None] * chunks,
            model=models,
            num_microbatches=4,
            seq_length=64,
            micro_batch_size=2,
            decoder_seq_length=32,
            pg_collection=SimpleNamespace(pp=group, cp=group),
        )
