"""A rank's part of the embedding, the output layer and the cross entropy (arXiv 2411.05288).

Of the output layer (section 4.2):

The logits of all ranks' shards never exist whole. For a token with logits l, target y, M = max l
and Z = sum exp(l - M):

    loss = M + log Z - l[y],        d loss / d l[v] = exp(l[v] - M) / Z - (v == y)

A shard computes with a maximum of its own, m: exp(l - m) and, without the target's column, its
product with the weights. Once M, Z and l[y] are known, exp(m - M) / Z scales it, and the target's
owner adds exp(l[y] - M) / Z - 1, computed without cancellation, times the target's weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist


class EmbeddingShard(NamedTuple):
    """Rows of the embedding's weight.

    Attributes:
        weight: [rows, hidden size].
        first_row: in the whole weight.
    """

    weight: torch.Tensor
    first_row: int

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """E: the embeddings [..., hidden size] of ``ids`` that are here; zeros for the others."""
        rows, away = self._rows(ids)
        return torch.embedding(self.weight, rows).masked_fill_(away[..., None], 0)

    def gradient(self, ids: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """G: the weight's gradient, from that of the embeddings."""
        rows, away = self._rows(ids)
        grad = grad.masked_fill(away[..., None], 0)
        # What autograd calls for Megatron's embedding.
        backward = torch.ops.aten.embedding_dense_backward
        found: torch.Tensor = backward(grad, rows, self.weight.shape[0], -1, False)
        return found

    def _rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = ids - self.first_row
        away = (rows < 0) | (rows >= self.weight.shape[0])
        return rows.masked_fill_(away, 0), away


