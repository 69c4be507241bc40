"""Returned values reach the last pipeline rank, whatever they are and however late it is."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from megatron_ext.integration.errors import ConfigError
from megatron_ext.integration.features.telemetry.traces import exact
from megatron_ext.integration.features.v_placement.relay import pack, unpack
from tests.support.checkouts import run_cases
from tests.support.returned import Batch, Output, Pair, returned, same

CPU = torch.device("cpu")


def test_the_sender_waits_for_the_last_rank(tmp_path: Path) -> None:
    run_cases("megatron.cases.relay_cases", str(tmp_path))
    sender, last = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert last["losses"] == [0, 1, 2, 3, 4] and last["tokens"] == 7
    assert last["structure"] and sender["waited"]


@pytest.mark.parametrize("kind", sorted(returned()))
def test_a_value_of_each_kind_arrives(kind: str) -> None:
    value = returned()[kind]
    assert same(unpack(pack(value, CPU)), value)


@pytest.mark.parametrize("kind", ["bf16", "log_probs", "batch", "output", "pair", "list"])
def test_the_comparison_sees_a_changed_value(kind: str) -> None:
    value = unpack(pack(returned()[kind], CPU))
    assert same(value, returned()[kind])
    tensors: list[torch.Tensor] = []
    _collect(value, tensors)
    tensors[0][0] += 1
    assert not same(value, returned()[kind])


def _collect(value: object, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value.values() if value.is_nested else value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        _collect(list(value.values()), found)
    elif hasattr(value, "__dict__"):
        _collect(vars(value), found)


def test_tensors_are_not_pickled() -> None:
    """They go as they are, once each, from wherever they lie: a large one through the pickle would
    go through the CPU's memory."""
    big = torch.zeros(1 << 18)
    nested = torch.nested.as_nested_tensor([big, big], layout=torch.jagged)
    values = [{"a": Output(big)}, Pair(big, 1), Batch(a=big, b=big), big]
    data = pack(values, CPU)
    assert big.nbytes < data.numel() < big.nbytes + 2048
    again = unpack(data)
    assert again[3] is again[1].values is again[0]["a"].logits
    data = pack(nested, CPU)
    assert 2 * big.nbytes < data.numel() < 2 * big.nbytes + 4096


def test_a_part_of_a_tensor_goes_without_the_rest() -> None:
    data = pack(torch.zeros(1000, 1000)[:, 3], CPU)
    assert 4000 < data.numel() < 4000 + 2048


def test_a_received_tensor_keeps_no_other_alive() -> None:
    _large, small = unpack(pack((torch.zeros(1 << 16), torch.ones(1)), CPU))
    assert small.untyped_storage().nbytes() == 4


def test_what_does_not_pickle_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not pickle.*lock.*return tensors"):
        pack({"loss": torch.ones(1), "lock": threading.Lock()}, CPU)


def test_a_trace_takes_any_returned_value() -> None:
    found = json.loads(json.dumps(exact(returned())))
    assert found["loss"] == 0.25 and found["none"] is None and found["batch"] == "Batch"
    assert found["pair"][1] == 3 and len(found["log_probs"]) == 9
    assert float.fromhex(found["bf16"][0]) == float(returned()["bf16"][0, 0])
