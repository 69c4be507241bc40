"""--pp-vocab-parallel draws microbatches ahead of their passes: what it embeds is what they get."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.integration.features.vocabulary.ends import SharedEmbedding
from megatron_ext.integration.features.vocabulary.run import VocabularyRunner

IDS = torch.tensor([[3, 1, 2, 0]])


class Model(torch.nn.Module):
    """With arguments of Megatron's."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return input_ids + position_ids


def draw(model: Model, *given: torch.Tensor) -> Any:
    """The step that is kept of a microbatch, as the first stage has it."""

    def step(_: Any, called: Any) -> tuple[Any, Any]:
        return called(*given), lambda loss: loss

    runner: Any = SimpleNamespace(
        _it=SimpleNamespace(models=[model], data_iterators=[None], forward_step_func=step),
        _depths=0,
        placement=SimpleNamespace(chunk_of=lambda stage: 0),
        before_batch=lambda *_: None,
        num_tokens=torch.zeros(()),
    )
    return VocabularyRunner._draw(runner, 0)


def test_a_scripts_own_forward_and_hooks_run_once_a_pass() -> None:
    """The patched ``forward`` was lost, and a hook's change of the arguments was made twice."""
    model = Model()
    own = model.forward

    def patched(input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return own(input_ids, position_ids * 10)

    model.forward = patched  # type: ignore[method-assign]
    model.register_forward_pre_hook(lambda _, given: (given[0], given[1] + 1))
    seen: list[torch.Tensor] = []
    model.register_forward_hook(lambda _, given, output: seen.append(output))
    expected = model(IDS, torch.zeros_like(IDS))
    assert expected.equal(IDS + 10)
    for _ in range(2):
        kept, ids = draw(model, IDS, torch.zeros_like(IDS))
        assert ids.equal(IDS) and kept(None, model)[0].equal(expected)
    assert len(seen) == 3 and all(output.equal(expected) for output in seen)


@pytest.mark.parametrize("written", [0, 1])
def test_memory_that_is_used_for_the_next_microbatch(written: int) -> None:
    given = IDS.clone(), torch.zeros_like(IDS)
    kept, _ = draw(Model(), *given)
    assert kept(None, Model())[0].equal(IDS)
    given[written].fill_(1)
    with pytest.raises(RuntimeError, match="arguments have been written to since"):
        kept(None, Model())


def embedded(ids: torch.Tensor, coming: torch.Tensor) -> torch.Tensor:
    group: Any = SimpleNamespace(size=lambda: 1)
    module = SharedEmbedding(group, scatter=False)
    module.given, module.ids = [torch.ones(*ids.shape, 8)], ids
    found: torch.Tensor = module(coming)
    return found


def test_other_tokens_than_were_embedded() -> None:
    """A hook, or a model of the script's, has changed them: the embeddings were the unchanged."""
    for same in (IDS, IDS.clone(), IDS.int(), IDS[:, :]):
        assert embedded(IDS, same).shape == (1, 4, 8)
    with pytest.raises(RuntimeError, match="other ones have come to the embedding"):
        embedded(IDS, IDS.clamp(min=1))