class TensorRanks(NamedTuple):
    """The tensor-parallel ranks of a stage.

    Attributes:
        group: None where there is one.
        sequence_parallel: each has a part of the sequence, dimension 0 of hidden states.
    """

    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of the whole sequence."""
        if self.size == 1 or not self.sequence_parallel:
            return hidden
        out = hidden.new_empty(self.size * hidden.shape[0], *hidden.shape[1:])
        dist.all_gather_into_tensor(out, hidden.contiguous(), group=self.group)
        return out

    def summed(self, grad: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' gradients of the whole sequence; this rank's part of it."""
        if self.size == 1:
            return grad
        if not self.sequence_parallel:
            dist.all_reduce(grad, group=self.group)
            return grad
        out = grad.new_empty(grad.shape[0] // self.size, *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=self.group)
        return out

    def joined(
        self, most: torch.Tensor, total: torch.Tensor, first: torch.Tensor | None
    ) -> torch.Tensor:
        """Statistics of all ranks together.

        Args:
            most: [2, tokens], maximum and target's logit of this rank's shard.
            total: [tokens], sum of exponentials less ``most[0]``.
            first: [tokens], the first row that has the maximum; None: nobody asks for it.

        Returns:
            [3, tokens]: maximum, target's logit, sum; and ``first``, if it is there.
        """
        if self.size > 1:
            own = most[0].clone()
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
            total = total * (own - most[0]).exp()
            dist.all_reduce(total, group=self.group)
            if first is not None:
                first = first.masked_fill(own < most[0], torch.inf)
                dist.all_reduce(first, dist.ReduceOp.MIN, group=self.group)
        return torch.stack([*most, total] if first is None else [*most, total, first])


ALONE = TensorRanks()


@dataclass
class Scores:
    """Of one microbatch, between S and T.

    Attributes:
        hidden: [tokens of this rank's part of the sequence, microbatch, hidden size].
        targets: [tokens], rows of the shard; -1 where another rank has them.
        most: [tokens], maximum of this shard's logits.
        gradient: [tokens, hidden size], of the input; scaled by ``scale``, summed over ranks then.
        statistics: [3, tokens] of the tensor ranks' shards: maximum, target's logit, sum; of all
            shards after ``scale``: log of the sum of exponentials, target's logit, target's weight.
            Where the shard ``predicts``, also the first row of the vocabulary with the maximum.
        kept: [tokens, rows], exponentials; None in evaluation.
    """

    hidden: torch.Tensor
    targets: torch.Tensor
    most: torch.Tensor
    gradient: torch.Tensor
    statistics: torch.Tensor
    kept: torch.Tensor | None

    @property
    def losses(self) -> torch.Tensor:
        """[tokens]: after ``scale``."""
        return self.statistics[0] - self.statistics[1]


class OutputShard:
    """Rows of the output layer's weight.

    Args:
        weight: [rows, hidden size].
        first_row: in the whole weight.
        ranks: that have other rows of the same pipeline rank.
        needs_gradient: False in evaluation.
        predicts: find every token's most likely one too.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        first_row: int,
        ranks: TensorRanks = ALONE,
        needs_gradient: bool = True,
        predicts: bool = False,
    ) -> None:
        self.weight, self.first_row, self.ranks = weight, first_row, ranks
        self.needs_gradient, self.predicts = needs_gradient, predicts
        self._wide = torch.promote_types(weight.dtype, torch.float32)

    def score(self, hidden: torch.Tensor, labels: torch.Tensor) -> Scores:
        """S.

        Args:
            hidden: [sequence (this rank's part), microbatch, hidden size].
            labels: [microbatch, sequence].
        """
        rows = self.weight.shape[0]
        x = self._tokens(hidden)
        targets = labels.t().reshape(-1) - self.first_row
        targets = targets.masked_fill((targets < 0) | (targets >= rows), -1)
        target, here = targets[:, None].clamp(min=0), targets[:, None] >= 0
        logits = torch.matmul(x, self.weight.t()).to(self._wide)
        own = logits.amax(-1)
        # Both statistics of tokens whose target is elsewhere are below those of its owner.
        known = logits.gather(1, target).masked_fill(~here, -torch.inf).squeeze(1)
        first = (logits.argmax(-1) + self.first_row).to(self._wide) if self.predicts else None
        weights = logits.sub_(own[:, None]).exp_()
        total, kept = weights.sum(-1), None
        gradient = x.new_empty(0)
        if self.needs_gradient:
            weights.scatter_(1, target, weights.gather(1, target).masked_fill(here, 0))
            kept = weights.to(x.dtype)
            gradient = torch.matmul(kept, self.weight)
        most = torch.stack([own, known])
        return Scores(hidden, targets, own, gradient, self.ranks.joined(most, total, first), kept)

    def scale(self, scores: Scores, every: torch.Tensor) -> torch.Tensor:
        """With all shards' statistics: this shard's part of the input's gradient, for a gradient
        of 1 of every token's loss.

        Args:
            scores: statistics and gradient are made those of all shards.
            every: [pipeline ranks, 3 or 4, tokens].
        """
        top = every[:, 0].amax(0)
        log_sum = top + (every[:, 2] * (every[:, 0] - top).exp()).sum(0).log()
        first = every[:, 3:].masked_fill(every[:, :1] < top, torch.inf).amin(0)
        target = every[:, 1].amax(0)
        # As in Megatron, a label outside of the vocabulary counts as the greatest logit.
        target = torch.where(target.isinf(), top, target)
        here = scores.targets >= 0
        missing = torch.expm1(target - log_sum).masked_fill(~here, 0)
        scores.statistics = torch.stack([log_sum, target, missing, *first])
        if self.needs_gradient:
            scale = (scores.most - log_sum).exp()
            part = scores.gradient.to(self._wide).mul_(scale[:, None])
            rows = self.weight[scores.targets.clamp(min=0)]
            part.addcmul_(missing[:, None], rows.to(self._wide))
            scores.gradient.copy_(part)
        return scores.gradient

    def input_gradient(self, scores: Scores, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the last stage's output, from the sum of all pipeline ranks'.

        Args:
            scores: ``gradient`` is that sum.
            grad: [tokens], of the losses.
        """
        whole = (scores.gradient * grad[:, None]).to(scores.gradient.dtype)
        sequence, *rest = scores.hidden.shape
        if self.ranks.sequence_parallel:
            sequence *= self.ranks.size
        return self.ranks.summed(whole.view(sequence, *rest))

    def operands(self, scores: Scores, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """T: the weight's gradient is ``logits_gradient.t() @ inputs``.

        Args:
            scores: after ``scale``.
            grad: [tokens], of the losses.

        Returns:
            [tokens, hidden size] inputs, [tokens, rows] gradient of the logits.
        """
        assert scores.kept is not None
        x = self._tokens(scores.hidden)
        log_sum, _, missing = scores.statistics[:3]
        factor = (scores.most - log_sum).exp().mul_(grad)
        grads = scores.kept * factor[:, None]
        target, here = scores.targets[:, None].clamp(min=0), scores.targets[:, None] >= 0
        added = torch.where(here, (missing * grad)[:, None], grads.gather(1, target))
        return x, grads.scatter_(1, target, added).to(x.dtype)

    def _tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.ranks.whole(hidden).reshape(-1, hidden.shape[-1])
