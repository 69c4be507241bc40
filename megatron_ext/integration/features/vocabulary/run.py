"""Training with a sharded vocabulary: what the first and the last stage do differently.

The embeddings come from all pipeline ranks, so the token ids of a microbatch are needed before its
first F: the script's forward step is run early, on a model that only keeps its arguments. The last
stage has hidden states in place of losses; the loss function runs at the beginning of its B, when
the losses are there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ....runtime.vocabulary import Operands, VocabularyPasses
from ....runtime.weight_hooks import foreign_hooks
from ....schedule.schedule import Schedule
from ....schedule.vocabulary import G, T
from ...gradients import add, finish, mark_added
from ...runner import MegatronRunner, with_loss_function
from ...split_local import accumulate_fused
from ...utils import unwrapped
from .ends import FLAG, PASSES, End, depths_of, embedding_of, hidden_of, rolled
from .model import VocabularyShard, shard_of


@dataclass(frozen=True)
class _Early:
    """A forward step of the first stage that has been run on a model that keeps its arguments.

    Attributes:
        ids: the token ids among the arguments.
        versions: of the arguments, when they were kept.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_func: Callable[..., Any]
    ids: torch.Tensor
    versions: list[int]

    def __call__(self, _: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
        if _versions(self.args, self.kwargs) != self.versions:
            raise RuntimeError(
                f"{FLAG} draws some microbatches before their forward passes, but the model's "
                "arguments have been written to since; the forward step must not use their memory "
                "for the next microbatch, and nothing may change them"
            )
        return model(*self.args, **self.kwargs), self.loss_func


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """How often each of the tensors has been written to."""
    tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


@contextlib.contextmanager
def _kept_calls(model: Any, result: torch.Tensor) -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Inside, a call of ``model`` keeps its arguments and returns ``result``. Neither a ``forward``
    of the script's nor hooks get them: they run in F."""
    found: list[tuple[Any, dict[str, Any]]] = []

    def keep(*args: Any, **kwargs: Any) -> torch.Tensor:
        found.append((args, kwargs))
        return result

    own = {name: vars(model)[name] for name in ("forward", *PASSES) if name in vars(model)}
    vars(model).update({name: {} for name in PASSES}, forward=keep)
    try:
        yield found
    finally:
        del model.forward
        vars(model).update(own)


class VocabularyRunner(MegatronRunner):
    """Megatron's model between the pipeline ranks' embeddings and their output layers.

    Args:
        passes: makes those of this iteration, for this runner.
        given: of ``MegatronRunner``.
    """

    def __init__(
        self,
        *given: Any,
        passes: Callable[[VocabularyRunner], VocabularyPasses],
    ) -> None:
        super().__init__(*given)
        models = self._it.models
        self._shard: VocabularyShard = shard_of(models)
        self._passes = passes(self)
        self._depths = depths_of(self._it.config)
        self._detached = bool(getattr(self._it.config, "mtp_detach_heads", False))
        self._steps: dict[int, _Early] = {}
        self._drawn: tuple[int, _Early, torch.Tensor] | None = None  # the last microbatch
        self._loss_functions: dict[int, Callable[..., Any]] = {}
        self._ends: dict[int, End] = {}
        # This rank's first chunk has the shards: its gradients are complete after T and G, too.
        self._open = 3
        self._last_use: dict[Any, Any] = {}

    def extension(self, plan: Schedule) -> VocabularyPasses:
        for action in plan.ranks[self._rank]:
            for op, _, microbatch in action.parts:
                if op in (T, G) and self._is_last(microbatch):
                    weight = self._shard.output if op is T else self._shard.embedding
                    self._last_use[id(weight)] = op
        return self._passes

    def computes_loss(self, stage: int) -> bool:
        return False

    def forward(self, chunk: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        it, passes = self._it, self._passes
        last = self.placement.stages[self._rank][chunk] == self.placement.num_stages - 1
        embedding = embedding_of(it.models[chunk])
        if embedding is not None:
            given = passes.embeddings(microbatch, int(last))
            if not it.forward_only:
                put = functools.partial(passes.put_embedding_gradient, microbatch, end=int(last))
                needs_grad = torch.zeros((), device=given.device, requires_grad=True)
                if last and self._detached:
                    put(torch.zeros_like(given))  # its gradient will not come
                given = _Given.apply(needs_grad, given, put)
            if not last:
                ids = self._steps[microbatch].ids
                embedding.ids = ids[:, slice(*self.span(chunk, microbatch, ids.shape[1]))]
            calls = self._depths if last else 1
            embedding.given = [given.view(calls, -1, *given.shape[1:])[i] for i in range(calls)]
        y = super().forward(chunk, microbatch, x)
        if last:
            assert y is not None
            layer = hidden_of(it.models)
            assert layer is not None and layer.end is not None
            end, layer.end = layer.end, None
            self._ends[microbatch] = end
            packed = end.given.get("packed_seq_params")
            labels = rolled(end.labels, self._depths, unwrapped(it.models[chunk]), packed)
            passes.put_hidden(microbatch, self._regrouped(y, 0, 1), labels)
        return y

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, split: bool
    ) -> torch.Tensor | None:
        if self.placement.stages[self._rank][chunk] == self.placement.num_stages - 1:
            y = self._live[chunk, microbatch].y
            assert y is not None
            grad = self._loss_gradient(chunk, microbatch).to(y.dtype)
        return super().backward(chunk, microbatch, grad, split)

    def begin(self) -> None:
        """The weights are about to be used: wait until they are gathered, as before a module."""
        self._shard()

    def token_ids(self, microbatch: int) -> torch.Tensor:
        """(samples of all heads, sequence), by running the script's forward step up to its
        model."""
        number = self.number(microbatch)
        if self._drawn is None or self._drawn[0] != number:
            self._drawn = number, *self._draw(microbatch)
        _, self._steps[microbatch], ids = self._drawn
        begin, end = self.span(self.placement.chunk_of(0), microbatch, ids.shape[1])
        return ids[:, begin:end]

    def _draw(self, microbatch: int) -> tuple[_Early, torch.Tensor]:
        """The script's forward step of a microbatch, and the token ids of all heads."""
        it, chunk = self._it, self.placement.chunk_of(0)
        self.before_batch(chunk, microbatch)
        model = it.models[chunk]
        with _kept_calls(model, torch.zeros((), device=self.num_tokens.device)) as found:
            _, loss_func = it.forward_step_func(it.data_iterators[chunk], model)
        if len(found) != 1:
            raise RuntimeError(
                f"{FLAG} runs the forward step before the model's embeddings are there, to get the "
                f"token ids; it must call the model that it is given once, but did {len(found)} "
                "times"
            )
        ((args, kwargs),) = found
        signature = inspect.signature(unwrapped(model).forward)
        given = signature.bind(*args, **kwargs).arguments
        ids = given["input_ids"]
        if not isinstance(ids, torch.Tensor):
            raise RuntimeError(f"{FLAG} needs token ids, but the model's input_ids are {ids}")
        packed = given.get("packed_seq_params")
        every = rolled(ids, self._depths, unwrapped(model), packed)
        return _Early(args, kwargs, loss_func, ids, _versions(args, kwargs)), every

    def output_gradient(self, microbatch: int, operands: Operands) -> None:
        self._add(T, microbatch, self._shard.output, operands)

    def embedding_gradient(self, microbatch: int, grad: torch.Tensor) -> None:
        self._add(G, microbatch, self._shard.embedding, grad)

    def evaluate(self, microbatch: int) -> None:
        self._loss(self.placement.chunk_of(self.placement.num_stages - 1), microbatch)

    def forward_step_func(self, chunk: int, microbatch: int) -> Callable[..., Any]:
        stage = self.placement.stages[self._rank][chunk]
        if stage == 0:
            return self._steps.pop(microbatch)
        original: Callable[..., Any] = super().forward_step_func(chunk, microbatch)
        if stage < self.placement.num_stages - 1:
            return original

        def kept(output: Any, function: Callable[..., Any]) -> Callable[..., Any]:
            self._loss_functions[microbatch] = function
            return function

        return with_loss_function(original, kept)

    def chunk_done(self, chunk: int) -> None:
        if chunk == 0:
            self._open -= 1
            if self._open:
                return
        super().chunk_done(chunk)

    def _loss(self, chunk: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses of all tokens, [heads * sequence, microbatch], and what the end of the model
        and the loss function make of them."""
        it, passes = self._it, self._passes
        layer = hidden_of(it.models)
        assert layer is not None
        losses = self._regrouped(passes.losses(microbatch).t(), 1, 0)
        losses.requires_grad_(not it.forward_only)
        likely = None
        if self._depths:
            likely = self._regrouped(passes.predictions(microbatch).t(), 1, 0)
        if it.config.timers is not None:  # which Megatron's function stops
            it.config.timers("forward-compute", log_level=2).start()
        output = self._ends.pop(microbatch).losses(layer, losses, likely)
        output = self.of_whole(chunk, microbatch, output)
        loss, num_tokens = self._schedules.forward_step_calc_loss(
            it.models[chunk],
            output,
            self._loss_functions.pop(microbatch),
            it.config,
            chunk if self._virtual else None,
            it.collect_non_loss_data,
            it.num_microbatches,
            self.losses,
            it.cp_size,
            True,
        )
        self.count(microbatch, num_tokens)
        self.reported(microbatch)
        return losses, loss

    def _loss_gradient(self, chunk: int, microbatch: int) -> torch.Tensor:
        """The gradient of the last stage's output."""
        losses, loss = self._loss(chunk, microbatch)
        scale = self._it.config.grad_scale_func
        if scale is not None:
            loss = scale(loss)
        if loss.requires_grad:
            torch.autograd.backward(loss)
        grad = torch.zeros_like(losses) if losses.grad is None else losses.grad
        of_weight = None
        if self._detached:
            of_weight = grad.clone()
            of_weight[len(grad) // (1 + self._depths) :] = 0
            of_weight = self._regrouped(of_weight, 0, 1).t()
        grad = self._regrouped(grad, 0, 1).t()
        found = self._passes.input_gradient(microbatch, grad, of_weight)
        return self._regrouped(found, 1, 0)

    def _regrouped(self, tensor: torch.Tensor, source: int, target: int) -> torch.Tensor:
        """Heads one behind the other in dimension ``target``, not ``source``: in Megatron's model
        they are in the sequence, in the passes in the batch, so tensor ranks cut each sequence."""
        if not self._depths:
            return tensor
        return torch.cat(tensor.chunk(1 + self._depths, source), target)

    def _add(self, op: Any, microbatch: int, weight: Any, gradient: Any) -> None:
        """Add to a shard's gradient, and pass it on to Megatron's data parallelism."""
        last = self._is_last(microbatch)
        if not weight.requires_grad:  # the script has frozen it
            if last:
                self.chunk_done(0)
            return
        fused = bool(self._it.config.gradient_accumulation_fusion)
        with self.syncing(0, last and self._last_use[id(weight)] is op):
            whole = isinstance(gradient, torch.Tensor)
            if not whole and fused and not foreign_hooks(weight):
                accumulate_fused(weight, *gradient)
                mark_added(weight)
            else:
                summed = gradient if whole else gradient[1].t().matmul(gradient[0])
                (torch.autograd.backward if foreign_hooks(weight) else add)(weight, summed)
            finish(weight)
        if last:
            self.chunk_done(0)


class _Given(torch.autograd.Function):
    """A tensor from elsewhere as part of the graph; its gradient goes to a function."""

    @staticmethod
    def forward(ctx: Any, needs_grad: torch.Tensor, given: torch.Tensor, put: Any) -> torch.Tensor:
        ctx.put = put
        return given.detach()  # not a view, so that it may be changed in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        ctx.put(grad)
        return None, None, None
