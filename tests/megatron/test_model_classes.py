"""Models that are not GPT: refused, or left to what they can be, before anything is loaded."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_ext.integration import ConfigError
from megatron_ext.integration.features.schedule import Schedule
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.integration.features.v_placement import VPlacement
from megatron_ext.integration.model_classes import (
    builds_chunks,
    builds_other_models,
    require_chunks,
    require_placed,
)
from megatron_ext.integration.pipeline import ScheduledPipeline
from megatron_ext.runtime.wgrad import WeightGradStore
from megatron_ext.schedule import GENERATORS
from megatron_ext.schedule.select import ONE_CHUNK
from tests.support.stand_ins import before_megatron, megatron_args, started

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


@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        ("v-half", {}),
        ("interleaved", {"num_virtual_stages_per_pipeline_rank": 2}),
        ("auto", {"num_virtual_stages_per_pipeline_rank": 2}),
    ],
)
def test_several_chunks_of_a_script_with_one(
    script: Callable[[Any], None], schedule: str, flags: dict[str, Any]
) -> None:
    """Before checkpoint formats are looked at, which such a script may not have either."""
    script(vlm)
    with pytest.raises(ConfigError) as error:
        before_megatron(arguments(**flags), ScheduleRequest.of(schedule))
    text = str(error.value)
    assert text.startswith(f"--pp-schedule {schedule} needs a model_provider that builds 2 model")
    assert text.endswith("use a schedule with one chunk: 1f1b, zb-h1, zb-h2")
    before_megatron(arguments(), ScheduleRequest.of("zb-h1"))


def by_get_model(hook: Callable[[str], Any], original: Any, provider: Any) -> Any:
    def get_model(model_provider_func: Any, model_type: Any = None) -> Any:
        return original(model_provider_func)

    return hook("get_model").make(get_model)(provider, "model type")


def by_a_builder(hook: Callable[[str], Any], original: Any, provider: Any) -> Any:
    """As ``GPTModelBuilder.build_distributed_models`` calls it."""

    def build(build_model_func: Any, config: Any, pre_wrap_hook: Any = None) -> Any:
        models = original(build_model_func)
        return models if pre_wrap_hook is None else pre_wrap_hook(models)

    found = hook("unimodal_build_distributed_models").make(build)
    return found(provider, "config", pre_wrap_hook=None)


@pytest.fixture(params=[by_get_model, by_a_builder])
def building(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Builds by each way of Megatron's scripts, with a callback's hook on it."""

    def run(callback: Any, original: Any, provider: Any) -> Any:
        def hook(name: str) -> Any:
            (found,) = (h for h in callback.hooks() if h.target.places[0].endswith(f":{name}"))
            return found

        return request.param(hook, original, provider)

    return run


@pytest.fixture
def builders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's package of builders, which the installed megatron-core may lack."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None))


@pytest.mark.usefixtures("builders")
def test_a_provider_of_another_name_is_asked_before_it_builds(
    building: Callable[..., Any],
) -> None:
    built = []
    pipeline: Any = SimpleNamespace(watched=None)
    entry = started(Schedule, pipeline=pipeline, chunks=2)

    def original(provider: Any) -> Any:
        built.append(inspect.unwrap(provider))
        return [None]

    with pytest.raises(ConfigError, match="--pp-schedule v-half needs a model_provider"):
        building(entry, original, vlm)
    assert not built
    building(entry, original, gpt)
    assert built == [gpt]
    require_chunks(vlm, "zb-h1", 1)
    require_chunks(None, "v-half", 2)


@pytest.mark.usefixtures("builders")
def test_a_model_is_refused_where_it_was_built(building: Callable[..., Any]) -> None:
    """Not when it is loaded or run: its stages hold other things than those of a V."""
    callback = started(VPlacement)
    chunks: list[Any] = [object.__new__(BertModel), object.__new__(BertModel)]
    with pytest.raises(ConfigError, match="--pp-schedule v-half .* this model is a BertModel; use"):
        building(callback, lambda provider: chunks, bert)
    # Evaluation first: its plan has another name, which nobody gave.
    step: Any = SimpleNamespace(
        call=SimpleNamespace(iteration=SimpleNamespace(models=chunks)),
        plan=SimpleNamespace(name="forward-only"),
    )
    with pytest.raises(ConfigError, match="--pp-schedule v-half .* this model is a BertModel; use"):
        callback.begin(step)


def test_the_known_models() -> None:
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.models.mamba.mamba_model import MambaModel

    for model in (GPTModel, HybridModel, MambaModel, type("Mine", (GPTModel,), {})):
        require_placed([object.__new__(model)], "v-half")
    with pytest.raises(ConfigError, match="megatron.core's GPTModel or HybridModel, but"):
        require_placed([object.__new__(BertModel)], "v-half")


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

    pipeline.begin = begin
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
