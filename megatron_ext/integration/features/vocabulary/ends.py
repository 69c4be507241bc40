"""The ends of a model whose vocabulary is on all ranks: what runs in place of the embedding and of
the output layer, and the rest of the model behind it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...hooks import bound, hooked
from ...model_classes import generates, refuse_text
from ...support import HOOKED, require
from ...targets import GPT_FORWARD, GPT_POSTPROCESS, GPT_STATE, MTP_ACCEPTANCE
from ...utils import nested, unwrapped

FLAG = "--pp-vocab-parallel"
# Of a module: attributes in which PyTorch keeps the hooks of its passes, or what it knows of them.
_BEFORE_PASSES = "_forward_pre_hooks"
PASSES = (_BEFORE_PASSES, "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
# Modules whose hooks look at no output: ours, and Megatron's that waits for gathered weights.
_OWN = ("megatron_ext.", "megatron.core.distributed.")
# Arguments that the end of the model needs behind the output layer.
_KEPT = ("labels", "loss_mask", "packed_seq_params", "input_ids", "runtime_gather_output")


class SharedEmbedding(torch.nn.Module):
    """In place of the first stage's word embeddings, and of the last one's for multi-token
    prediction: passes on what the pipeline's ranks summed up.

    Args:
        group: the tensor-parallel ranks.
        scatter: sequence parallelism scatters embeddings right here, as in stock's module.

    Attributes:
        given: [b, s, h] each, the sum over the pipeline of what this tensor rank's rows give, for
            the next calls of ``forward``, in their order.
        ids: [b, s], the tokens of the first of them, where they are known.
        weight: none, so Megatron finds no copies of one to be reduced.
    """

    weight = None

    def __init__(self, group: dist.ProcessGroup, scatter: bool) -> None:
        super().__init__()
        self.given: Sequence[Tensor] = ()
        self.ids: Tensor | None = None
        self._group, self._scatter = group, scatter

    def forward(self, input_: Tensor) -> Tensor:
        """The embeddings of tokens [b, s]: [b, s, h], or [s/t, b, h] where they are scattered.

        Raises:
            RuntimeError: nothing was given, or it is of other tokens.
        """
        from megatron.core.tensor_parallel import mappings

        given = self.given[0] if self.given else None
        if given is None or given.shape[:2] != input_.shape:
            held = "none" if given is None else f"those of {tuple(given.shape[:2])}"
            raise RuntimeError(
                f"{FLAG} needs the embeddings of {tuple(input_.shape)} tokens but has {held}; a "
                "forward pass outside the schedule cannot compute them"
            )
        self.given = self.given[1:]
        ids, self.ids = self.ids, None
        if ids is not None and not _are_equal(ids, input_):
            raise RuntimeError(
                f"{FLAG} embeds the token ids that the forward step gives the model, but other "
                "ones have come to the embedding; change them in the forward step, not in the "
                "model or in a hook, or drop it"
            )
        whole: Tensor = given
        if self._scatter:
            rows = given.transpose(0, 1).contiguous()
            whole = mappings.reduce_scatter_to_sequence_parallel_region(rows, group=self._group)
        elif self._group.size() > 1:
            whole = mappings.reduce_from_tensor_model_parallel_region(given, group=self._group)
        return whole


class HiddenStates(torch.nn.Module):
    """In place of the last stage's output layer: hands out what it gets.

    In F Megatron's model stops before it. In B, when all losses are there, the rest of the model
    runs: it gets them as its hidden states, the output layer passes them on for logits, and the
    loss is taken from there. On the way Megatron scales, masks and logs the losses of multi-token
    prediction as usual.

    Attributes:
        weight: none; see ``SharedEmbedding``.
        end: of the last forward pass.
    """

    weight: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.end: End | None = None

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """``input_``, and no bias."""
        return input_, None


@dataclass(frozen=True)
class End:
    """The rest of a forward pass, behind the last hidden states.

    Attributes:
        labels: [b, s].
        given: the arguments of ``GPTModel._postprocess`` that it still needs.
        run: with those arguments.
    """

    labels: Tensor
    given: dict[str, Any]
    run: Callable[..., Tensor]

    def losses(self, layer: HiddenStates, losses: Tensor, predictions: Tensor | None) -> Tensor:
        """The model's output [b, s].

        Args:
            layer: the model's.
            losses: [heads * s, b].
            predictions: [heads * s, b], of the same type; None: there are no depths.
        """
        outcome = losses[None] if predictions is None else torch.stack([losses, predictions])
        # The output layer's weight is detached with --mtp-detach-heads, and not used here.
        layer.weight = losses.detach()
        try:
            return self.run(hidden_states=outcome.movedim(0, -1), **self.given)
        finally:
            layer.weight = None


def rolled(tokens: Tensor, depths: int, model: Any, packed: Any) -> Tensor:
    """Tokens or labels of all heads: those of a depth begin one token later than the head's before.

    Args:
        tokens: [b, s].
        depths: D, of multi-token prediction.
        model: without wrappers.
        packed: Megatron's parameters of packed sequences.

    Returns:
        [(1 + D) * b, s].
    """
    every = [tokens]
    for _ in range(depths):
        from megatron.core.transformer.multi_token_prediction import roll_tensor

        more, _ = roll_tensor(every[-1], cp_group=model.cp_group, packed_seq_params=packed)
        every.append(more)
    return torch.cat(every)


def depths_of(config: Any) -> int:
    """Depths of multi-token prediction."""
    return getattr(config, "mtp_num_layers", None) or 0


def embedding_of(model: Any) -> SharedEmbedding | None:
    """What brings embeddings into a chunk; None in one that takes none."""
    embedding = getattr(unwrapped(model), "embedding", None)
    words = getattr(embedding, "word_embeddings", None)
    return words if isinstance(words, SharedEmbedding) else None


def hidden_of(models: Sequence[Any]) -> HiddenStates | None:
    """What hands hidden states out of the last stage; None on ranks without that stage."""
    layer = getattr(unwrapped(models[-1]), "output_layer", None)
    return layer if isinstance(layer, HiddenStates) else None


def with_hooks_of(whole: torch.nn.Module, part: torch.nn.Module) -> torch.nn.Module:
    """``part``, which takes the place of ``whole`` and gets the hooks of its passes."""
    for name, held in vars(whole).items():
        if name.startswith((*PASSES, "_is_full_backward_hook")):
            setattr(part, name, held)  # the same mapping, so that a handle removes it here too
    return part


def require_no_hooks(models: Sequence[Any]) -> None:
    """No hook of the script may wait for logits, or for the losses of a forward pass.

    Raises:
        ConfigError: one is on the output layer, or behind the forward pass of the last stage.
    """
    layer = hidden_of(models)
    if layer is None:
        return
    others = [x for x in PASSES if x != _BEFORE_PASSES]
    parts = [(layer, PASSES), *((module, others) for module in nested(models[-1]))]
    for module, kinds in parts:
        for hook in _foreign_hooks(module, kinds):
            require(HOOKED, False, name=getattr(hook, "__qualname__", type(hook).__name__))


def _foreign_hooks(module: torch.nn.Module, kinds: Sequence[str]) -> Iterator[Any]:
    for kind in kinds:
        for hook in vars(module).get(kind, {}).values():
            function = hook.func if isinstance(hook, functools.partial) else hook
            if not str(getattr(function, "__module__", "")).startswith(_OWN):
                yield function


def losses_of(labels: Tensor, logits: Tensor) -> Tensor:
    """In place of the model's ``compute_language_model_loss``, for what ``End.losses`` gave it.

    Args:
        labels: [b, s].
        logits: [s, b, 1 or 2].

    Returns:
        [b, s].
    """
    return logits[..., 0].t().contiguous()


def _are_equal(one: Tensor, two: Tensor) -> bool:
    """The same values; the host waits for the device only where they have memory of their own."""
    same = one.dtype == two.dtype and one.is_set_to(two)
    return same or bool((one == two).all())


@contextlib.contextmanager
def _without_last_stage(model: Any) -> Iterator[None]:
    """Inside, Megatron takes a chunk for one without output layer and loss."""
    model.post_process = False
    try:
        yield
    finally:
        model.post_process = True


class Ends:
    """Where Megatron's model stops before its output layer."""

    @hooked(GPT_FORWARD, "text would be generated from hidden states")
    def _forward(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        given = bound(original, model, *args, **kwargs).arguments
        last = isinstance(getattr(model, "output_layer", None), HiddenStates)
        processed = given.get("output_processor") is not None
        if generates(given) or processed or (last and given.get("labels") is None):
            raise refuse_text(FLAG)
        return original(model, *args, **kwargs)

    @hooked(GPT_POSTPROCESS, "hidden states would be taken for logits")
    def _postprocess(
        self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        layer = getattr(model, "output_layer", None)
        if not isinstance(layer, HiddenStates):
            return original(model, *args, **kwargs)
        call = bound(original, model, *args, **kwargs)
        given = call.arguments
        given["mtp_in_postprocess"] = hasattr(model, "mtp")
        needed = {name: given.get(name) for name in given if name in _KEPT}
        others = [p.name for p in call.signature.parameters.values() if p.default is p.empty]
        rest = {name: None for name in others if name not in ("self", "hidden_states")}
        run = functools.partial(original, model)
        layer.end = End(given["labels"], {**rest, **needed}, run)
        with _without_last_stage(model):
            return original(*call.args, **call.kwargs)

    @hooked(GPT_STATE, "a checkpoint would look for the whole output layer")
    def _sharded_state_dict(
        self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        last = isinstance(getattr(model, "output_layer", None), HiddenStates)
        # Stock takes the output layer's weight out of the state of a stage that has the loss.
        with _without_last_stage(model) if last else contextlib.nullcontext():
            return original(model, *args, **kwargs)

    @hooked(
        MTP_ACCEPTANCE,
        "tokens that multi-token prediction gets right would be counted without logits",
        when=lambda self: MTP_ACCEPTANCE.exists,
    )
    def _acceptance(
        self,
        original: Callable[..., Any],
        mtp_logits: Tensor,
        mtp_labels: Tensor,
        loss_mask: Tensor,
        output_layer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(output_layer, HiddenStates):
            return original(mtp_logits, mtp_labels, loss_mask, output_layer, *args, **kwargs)
        counted = loss_mask.bool()
        right = mtp_logits[..., 1].detach().t() == mtp_labels
        return (right & counted).sum().float(), counted.sum().float()
