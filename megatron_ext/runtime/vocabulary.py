"""Passes of a sharded vocabulary on one rank, and the collectives between them.

See ``schedule.vocabulary`` for what each does; with one barrier (algorithm 2 of arXiv 2411.05288).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..schedule.actions import Action, Op, Operation
from ..schedule.schedule import Schedule
from ..schedule.vocabulary import E, G, S, T, VocabularyOp
from .collectives import Collectives
from .executor import Executor
from .vocabulary_shards import EmbeddingShard, OutputShard, Scores

Operands = tuple[torch.Tensor, torch.Tensor]
_IDS = "ids"


@dataclass(frozen=True)
class Batch:
    """Shapes of a microbatch.

    Multi-token prediction has a head for each depth beside the main one. The samples of a head
    follow those of the head before it, so a depth makes the microbatch larger and nothing else.

    Attributes:
        tokens: (samples, sequence) of ids, labels and losses of all heads.
        hidden: of the last stage's output: (this tensor rank's part of the sequence, samples of
            all heads, hidden size).
        dtype: of hidden states and embeddings.
        heads: the main one, and one of each depth.
    """

    tokens: tuple[int, int]
    hidden: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    heads: int = 1

    @property
    def ends(self) -> list[int]:
        """Samples whose embeddings the first stage takes, and the last one, if it takes any."""
        one, rest = divmod(self.tokens[0], self.heads)
        assert not rest
        return [one, one * (self.heads - 1)] if self.heads > 1 else [one]

    def embeddings(self, samples: int) -> torch.Tensor:
        """Memory for embeddings of so many samples."""
        shape = samples, self.tokens[1], self.hidden[-1]
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def by_sample(self, values: torch.Tensor) -> torch.Tensor:
        """Values of all tokens, [sequence * samples], as (samples, sequence)."""
        return values.view(self.tokens[1], self.tokens[0]).t().contiguous()


class VocabularyModel(Protocol):
    """The model as the passes need it."""

    def begin(self) -> None:
        """Before the first pass."""

    def token_ids(self, microbatch: int) -> torch.Tensor:
        """(samples of all heads, sequence), on the first stage's rank; called in microbatch order,
        some microbatches before the first stage's F."""

    def output_gradient(self, microbatch: int, operands: Operands) -> None:
        """Add the output weight's gradient: ``g.t() @ x`` of the pair (x, g)."""

    def embedding_gradient(self, microbatch: int, grad: torch.Tensor) -> None:
        """Add the gradient of the embedding's weight."""

    def evaluate(self, microbatch: int) -> None:
        """On the last stage's rank, in evaluation: report the loss."""


