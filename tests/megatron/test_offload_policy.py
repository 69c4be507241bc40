"""``--pp-offload-policy``: which tensors of an offloaded set stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_ext.integration import ConfigError
from megatron_ext.integration.features.offload.policy import (
    OffloadPolicy,
    PolicyFilter,
    SavedTensor,
    keep_attention_inputs,
    keep_nothing,
    policy_of,
)
from megatron_ext.offload.arena import HostArena
from megatron_ext.offload.blocks import release_storage
from megatron_ext.offload.device import CpuDevice
from megatron_ext.offload.engine import Engine
from megatron_ext.offload.store import ActivationStore
from tests.support.faulty_device import Faults, FaultyDevice

from .cases import keep_policies

ROWS, HIDDEN = 6, 8
NBYTES = ROWS * HIDDEN * 4
OWN = "tests.megatron.cases.keep_policies"


def test_policies_by_name_and_by_function() -> None:
    assert policy_of("all") is keep_nothing
    assert policy_of("keep-attention-inputs") is keep_attention_inputs
    assert policy_of(f"{OWN}:keep_mlp") is keep_policies.keep_mlp
    assert policy_of(f"{OWN}:Policies.keep_all") is keep_policies.Policies.keep_all


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("keep-attention", ["'keep-attention' is not known", "all, keep-attention-inputs", ":"]),
        ("no.such.module:keep", ["cannot be imported", "No module named 'no'"]),
        (f"{OWN}:keep_none", ["cannot be imported", "keep_none"]),
    ],
)
def test_wrong_policies(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        policy_of(text)
    message = str(error.value)
    assert "\n" not in message and message.startswith("--pp-offload-policy ")
    assert all(part in message for part in parts), message


class Attention(nn.Module):
    """Megatron's names, without its kernels."""

    class Core(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return q * k * v

    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.core_attention = Attention.Core()
        self.linear_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_proj(self.core_attention(*self.linear_qkv(x).chunk(3, -1)))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.linear_fc2 = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(torch.tanh(self.linear_fc1(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attention, self.mlp = Attention(), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sin(x)
        x = x + self.self_attention(x)
        return x + self.mlp(torch.cos(x))


class Model(nn.Module):
    """One layer; with ``recomputed``, its MLP runs again in backward."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = Layer()
        if recomputed:
            mlp = self.layer.mlp.forward
            self.layer.mlp.forward = lambda x: checkpoint(mlp, x, use_reentrant=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


Trip = Callable[[OffloadPolicy, Model], tuple[ActivationStore, list[torch.Tensor]]]


@pytest.fixture
def trip() -> Iterator[Trip]:
    """``trip(policy, model)``: a set is offloaded and reloaded; the store, and the gradients."""
    devices: list[CpuDevice] = []

    def run(policy: OffloadPolicy, model: Model) -> tuple[ActivationStore, list[torch.Tensor]]:
        device = FaultyDevice(faults=Faults(poison=True))
        devices.append(device)
        found = PolicyFilter(policy, [model])
        store = ActivationStore(
            Engine(device, HostArena(device.torch_device)),
            model.parameters,
            min_bytes=1,
            keep=found,
        )
        x = _input()
        with store.saving("set"):
            loss = model(x).square().sum()
        footprint = store.footprint("set")
        release_storage(x)
        for move in (store.offload, store.release, store.prepare, store.reload):
            move("set")
            kept = store._sets["set"].measure()
            expected = {store.release: footprint.kept, store.prepare: footprint.reloaded}
            assert kept == expected.get(move, kept)
        # In every step the host place is what the footprint has promised.
        assert store.engine.arena.peak_bytes == footprint.host
        loss.backward()
        store.finish("set")
        store.end_step()
        found.close()
        return store, [x.grad, *(p.grad for p in model.parameters())]

    yield run
    for device in devices:
        device.close()


def _input() -> torch.Tensor:
    return torch.linspace(-1, 1, ROWS * HIDDEN).view(ROWS, HIDDEN).clone().requires_grad_()


def _stock(model: Model) -> list[torch.Tensor]:
    x = _input()
    model(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("recomputed", [False, True])
def test_attention_inputs_stay_and_the_mlps_are_offloaded(trip: Trip, recomputed: bool) -> None:
    stock = _stock(Model(recomputed))
    every, gradients = trip(keep_nothing, Model(recomputed))
    assert all(map(torch.equal, gradients, stock))
    kept, gradients = trip(keep_attention_inputs, Model(recomputed))
    assert all(map(torch.equal, gradients, stock))
    # The projection's input, query, key, value, and the product of two of them.
    assert kept.statistics.kept_bytes["policy"] == 5 * NBYTES
    less = every.engine.counters.bytes_to_host - kept.engine.counters.bytes_to_host
    assert less == 5 * NBYTES < every.engine.counters.bytes_to_host
    assert every.statistics.kept_bytes["policy"] == 0


def test_a_storage_saved_by_kept_and_other_modules_stays_once(trip: Trip) -> None:
    """``tanh`` saves its result, which the projection saves too. Copying it would free nothing: the
    kept tensor holds the memory."""
    model = Model()
    model.layer.self_attention.linear_qkv.register_forward_pre_hook(lambda _, x: x[0].tanh_())
    stock = _stock(model)
    model.zero_grad()
    store, gradients = trip(keep_attention_inputs, model)
    assert all(map(torch.equal, gradients, stock))
    assert store.statistics.held_elsewhere_bytes == 0


def test_a_policy_that_keeps_all(trip: Trip) -> None:
    store, gradients = trip(keep_policies.Policies.keep_all, Model())
    assert all(map(torch.equal, gradients, _stock(Model())))
    assert store.engine.counters.offloads == 0 and store.engine.arena.capacity_bytes == 0


class TestModuleTracking:
    def test_names_are_those_inside_the_chunk(self, trip: Trip) -> None:
        seen: list[str] = []

        def note(saved: SavedTensor) -> bool:
            seen.append(saved.module)
            return False

        trip(note, Model())
        names = {"layer", *(f"layer.mlp{part}" for part in ("", ".linear_fc1", ".linear_fc2"))}
        attention = ("core_attention", "linear_qkv", "linear_proj")
        # The loss is outside of all modules.
        assert set(seen) == {"", *names, *(f"layer.self_attention.{x}" for x in attention)}

    def test_close_removes_the_hooks(self) -> None:
        model = Model()
        PolicyFilter(keep_attention_inputs, [model]).close()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
