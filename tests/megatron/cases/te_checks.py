"""One body for the fake modules on a CPU and Transformer Engine's own on a GPU: split equals fused.

Every function takes modules and the way to run them; ``Chunk`` plays one model chunk under
Megatron's DDP hook, with the gradient counted in ``main_grad``.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.integration import split_local as wgrad
from megatron_ext.integration import split_te as wgrad_te
from megatron_ext.runtime.wgrad import WeightGradStore


class Chunk:
    """A module whose parameters have ``main_grad`` and the hook of Megatron's DDP.

    Args:
        module: its own weights are copied.
        split: whether B and W are two passes.
        store: of all chunks.
    """

    def __init__(self, module: torch.nn.Module, split: bool, store: WeightGradStore) -> None:
        self.module, self.split, self.store = copy.deepcopy(module), split, store
        self.ready: Counter[str] = Counter()
        self._accumulators = []
        self._names = {id(p): n for n, p in self.module.named_parameters()}
        (post_hook,) = [s for s in wgrad.hooks(store) if "post_hook" in s.target.places[0]]
        make = post_hook.make(self._stock_hook)
        for parameter in self.module.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False
            accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            accumulator.register_hook(make(self, parameter))
            self._accumulators.append(accumulator)
        if split:
            assert wgrad_te.attach(self.module, store)

    @staticmethod
    def _stock_hook(self: Chunk, parameter: torch.nn.Parameter) -> Callable[..., None]:
        def hook(*unused: Any) -> None:
            assert parameter.grad is not None, self._names[id(parameter)]
            if not parameter.grad_added_to_main_grad:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
            self.ready[self._names[id(parameter)]] += 1

        return hook

    def backward(self, key: Any, loss: torch.Tensor, postpone: bool) -> None:
        """B where ``postpone``, else BW."""
        if self.split and postpone:
            with self.store.collect(key):
                loss.backward()
        else:
            loss.backward()

    def gradients(self) -> dict[str, torch.Tensor]:
        """What the optimizer would get."""
        return {name: p.main_grad for name, p in self.module.named_parameters()}


def split_equals_fused(
    module: torch.nn.Module, run: Callable[[torch.nn.Module, int], torch.Tensor]
) -> Chunk:
    """Four microbatches fused, and as F F B B F B W W BW with everything compared bit by bit.

    Args:
        module: with linear modules that can split.
        run: (module, microbatch) -> loss; makes an input that requires a gradient.

    Returns:
        The split chunk.
    """
    store = WeightGradStore()
    fused, split = Chunk(module, False, store), Chunk(module, True, store)
    for microbatch in range(4):
        fused.backward(microbatch, run(fused.module, microbatch), False)
    losses = {i: run(split.module, i) for i in range(2)}
    for i in (0, 1):
        split.backward(i, losses.pop(i), True)
    # Only what B computes may count as ready before the first W.
    assert not any(name.rpartition(".")[2].startswith("weight") for name in split.ready)
    losses[2] = run(split.module, 2)
    store.run(0)
    split.backward(2, losses.pop(2), True)
    store.run(1)
    store.run(2)
    split.backward(3, run(split.module, 3), False)
    assert len(store) == 0
    ours, stock = split.gradients(), fused.gradients()
    for name in stock:
        assert torch.isfinite(stock[name]).all() and stock[name].any(), name
        assert torch.equal(ours[name], stock[name]), name
    assert split.ready == fused.ready
    assert set(split.ready.values()) == {4}
    assert all(p.grad is None for p in split.module.parameters())
    return split


def hooks_see_gradients(
    module: torch.nn.Module,
    run: Callable[[torch.nn.Module, int], torch.Tensor],
    hook: Callable[[torch.nn.Parameter, Callable[[Any], None]], Any],
    name: str,
) -> None:
    """A hook of the user sees what it sees without a split, and the module waits for it in B;
    before it is there, and when it is gone, W computes.

    Args:
        module, run: as above.
        hook: puts one on a parameter, and returns its handle; it gives what it sees to a function.
        name: of the parameter.
    """
    store = WeightGradStore()
    fused, split = Chunk(module, False, store), Chunk(module, True, store)
    seen: dict[bool, list[Any]] = {False: [], True: []}
    handles: list[Any] = []
    weight = next(n for n, _ in split.module.named_parameters() if n.startswith("weight"))
    for microbatch in range(4):
        if microbatch == 1:  # after the first step
            for chunk in (fused, split):
                parameter = chunk.module.get_parameter(name)
                handles.append(hook(parameter, seen[chunk.split].append))
                store.hooked[id(parameter)] = ("a hook",)
        if microbatch == 3:
            for handle in handles:
                handle.remove()
            store.hooked.clear()
        for chunk in (fused, split):
            chunk.backward(microbatch, run(chunk.module, microbatch), True)
        waits_for_hook = microbatch in (1, 2)
        assert split.ready[weight] == microbatch + waits_for_hook
        store.run(microbatch)
    assert len(seen[True]) == len(seen[False]) == 2
    assert all(map(torch.equal, seen[True], seen[False]))
    ours, stock = split.gradients(), fused.gradients()
    assert all(torch.equal(ours[n], stock[n]) and stock[n].any() for n in stock)
    assert split.ready == fused.ready and set(split.ready.values()) == {4}
