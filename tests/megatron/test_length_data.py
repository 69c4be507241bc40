"""Which lengths data has, and iterators that are read ahead."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.integration.errors import ConfigError
from megatron_ext.integration.features.lengths.queue import Ahead
from megatron_ext.integration.features.lengths.read import asked, sequences_of


def rows(count: int, tokens: int) -> torch.Tensor:
    return torch.zeros(count, tokens, dtype=torch.long)


@dataclass
class Parameters:
    """As Megatron's PackedSeqParams."""

    cu_seqlens_q: torch.Tensor


class Fields:
    """As a TensorDict: names and values, but no mapping."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def keys(self) -> Any:
        return self._fields.keys()

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]


@pytest.mark.parametrize(
    ("batch", "lengths", "packed"),
    [
        # Megatron's datasets: padding counts, since it is computed.
        ({"tokens": rows(2, 8), "labels": rows(2, 8)}, [8, 8], False),
        # Packed documents, whose bounds are filled up with the length.
        ({"tokens": rows(1, 8), "cu_seqlens": torch.tensor([[0, 3, 8, 8, 8]])}, [3, 5], True),
        (
            {"tokens": rows(2, 4), "cu_seqlens": torch.tensor([[0, 1, 4], [0, 4, 4]])},
            [1, 3, 4],
            True,
        ),
        ({"tokens": rows(2, 8), "cu_seqlens": None}, [8, 8], False),
        # NeMo-RL: an object with the parameters, or without.
        (
            SimpleNamespace(
                input_ids=rows(1, 9), packed_seq_params=Parameters(torch.tensor([0, 4, 9]))
            ),
            [4, 5],
            True,
        ),
        (SimpleNamespace(input_ids=rows(1, 9), packed_seq_params=None), [9], False),
        # verl: nested tensors in a TensorDict.
        (
            Fields(
                input_ids=torch.nested.as_nested_tensor(
                    [torch.zeros(3), torch.zeros(5)], layout=torch.jagged
                )
            ),
            [3, 5],
            True,
        ),
        # A list of sequences.
        ({"tokens": [torch.zeros(3), torch.zeros(2)]}, [3, 2], True),
        ({"input_ids": [[1, 2, 3]]}, [3], True),
        (torch.zeros(7), [7], False),
    ],
)
def test_forms_of_data(batch: Any, lengths: list[int], packed: bool) -> None:
    assert sequences_of(batch) == (lengths, packed)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ((rows(1, 3), rows(1, 3)), "a tuple, whose tokens are not known"),
        ({"images": rows(1, 3)}, "a dict with images, in which no tokens or input_ids"),
        ({"tokens": torch.zeros(1, 2, 3)}, "a dict with tokens"),
        ({"tokens": []}, "a dict with tokens"),
        (None, "a NoneType"),
        (7, "a int"),
    ],
)
def test_what_is_not_known_is_refused(batch: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)) as error:
        sequences_of(batch)
    assert "enable(microbatch_costs=function)" in str(error.value)


@pytest.mark.parametrize(
    ("function", "lengths"),
    [
        (lambda batch: 7, [7]),
        (lambda batch: [3, 4], [3, 4]),
        (lambda batch: torch.tensor([3, 4]), [3, 4]),
        (lambda batch: 0, None),
        (lambda batch: [], None),
        (lambda batch: [2.5], None),
        (lambda batch: "7", None),
        (lambda batch: None, None),
    ],
)
def test_a_users_function(function: Callable[[Any], Any], lengths: list[int] | None) -> None:
    if lengths is not None:
        assert asked(function, None) == (lengths, len(lengths) > 1)
        return
    with pytest.raises(ConfigError, match="must return a number of tokens"):
        asked(function, None)


def test_a_queue_gives_what_was_read_in_its_order() -> None:
    queue = Ahead(iter("abcdef"))
    assert queue.peek(3) == ["a", "b", "c"]
    queue.begin([2, 0, 1])
    assert [next(queue) for _ in range(3)] == ["c", "a", "b"]
    queue.end()
    # A stage that reads nothing ahead draws only what it needs.
    queue.begin([1, 0])
    assert next(queue) == "e" and next(queue) == "d"
    queue.end()
    queue.begin([0])
    queue.end()  # a stage in the middle draws nothing
    assert queue.peek(1) == ["f"]


@pytest.mark.parametrize("drawn", [1, 4])
def test_scripts_that_draw_another_number_are_refused(drawn: int) -> None:
    queue = Ahead(iter(range(9)))
    queue.begin(range(3))
    with pytest.raises(ConfigError, match=f"but {drawn} were drawn for 3 microbatches"):
        for _ in range(drawn):
            next(queue)
        queue.end()


def test_what_was_read_must_be_drawn() -> None:
    queue = Ahead(iter(range(9)))
    queue.peek(2)
    queue.begin(range(2))
    with pytest.raises(ConfigError, match="but 0 were drawn for 2 microbatches"):
        queue.end()
    queue.drop()
    queue.begin(range(1))
    assert next(queue) == 2


def test_data_that_ends_is_refused() -> None:
    with pytest.raises(ConfigError, match="ended after 2 microbatches of a step"):
        Ahead(iter("ab")).peek(3)
