"""B and W as two passes for Transformer Engine's linear modules.

From version 2.3 on each of them asks a store of its own (``module.wgrad_store``) in the backward
pass whether to postpone its weight gradient, leaves the work there, and does it in
``backward_dw()``. Megatron allows that only together with an overlap of its own, and switches it on
for good. We put another store in that place, after construction: it says yes exactly while a B pass
runs, files the work under that pass, and lets the module's own ``backward_dw`` do it in the W pass.
So one model runs B and W, fused BW, recomputation and evaluation alike, and the fused pass is
Transformer Engine's own.

With sequence parallelism B leaves gathered tensors there. Those in 16 or 32 bits are kept in parts
and gathered again in W; quantized ones stay, because their scales belong to the whole tensor.
"""

from __future__ import annotations

import functools
import queue
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..runtime.sharded import Sharded, whole
from ..runtime.wgrad import WeightGradStore
from .gradients import accumulate, finish, mark_added, stand_in

_WEIGHT = re.compile(r"weight\d*")
_BIAS = re.compile(r"bias\d*")
# Of what they leave there: the input and the output gradient; one of each for every expert.
_ROWS = 2
# What the modules call on a store; anything else there is not the store that we know.
_STORE_METHODS = ("delay_wgrad_compute", "put", "pop")


def can_split(module: torch.nn.Module) -> bool:
    """True if ``module``, as it was built, can postpone its weight gradients."""
    store = getattr(module, "wgrad_store", None)
    if isinstance(store, SplitStore):
        return True
    if not all(callable(getattr(store, name, None)) for name in _STORE_METHODS):
        return False
    if not (hasattr(module, "fuse_wgrad_accumulation") and hasattr(module, "use_bias")):
        return False
    # Two pieces of work a backward pass; Megatron does not use it.
    two_linears = any(c.__name__ == "LayerNormMLP" for c in type(module).__mro__)
    # With userbuffers the tensors of W lie in communication buffers that the next layer reuses.
    overlaps = any(v is True for k, v in vars(module).items() if k.startswith("ub_"))
    # Someone else postpones already (Megatron does, for some overlaps), and will call backward_dw.
    taken = store is not None and store.delay_wgrad_compute()
    # A weight in parts gets no gradient from backward_dw, which assigns to their concatenation.
    names = getattr(module, "weight_names", ("weight",))
    in_parts = len(names) > 1 and not hasattr(module, "num_gemms")
    # Frozen ones too: they may be trained later.
    weights = _named(module, _WEIGHT)
    # Gathered for every pass (Megatron's GTP): backward_dw does not reduce their gradients.
    gathered = any(getattr(weight, "is_distributed_weight", False) for weight in weights)
    return bool(weights) and not (
        two_linears or overlaps or taken or in_parts or gathered or _debugging()
    )


