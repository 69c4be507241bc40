"""Every denial is tripped by its example, through the code that trains, with its own sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext._input import values_of
from megatron_ext.integration import ConfigError, support
from megatron_ext.integration.feature import Run
from megatron_ext.integration.features import overlap
from megatron_ext.integration.features.lengths import replicas
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.integration.features.slices import documents, model, run
from megatron_ext.integration.features.slices.state import Slicing
from megatron_ext.integration.features.vocabulary import ends
from megatron_ext.integration.features.vocabulary import model as vocabulary
from megatron_ext.integration.gradients import require_gradient_hooks
from megatron_ext.integration.support import DENIALS, Denial, denied, in_use, require_allowed
from tests.support import ROOT
from tests.support.stand_ins import megatron_args

PAGE = ROOT / "docs" / "reference" / "denied.md"

# What asks for each feature.
FEATURES: dict[str, dict[str, Any]] = {
    support.ORDER: {"schedule": "zb-h1"},
    support.SLICES: {"schedule": "zb-h1", "pp_slices": 2},
    support.VOCABULARY: {"schedule": "zb-h1", "pp_vocab_parallel": True},
    support.VEE: {"schedule": "v-half"},
    support.CHUNKS: {"schedule": None},
}


def run_of(feature: str, flags: str = "") -> Run:
    """A run that uses a feature, with Megatron's flags."""
    given = dict(FEATURES[feature])
    schedule = given.pop("schedule")
    read = {name: int(v) if str(v).isdigit() else v for name, v in values_of(flags.split()).items()}
    args = megatron_args(**{**given, **read})
    request = None if schedule is None else ScheduleRequest.of(schedule)
    return Run(args, "0.0.0", request=request, experts_in_chunks=feature == support.CHUNKS)


def packed(edges: list[int], **more: Any) -> Any:
    documents = torch.tensor(edges)
    return SimpleNamespace(qkv_format="thd", cu_seqlens_q=documents, **more)


def _causal() -> None:
    layer = SimpleNamespace(self_attention=object())
    run._require_attention(SimpleNamespace(decoder=SimpleNamespace(layers=[layer])), 0)


def _one_row() -> None:
    config = SimpleNamespace(moe_router_load_balancing_type="seq_aux_loss")
    model._pack(Slicing(), packed([0, 3, 8], tokens_per_sample=4), config)


def _draws() -> None:
    sliced = model.SlicedModel()
    sliced.slicing = SimpleNamespace(  # type: ignore[assignment]
        now=True, draws=SimpleNamespace(found=lambda: True)
    )
    sliced._forward(lambda model: None, None)


def _hooked() -> None:
    last = torch.nn.Module()
    last.output_layer = ends.HiddenStates()
    last.output_layer.register_forward_hook(lambda *given: None)
    ends.require_no_hooks([last])


def _own_loss() -> None:
    last = torch.nn.Module()
    last.output_layer = ends.HiddenStates()
    setattr(last, "compute_language_model_loss", max)  # noqa: B010 - no attribute of a Module
    vocabulary.require_losses_of([last])


def _tied() -> None:
    pipeline: Any = SimpleNamespace(all_reduce=None)
    place = vocabulary._Pipeline(pipeline, 0, 1, 0)
    free, frozen = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1), False)
    with mock.patch("torch.distributed.all_reduce"):
        place.frozen([[free, frozen], []], torch.device("cpu"), False)


def _wrapped() -> None:
    wrapped: Any = torch.nn.Linear(1, 1)
    wrapped.ddp_config = SimpleNamespace(overlap_grad_reduce=True)
    wrapped._make_backward_post_hook = None
    wrapped._make_backward_post_hook = lambda parameter: None
    require_gradient_hooks([wrapped])


def _delayed() -> None:
    args = megatron_args(delay_wgrad_compute=True)
    overlap._check(Run(args, "0.0.0", library=True, request=ScheduleRequest.of("zb-h1")))


def _replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_ranks_of", lambda args: [[0, 1]])
    message: Any = SimpleNamespace(namespace="c10d")
    replicas._Among([0]).__torch_dispatch__(message, ())


def _linear(report: Callable[[Any], Any], loss: Callable[[Any], Any] = torch.sum) -> None:
    run._linear(torch.ones(1, 2), lambda x: (loss(x), report(x)))


SEEN: dict[Denial, Callable[[], object]] = {
    support.CAUSAL: _causal,
    support.NO_GAPS: lambda: documents.edges_of(packed([0, 8], cu_seqlens_kv=torch.tensor([0, 9]))),
    support.ONE_ROW: _one_row,
    support.LINEAR: lambda: _linear(lambda x: {}, lambda x: x.sum() ** 2),
    support.SUMS: lambda: _linear(lambda x: {"tokens": 2}),
    support.DRAWS: _draws,
    support.HOOKED: _hooked,
    support.OWN_LOSS: _own_loss,
    support.TIED: _tied,
    support.DELAYED: _delayed,
    support.WRAPPED: _wrapped,
}


@pytest.mark.parametrize("denial", DENIALS, ids=lambda one: one.beside)
def test_its_example_trips_it(denial: Denial, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(denial.sentence.split()) <= 25
    if denial.applies is not None:
        asked = run_of(denial.feature, denial.example)
        assert denied(asked.args, in_use(asked)) == denial.sentence
        plain = run_of(denial.feature)
        require_allowed(plain.args, in_use(plain))
        return
    with pytest.raises(ConfigError) as error:
        if denial is support.REPLICAS:
            _replicas(monkeypatch)
        else:
            SEEN[denial]()
    first = denial.sentence.partition("{")[0]
    assert str(error.value).startswith(first) and "{" not in str(error.value)


def test_a_denial_is_of_its_feature_alone() -> None:
    asked = run_of(support.ORDER, "--moe-expert-capacity-factor 1.0 --use-mup --mtp-num-layers 1")
    require_allowed(asked.args, in_use(asked))


def test_the_page_lists_them(tmp_path: Path) -> None:
    from scripts import reference_pages

    assert reference_pages.denied() == PAGE.read_text(), "python -m scripts.reference_pages"