class VocabularyPasses:
    """Runs the vocabulary passes of an iteration; see ``executor.Extension``.

    The model's own passes call the methods from ``embeddings`` on: F and B of the first stage and
    of the last one.
    """

    def __init__(
        self,
        plan: Schedule,
        collectives: Collectives,
        embedding: EmbeddingShard,
        output: OutputShard,
        batch: Callable[[int], Batch],
        model: VocabularyModel,
    ) -> None:
        self._collectives, self._batch, self._model = collectives, batch, model
        self._embedding, self._output = embedding, output
        placement = plan.placement
        self._last = placement.num_stages - 1
        self._roots = placement.rank_of(0), placement.rank_of(self._last)
        # Stages whose F is the first one of its rank and microbatch that takes embeddings.
        several = batch(plan.units[0]).heads > 1 and self._roots[0] != self._roots[1]
        self._embedded = (0, self._last) if several else (0,)
        self._units, self._ahead = plan.units, ids_ahead(plan)
        # By what it is and its microbatch: what a later pass takes.
        self._held: dict[tuple[Any, int], Any] = {}

    def handlers(self, executor: Executor) -> Mapping[Operation, Callable[[Any], None]]:
        """One function an operation; F and B wait for what is brought to them."""
        self._watchdog, measure = executor.watchdog, executor.recorder.measure

        def measured(run: Callable[[int], None]) -> Callable[[Action], None]:
            def handler(action: Action) -> None:
                with measure(action), torch.no_grad():
                    run(action.microbatch)

            return handler

        def brought(run: Callable[[Action], None], at: tuple[int, ...], op: VocabularyOp) -> Any:
            def handler(action: Action) -> None:
                if action.stage in at:
                    self._wait(op, action.microbatch)
                run(action)

            return handler

        def collective(run: Callable[[int], None]) -> Callable[[Action], None]:
            return lambda action: run(action.microbatch)

        backward = brought(executor.backward, (self._last,), VocabularyOp.JOIN_S)
        return {
            Op.F: brought(executor.forward, self._embedded, VocabularyOp.JOIN_E),
            Op.B: backward,
            Op.BW: backward,
            S: measured(self._score),
            T: measured(self._output_gradient),
            E: measured(self._embed),
            G: measured(self._embedding_gradient),
            VocabularyOp.SHARE_X: collective(self._share_hidden),
            VocabularyOp.JOIN_S: collective(self._join_scores),
            VocabularyOp.SHARE_D: collective(self._share_loss_gradient),
            VocabularyOp.JOIN_E: collective(self._join_embeddings),
            VocabularyOp.SHARE_G: collective(self._share_embedding_gradient),
        }

    def finish(self) -> None:
        """After the last action: the losses of an evaluation, and the end of all collectives.

        Raises:
            RuntimeError: a result is left over.
        """
        if not self._output.needs_gradient and self._is_root(1):
            for microbatch in self._units:
                self._wait(VocabularyOp.JOIN_S, microbatch)
                self._model.evaluate(microbatch)
        self._watchdog.waiting("for the last collectives of the pipeline's ranks")
        self._collectives.finish()
        kept = () if self._output.needs_gradient else (Scores, _IDS)
        left = [key for key in self._held if key[0] not in kept]
        if left:
            raise RuntimeError(f"an iteration ended with vocabulary passes left over: {left}")
        self._held.clear()

    def release(self) -> None:
        """Forget the model, which refers to this object; see ``executor.Extension``."""
        for name in ("_model", "_batch"):
            vars(self).pop(name, None)

    def embeddings(self, microbatch: int, end: int = 0) -> torch.Tensor:
        """F of the first stage, or with ``end`` 1 of the last one, for its depths: (samples,
        sequence, hidden size), the pipeline ranks' sum."""
        every = self._held[VocabularyOp.JOIN_E, microbatch]
        found: torch.Tensor = every.pop(end)
        if not every:
            del self._held[VocabularyOp.JOIN_E, microbatch]
        return found

    def put_embedding_gradient(self, microbatch: int, grad: torch.Tensor, end: int = 0) -> None:
        """B of the first stage, or of the last one: the gradient of ``embeddings``."""
        self._held[(VocabularyOp.SHARE_G, end), microbatch] = grad.contiguous()

    def put_hidden(self, microbatch: int, hidden: torch.Tensor, labels: torch.Tensor) -> None:
        """F of the last stage: its output, without history, and the labels."""
        batch = self._batch(microbatch)
        _require_shape("hidden states", hidden, batch.hidden)
        _require_shape("labels", labels, batch.tokens)
        hidden = hidden.to(batch.dtype).contiguous()
        self._held[VocabularyOp.SHARE_X, microbatch] = hidden, labels.long().contiguous()

    def losses(self, microbatch: int) -> torch.Tensor:
        """B of the last stage (F in evaluation): (samples, sequence), of every token."""
        scores: Scores = self._held[Scores, microbatch]
        return self._batch(microbatch).by_sample(scores.losses)

    def predictions(self, microbatch: int) -> torch.Tensor:
        """Beside ``losses``, if the output layer ``predicts``: the most likely tokens."""
        scores: Scores = self._held[Scores, microbatch]
        return self._batch(microbatch).by_sample(scores.statistics[3])

    def input_gradient(
        self, microbatch: int, grad: torch.Tensor, of_weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """B of the last stage: the gradient of its output, from that of ``losses``; from
        ``of_weight``, if it is given, the weight's gradient is made."""
        scores: Scores = self._held[Scores, microbatch]
        shared = grad if of_weight is None else of_weight
        self._held[VocabularyOp.SHARE_D, microbatch] = shared.t().reshape(-1)
        with torch.no_grad():
            result = self._output.input_gradient(scores, grad.t().reshape(-1))
        scores.gradient = grad.new_empty(0)
        return result

    def _is_root(self, end: int) -> bool:
        return self._collectives.rank == self._roots[end]

    def _wait(self, op: VocabularyOp | str, microbatch: int) -> None:
        self._watchdog.waiting(f"for the pipeline's ranks in {op} of microbatch {microbatch}")
        found = self._collectives.wait((op, microbatch))
        self._watchdog.waiting("inside the model")
        if found is not None:
            self._held[op, microbatch] = found

    def _take(self, what: Any, microbatch: int) -> Any:
        return self._held.pop((what, microbatch))

    def _waited(self, op: VocabularyOp | str, microbatch: int) -> Any:
        self._wait(op, microbatch)
        return self._take(op, microbatch)

    def _share_ids(self, microbatch: int) -> None:
        batch, root = self._batch(microbatch), self._roots[0]
        if self._is_root(0):
            ids = self._model.token_ids(microbatch)
            _require_shape("token ids", ids, batch.tokens)
            ids = ids.to(batch.device, torch.int64).contiguous()
        else:
            ids = torch.empty(batch.tokens, dtype=torch.int64, device=batch.device)
        chain = self._collectives.broadcast
        self._collectives.start((_IDS, microbatch), lambda: chain(ids, root), [ids])

    def _embed(self, microbatch: int) -> None:
        if not microbatch:  # on all ranks before every collective
            self._model.begin()
            for first in self._units[: self._ahead]:
                self._share_ids(first)
        ids = self._waited(_IDS, microbatch)
        self._held[_IDS, microbatch] = ids
        self._held[E, microbatch] = [
            self._embedding.embed(x) for x in ids.split(self._batch(microbatch).ends)
        ]

    def _join_embeddings(self, microbatch: int) -> None:
        parts, roots = self._take(E, microbatch), self._roots
        rank, reduce = self._collectives.rank, self._collectives.reduce

        def chain() -> dict[int, torch.Tensor] | None:
            every = enumerate([reduce(part, root) for part, root in zip(parts, roots)])
            return {end: total for end, total in every if roots[end] == rank} or None

        self._collectives.start((VocabularyOp.JOIN_E, microbatch), chain, parts)
        for later in self._units[microbatch + self._ahead :][:1]:
            self._share_ids(later)

    def _share_embedding_gradient(self, microbatch: int) -> None:
        batch, share, roots = self._batch(microbatch), self._collectives.broadcast, self._roots
        grads = [
            self._take((VocabularyOp.SHARE_G, end), microbatch)
            if self._is_root(end)
            else batch.embeddings(samples)
            for end, samples in enumerate(batch.ends)
        ]
        name, pairs = (VocabularyOp.SHARE_G, microbatch), list(zip(grads, roots))
        self._collectives.start(name, lambda: [share(*pair) for pair in pairs], grads)

    def _embedding_gradient(self, microbatch: int) -> None:
        grads = self._waited(VocabularyOp.SHARE_G, microbatch)
        grad = torch.cat(grads) if len(grads) > 1 else grads[0]
        ids = self._take(_IDS, microbatch)
        self._model.embedding_gradient(microbatch, self._embedding.gradient(ids, grad))

    def _share_hidden(self, microbatch: int) -> None:
        batch, root, share = self._batch(microbatch), self._roots[1], self._collectives.broadcast
        if self._is_root(1):
            hidden, labels = self._take(VocabularyOp.SHARE_X, microbatch)
        else:
            hidden = torch.empty(batch.hidden, dtype=batch.dtype, device=batch.device)
            labels = torch.empty(batch.tokens, dtype=torch.int64, device=batch.device)

        def chain() -> tuple[torch.Tensor, torch.Tensor]:
            return share(hidden, root), share(labels, root)

        name = VocabularyOp.SHARE_X, microbatch
        self._collectives.start(name, chain, [hidden, labels])

    def _score(self, microbatch: int) -> None:
        hidden, labels = self._waited(VocabularyOp.SHARE_X, microbatch)
        self._held[Scores, microbatch] = self._output.score(hidden, labels)

    def _join_scores(self, microbatch: int) -> None:
        scores: Scores = self._held[Scores, microbatch]
        output, collectives, root = self._output, self._collectives, self._roots[1]
        held = [scores.statistics, scores.most, scores.targets, scores.gradient]

        def chain() -> None:
            every = collectives.gather(scores.statistics)
            gradient = output.scale(scores, every)
            if output.needs_gradient:
                collectives.reduce(gradient, root)
                if collectives.rank != root:
                    scores.gradient = gradient.new_empty(0)

        self._collectives.start((VocabularyOp.JOIN_S, microbatch), chain, held)

    def _share_loss_gradient(self, microbatch: int) -> None:
        scores: Scores = self._held[Scores, microbatch]
        root, share = self._roots[1], self._collectives.broadcast
        if self._is_root(1):
            grad = self._take(VocabularyOp.SHARE_D, microbatch)
        else:
            grad = torch.empty_like(scores.most)
        name = VocabularyOp.SHARE_D, microbatch
        self._collectives.start(name, lambda: share(grad, root), [grad])

    def _output_gradient(self, microbatch: int) -> None:
        grad = self._waited(VocabularyOp.SHARE_D, microbatch)
        scores: Scores = self._take(Scores, microbatch)
        self._model.output_gradient(microbatch, self._output.operands(scores, grad))


def ids_ahead(plan: Schedule) -> int:
    """How many microbatches' token ids are sent before the first E; those of microbatch
    j + ``ids_ahead`` go behind the collective that joins the embeddings of microbatch j.

    The least number with which every rank has the ids of every E in time.
    """
    most = 1
    for row in plan.ranks:
        joined = 0
        for action in row:
            for op, _, microbatch in action.parts:
                if op is VocabularyOp.JOIN_E:
                    joined += 1
                elif op is E:
                    most = max(most, microbatch + 1 - joined)
    return most


def _require_shape(what: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise RuntimeError(
            f"--pp-vocab-parallel: the {what} of a microbatch are {tuple(tensor.shape)}, but its "
            f"sequence length and microbatch size make {shape}; microbatches of other shapes need "
            "the vocabulary on one rank: drop --pp-vocab-parallel"
        )