def splittable(chunk: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules of ``chunk`` that can postpone their weight gradients in this way."""
    idle: set[int] = set()
    for module in chunk.modules():
        # These compute with another module's parameters; the owner's own code never runs.
        has = vars(module)
        fused = "_fused_impl" in has or "_fused_grouped_swiglu_ops" in has
        if fused or has.get("_with_fused_impl"):
            idle.update(id(inner) for inner in module.modules())
    for module in chunk.modules():
        if id(module) not in idle and can_split(module):
            yield module


def postponed_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The weights of a splittable module that are trained now: W computes their gradients."""
    return _trained(_named(module, _WEIGHT))


def postponed_biases(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Its biases that are trained now, whose gradients W may compute with those."""
    return _trained(_named(module, _BIAS))


class SplitStore:
    """Replaces Transformer Engine's own weight-gradient store in ``module``.

    Attributes:
        users: the stores of schedules that the module is trained under, one at a time.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.original = module.wgrad_store
        self.users: list[WeightGradStore] = []
        self._module = module
        self._backward_dw = _own_backward_dw(module)
        # Some versions look in here before they pop.
        self.context: queue.Queue[Any] = queue.Queue()
        self._in_weight_pass = False
        self._no_bias_gradient: dict[int, torch.Tensor] = {}

    # Others may take their place at any time (adapters, ``load_state_dict(assign=True)``); frozen
    # ones may be trained later, and trained ones be frozen.
    @property
    def _weights(self) -> list[torch.nn.Parameter]:
        return _named(self._module, _WEIGHT)

    @property
    def _biases(self) -> list[torch.nn.Parameter]:
        return _named(self._module, _BIAS)

    def detach(self, user: WeightGradStore) -> None:
        """Postpone nothing into ``user``; without others the module gets its own store back."""
        if user in self.users:
            self.users.remove(user)
        if not self.users:
            self._module.wgrad_store = self.original

    def delay_wgrad_compute(self) -> bool:
        """Asked in forward (whether it may come to that), in backward, and by ``backward_dw``."""
        if self._in_weight_pass:
            return True
        store = WeightGradStore.running
        if store is not None and store.collecting and store in self.users:
            weights = _trained(self._weights)
            return bool(weights) and store.postpones(*weights, *_trained(self._biases))
        # In the backward of a fused pass, autograd gets the gradients as without us.
        return not _in_backward()

    def put(self, tensors: list[Any], function: Callable[..., Any]) -> None:
        """Take the work that computes the weight gradients from ``tensors``."""
        store = WeightGradStore.running
        assert store is not None
        # What autograd now gives as gradient of the weights is a stand-in or memory that W will
        # write to; keep it apart from a gradient that was there before.
        weights, biases = _trained(self._weights), _trained(self._biases)
        before = [(w, w.grad) for w in weights if not store.placeholder(w)]
        for weight, _ in before:
            weight.grad = None
        store.at_end(functools.partial(_restore, before))
        parts = self._sharded(tensors)
        first, *others = weights
        store.put(
            first,
            functools.partial(self._weight_pass, function, parts[_ROWS:]),
            rows=parts[:_ROWS],
            others=(*others, *biases),
            done=finish,
            sharded=[one for one in parts if isinstance(one, Sharded)],
            placeholders=weights,
        )

    def _parallel(self, mode: str) -> bool:
        module = self._module
        return getattr(module, "tp_size", 1) > 1 and getattr(module, "parallel_mode", "") == mode

    def _sharded(self, tensors: list[Any]) -> list[Any]:
        """What W needs, without what other ranks keep of it."""
        # Without its history, which would keep what other layers left in it until W.
        kept: list[Any] = [t.detach() if type(t) is torch.Tensor else t for t in tensors]
        if getattr(self._module, "sequence_parallel", False):
            # (input, output gradient), of which one has been gathered.
            for place, mode in enumerate(("column", "row")):
                if self._parallel(mode) and type(kept[place]) is torch.Tensor:
                    kept[place] = Sharded.of(kept[place], self._module.tp_group)
        return kept

    def _mark_added(self) -> None:
        for weight in _trained(self._weights):
            mark_added(weight)

    def pop(self) -> tuple[Any, Any]:
        """Do the one piece of work that is at hand; called by ``backward_dw``."""
        tensors, function = self.context.get_nowait()
        result = function(*tensors)
        # The second result is the bias gradient, or one for each of the experts. Where B had it
        # already (FP8, a bias added outside) there is none: some versions store it regardless,
        # unless the bias has a gradient.
        bias_gradients = result[1] if isinstance(result[1], (list, tuple)) else [result[1]]
        absent = [g is None or g.numel() == 0 for g in bias_gradients]
        for bias, missing in zip(self._biases, absent):
            if missing:
                bias.grad = self._no_bias_gradient[id(bias)] = stand_in(bias)
        return result, tensors

    def assert_empty(self) -> None:
        """Nothing waits in the module itself, ever."""

    @torch.no_grad()
    def _weight_pass(self, function: Callable[..., Any], results: list[Any], *rows: Any) -> None:
        # Of several chunks' rows the first chunk's memory for results; the function is what
        # Transformer Engine gave for the first, and nothing of it depends on the number of rows.
        # backward_dw sets gradients rather than adding to them (or only where there is none), so
        # it starts from none, and what was there is added up here.
        # It sets those of frozen parameters, too.
        before = [(p, p.grad) for p in (*self._weights, *self._biases)]
        for parameter, _ in before:
            parameter.grad = None
        self.context.put([[*map(whole, rows), *results], function])
        self._in_weight_pass = True
        try:
            self._backward_dw(self._module)
            if not self.context.empty():
                name = type(self._module).__name__
                raise RuntimeError(f"{name}.backward_dw computed no weight gradient")
        except BaseException:
            _restore(before)
            raise
        finally:
            self._in_weight_pass = False
            self.context = queue.Queue()
        for parameter, old in before:
            new, parameter.grad = parameter.grad, old
            if not parameter.requires_grad or new is None:
                continue
            if new is not self._no_bias_gradient.get(id(parameter)):
                accumulate(parameter, new)
        self._no_bias_gradient.clear()
        if self._module.fuse_wgrad_accumulation:
            self._mark_added()


def attach(chunk: torch.nn.Module, store: WeightGradStore) -> list[SplitStore]:
    """Let every Transformer Engine linear module of ``chunk`` postpone into ``store``.

    Returns:
        What to ``detach`` from ``store`` again. Modules that postpone into it already keep it.
    """
    attached = []
    for module in splittable(chunk):
        if not isinstance(module.wgrad_store, SplitStore):
            module.wgrad_store = SplitStore(module)  # type: ignore[assignment]
        ours: Any = module.wgrad_store
        if store not in ours.users:
            ours.users.append(store)
            attached.append(ours)
    return attached


def _named(module: torch.nn.Module, pattern: re.Pattern[str]) -> list[torch.nn.Parameter]:
    named = module.named_parameters(recurse=False)
    return [p for name, p in named if pattern.fullmatch(name)]


def _trained(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [p for p in parameters if p.requires_grad]


def _own_backward_dw(module: torch.nn.Module) -> Callable[[Any], None]:
    """Transformer Engine's ``backward_dw``; Megatron's wrappers override it to do nothing unless
    their own way of postponing is on."""
    for cls in type(module).__mro__:
        if cls.__module__.split(".")[0] != "megatron" and "backward_dw" in vars(cls):
            method: Callable[[Any], None] = vars(cls)["backward_dw"]
            return method
    raise RuntimeError(f"{type(module).__name__} has a wgrad_store but no backward_dw")


def _restore(gradients: list[tuple[torch.nn.Parameter, torch.Tensor | None]]) -> None:
    for weight, grad in gradients:
        weight.grad = grad


def _in_backward() -> bool:
    # Torch's own checkpointing asks in the same way. Inside a recomputed forward it says yes.
    return torch._C._current_graph_task_id() != -1


def _debugging() -> bool:
    """Transformer Engine's debug mode refuses postponed weight gradients."""
    state = sys.modules.get("transformer_engine.debug.pytorch.debug_state")
    return bool(getattr(getattr(state, "TEDebugState", None), "debug_enabled", False))
