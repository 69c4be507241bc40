"""Routers of experts: which of their numbers are a slice's, and which the whole microbatch's.

Which experts a token goes to, and the probabilities, are the token's own. Of the microbatch are

    aux, seq aux    the tokens that each expert gets, and the tokens in all. An F adds its slice's;
                    the gradient of a slice's probabilities takes the sums, which are complete when
                    the first B comes, since the last slice's F precedes it.
    global aux      the same; Megatron's running mean takes them once a microbatch, in the last
                    slice's F, and every slice's gradient takes the mean as it was then.
    z               a mean over the microbatch's tokens: a slice's counts by its share of them.
    expert bias     Megatron adds the tokens of each expert up over calls; slices add up, too.

The logs get the microbatch's loss with its last slice, and 0 with the others.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

from ...hooks import hooked
from ...targets import BALANCING_LOG, BALANCING_LOSS, ROUTER_LOSSES, ROUTING, Z_LOSS
from ...utils import untraced
from .state import Sliced


class Balance:
    """One load-balancing loss of one router for one microbatch.

    Attributes:
        counts: of tokens by expert, of the slices that have run; in the end what a gradient takes.
        sums: of probabilities by expert.
        tokens: of these slices, on all ranks that share the loss.
    """

    def __init__(self) -> None:
        self.counts: Any = 0
        self.sums: Any = 0
        self.tokens: Any = 0

    def add(self, probs: torch.Tensor, counts: torch.Tensor, tokens: Any) -> None:
        """F of a slice.

        Args:
            probs: (tokens, experts) of this rank.
            counts: (experts,) of all ranks.
            tokens: of all ranks.
        """
        with torch.no_grad():
            self.counts = self.counts + counts
            self.sums = self.sums + probs.sum(dim=0)
            self.tokens = self.tokens + tokens

    def weights(self, factor: float, dtype: torch.dtype) -> torch.Tensor:
        """(experts,) what a probability adds to the loss.

        Args:
            factor: experts * coefficient / experts of a token.
            dtype: of the probabilities.
        """
        found: torch.Tensor = self.counts.to(dtype) * (factor / (self.tokens * self.tokens))
        return found


class BalancingLoss(torch.autograd.Function):
    """Probabilities of a slice -> a loss; its gradient is made from what all slices counted."""

    @staticmethod
    def forward(ctx: Any, probs: Any, loss: Any, balance: Balance, factor: float) -> Any:
        ctx.balance, ctx.factor, ctx.shape, ctx.dtype = balance, factor, probs.shape, probs.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        weights = ctx.balance.weights(ctx.factor, ctx.dtype)
        return (grads[0] * weights).to(ctx.dtype).expand(ctx.shape), None, None, None


class ScaledLoss(torch.autograd.Function):
    """A loss times ``factor``, and its gradient times another one."""

    @staticmethod
    def forward(ctx: Any, loss: Any, factor: float, of_gradient: float) -> Any:
        ctx.factor = of_gradient
        return loss * factor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None, None


_WHY = "experts would be balanced slice by slice"


class Routers(Sliced):
    """Where routers look at all tokens of a call, and the call that is in progress."""

    def __init__(self) -> None:
        super().__init__()
        self._router: Any = None
        self._balance: Balance | None = None
        self._running: tuple[torch.Tensor, torch.Tensor] | None = None
        self._counting = False

    @hooked(ROUTING, _WHY)
    @untraced
    def _routing(
        self, original: Callable[..., Any], router: Any, logits: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.slicing.now is None or not router.training:
            return original(router, logits, *args, **kwargs)
        self._router, before = router, self._router
        try:
            found = original(router, logits, *args, **kwargs)
            # With recompute, Megatron leaves losses out of F. Their counts are for the first B.
            first = self.slicing.first and not torch.is_grad_enabled()
            if first and router.is_aux_loss_enabled():
                self._count(router, logits, found[0])
        finally:
            self._router = before
        return found

    def _count(self, router: Any, logits: Any, probs: Any) -> None:
        """What F of a slice counts where its losses are computed in B."""
        from megatron.core.transformer.moe import router as module

        config, (tokens, samples) = router.config, logits.shape[:2]
        routing_map, scores = module.compute_routing_scores_for_aux_loss(
            logits.view(-1, config.num_moe_experts),
            router.topk,
            router.score_function,
            fused=config.moe_router_fusion,
        )
        self._counting = True
        try:
            router._apply_aux_loss(probs, scores, routing_map)
            router._apply_seq_aux_loss(probs, scores, routing_map, tokens, samples)
            router._apply_global_aux_loss(probs, scores, routing_map)
        finally:
            self._counting = False

    @hooked(ROUTER_LOSSES["aux"], _WHY)
    def _aux(self, original: Callable[..., Any], router: Any, *args: Any, **kwargs: Any) -> Any:
        return self._of_kind("aux", original, router, *args, **kwargs)

    @hooked(ROUTER_LOSSES["seq_aux"], _WHY)
    def _seq_aux(self, original: Callable[..., Any], router: Any, *args: Any, **kwargs: Any) -> Any:
        return self._of_kind("seq_aux", original, router, *args, **kwargs)

    def _of_kind(
        self, kind: str, original: Callable[..., Any], router: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.slicing.now is None:
            return original(router, *args, **kwargs)
        self._balance = self.slicing.held(kind, router, Balance)
        try:
            return original(router, *args, **kwargs)
        finally:
            self._balance = None

    @hooked(ROUTER_LOSSES["global_aux"], _WHY)
    def _of_all(self, original: Callable[..., Any], router: Any, *args: Any, **kwargs: Any) -> Any:
        """Megatron adds a call's counts to a running mean over calls, which are microbatches."""
        if self.slicing.now is None or router.global_tokens_per_expert is None:
            return original(router, *args, **kwargs)
        before = self._running = router.global_tokens_per_expert.clone(), router.ga_steps.clone()
        try:
            return self._of_kind("global_aux", original, router, *args, **kwargs)
        finally:
            if not (self.slicing.first and self.slicing.is_last):
                router.global_tokens_per_expert.copy_(before[0])
                router.ga_steps.copy_(before[1])
            self._running = None

    @hooked(BALANCING_LOSS, _WHY)
    def _balancing_loss(
        self,
        original: Callable[..., Any],
        probs: Any,
        tokens_per_expert: Any,
        total_num_tokens: Any,
        topk: int,
        num_experts: int,
        moe_aux_loss_coeff: float,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        balance, slicing = self._balance, self.slicing
        if slicing.now is None or balance is None:
            given = (probs, tokens_per_expert, total_num_tokens, topk, num_experts)
            return original(*given, moe_aux_loss_coeff, *args, **kwargs)
        if slicing.first:
            balance.add(probs, self._added(tokens_per_expert), total_num_tokens)
            if slicing.is_last:
                self._finish(balance)
        factor = num_experts * moe_aux_loss_coeff / topk
        value = probs.new_zeros(())
        if slicing.is_last:
            with torch.no_grad():
                value = (balance.sums * balance.weights(factor, probs.dtype)).sum()
        return BalancingLoss.apply(probs, value, balance, factor)

    def _added(self, counts: torch.Tensor) -> torch.Tensor:
        """This slice's counts, of what a loss got."""
        if self._running is None:
            return counts
        added: torch.Tensor = self._router.global_tokens_per_expert - self._running[0]
        return added

    def _finish(self, balance: Balance) -> None:
        """In F of the last slice: the running mean takes the microbatch."""
        if self._running is None:
            return
        router, (counts, steps) = self._router, self._running
        router.global_tokens_per_expert.copy_(counts + balance.counts)
        router.ga_steps.copy_(steps + 1)
        balance.counts = router.global_tokens_per_expert / router.ga_steps

    @hooked(BALANCING_LOG, _WHY)
    def _attached(
        self,
        original: Callable[..., Any],
        router: Any,
        activation: Any,
        aux_loss_coeff: float,
        aux_loss: Any,
        aux_loss_name: str,
        reduce_group: Any,
        *args: Any,
        valid_token_count: Any = None,
        **kwargs: Any,
    ) -> Any:
        slicing = self.slicing
        if slicing.now is not None:
            if self._counting:
                return activation
            # With --calculate-per-token-loss a loss counts by its tokens: the microbatch's.
            begin, end = slicing.span
            if valid_token_count is None:
                valid_token_count = activation.shape[0]
            valid_token_count = valid_token_count * slicing.tokens // (end - begin)
        return original(
            *(router, activation, aux_loss_coeff, aux_loss, aux_loss_name, reduce_group),
            *args,
            valid_token_count=valid_token_count,
            **kwargs,
        )

    @hooked(Z_LOSS, _WHY)
    def _z(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        slicing, router = self.slicing, self._router
        if slicing.now is None or router is None:
            return found
        begin, end = slicing.span
        share = float(Fraction(end - begin, slicing.tokens))
        # With --calculate-per-token-loss it counts by the tokens of the call, so by its share.
        per_token = router.config.calculate_per_token_loss
        return ScaledLoss.apply(found, share, 1.0 if per_token else share)
