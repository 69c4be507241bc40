"""Cases of passes of a sharded vocabulary; see ``rank_cases``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.runtime.collectives import collectives
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.trace import Recorder
from megatron_ext.runtime.vocabulary import Batch, VocabularyPasses
from megatron_ext.runtime.vocabulary_shards import EmbeddingShard, OutputShard, TensorRanks
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.runtime.wgrad import WeightGradStore
from megatron_ext.schedule import Costs, check, forward_only, generate, lower
from megatron_ext.schedule.generators.vocabulary import add_vocabulary
from tests.ranks.runtime import toy
from tests.ranks.runtime.context import CPU, Context, channel

ROWS, BATCH = 24, 2  # of the vocabulary; samples of a microbatch
SEQUENCE = toy.ROWS // BATCH
WIDE = torch.float64


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """The same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


def matrices() -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and output layer; the latter's last rows are its first ones, on another rank."""
    embedding, output = (numbers(n, ROWS, toy.HIDDEN) for n in (1, 2))
    output[-6:] = output[:6]
    return embedding, output


def tokens(seed: int) -> torch.Tensor:
    """(microbatch, sequence); one row of the vocabulary far more often than others."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(ROWS, (BATCH, SEQUENCE), generator=generator)
    return torch.where(torch.rand(found.shape, generator=generator) < 0.3, 5, found)


def rolled(first: torch.Tensor, depths: int) -> torch.Tensor:
    """Those of all heads: a depth's begin one token later, and end with token 0."""
    every = [first]
    for _ in range(depths):
        every.append(torch.nn.functional.pad(every[-1][:, 1:], (0, 1)))
    return torch.cat(every)


def predicted(hidden: torch.Tensor, embeddings: torch.Tensor, depths: int) -> torch.Tensor:
    """A toy of multi-token prediction: the hidden states [s, heads * b, h] of all heads.

    Args:
        hidden: [s, b, h].
        embeddings: [depths * b, s, h].
        depths: beside the main head.
    """
    every = [hidden]
    for depth in range(depths):
        one = embeddings[depth * BATCH : (depth + 1) * BATCH].transpose(0, 1)
        every.append(torch.tanh(every[-1] + one))
    return torch.cat(every, 1)


def total_loss(losses: torch.Tensor, microbatch: int) -> torch.Tensor:
    """Not linear in the losses: nothing may assume that. Some weights are 0, as a loss mask's."""
    weights = torch.relu(numbers(300 + microbatch, *losses.shape))
    return (losses * weights).sum() + losses.square().mean()


class Runner(toy.ToyRunner):
    """Toy stages between a sharded embedding and a sharded output layer."""

    passes: VocabularyPasses
    gradients: dict[str, torch.Tensor]
    depths = 0
    likely: dict[int, torch.Tensor]
    asked: list[int]

    def begin(self) -> None:
        """Nothing to wait for."""

    def token_ids(self, microbatch: int) -> torch.Tensor:
        self.asked.append(microbatch)
        return rolled(tokens(100 + microbatch), self.depths)

    def output_gradient(self, microbatch: int, operands: Any) -> None:
        x, grad = operands
        self.gradients["output"] += grad.t() @ x

    def embedding_gradient(self, microbatch: int, grad: torch.Tensor) -> None:
        self.gradients["embedding"] += grad

    def evaluate(self, microbatch: int) -> None:
        loss = total_loss(self.passes.losses(microbatch), microbatch)
        self.losses[microbatch] = toy.to_bytes(loss)

    def forward(self, chunk: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        number = self.placement.stages[self.rank][chunk]
        if number == 0:
            x = self.passes.embeddings(microbatch).transpose(0, 1).reshape(toy.SHAPE).clone()
        x.requires_grad_(not self.forward_only)
        with torch.set_grad_enabled(not self.forward_only):
            y = self.stages[number](x)
        given = None
        if number == self.placement.num_stages - 1:
            y = y.view(SEQUENCE, BATCH, toy.HIDDEN)
            if self.depths:
                given = self.passes.embeddings(microbatch, 1).requires_grad_(not self.forward_only)
                y = predicted(y, given, self.depths)
            labels = rolled(tokens(200 + microbatch), self.depths)
            self.passes.put_hidden(microbatch, y.detach(), labels)
        self.live[chunk, microbatch] = x, y, given
        if self.forward_only:
            del self.live[chunk, microbatch]
        return y.detach()

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, split: bool
    ) -> torch.Tensor | None:
        number = self.placement.stages[self.rank][chunk]
        if number == self.placement.num_stages - 1:
            losses = self.passes.losses(microbatch).requires_grad_(True)
            loss = total_loss(losses, microbatch)
            self.losses[microbatch] = toy.to_bytes(loss)
            loss.backward()
            if self.depths:
                self.likely[microbatch] = self.passes.predictions(microbatch)
            grad = self.passes.input_gradient(microbatch, losses.grad)
        x, y, given = self.live.pop((chunk, microbatch))
        self.store.run_later = split
        y.backward(grad)
        if given is not None:
            self.passes.put_embedding_gradient(microbatch, given.grad, 1)
        if split:
            self.live[chunk, microbatch] = None
        if number == 0:
            given = x.grad.view(SEQUENCE, BATCH, toy.HIDDEN).transpose(0, 1)
            self.passes.put_embedding_gradient(microbatch, given)
        return x.grad

    def weight(self, chunk: int, microbatch: int) -> None:
        del self.live[chunk, microbatch]


def reference(stages: int, microbatches: int, depths: int) -> dict[str, Any]:
    """One process, the whole vocabulary, autograd."""
    embedding, output = (matrix.requires_grad_() for matrix in matrices())
    store, ledger = WeightGradStore(), toy.Ledger()
    every = [toy.Stage(number, WIDE, store, ledger) for number in range(stages)]
    losses, likely = {}, {}
    for j in range(microbatches):
        first, *more = embedding[rolled(tokens(100 + j), depths)].split(BATCH)
        x = first.transpose(0, 1).reshape(toy.SHAPE)
        for stage in every:
            x = stage(x)
        hidden = x.view(SEQUENCE, BATCH, toy.HIDDEN)
        if depths:
            hidden = predicted(hidden, torch.cat(more), depths)
        logits, labels = (hidden @ output.t()).transpose(0, 1), rolled(tokens(200 + j), depths)
        each = torch.nn.functional.cross_entropy(
            logits.reshape(-1, ROWS), labels.reshape(-1), reduction="none"
        )
        loss = total_loss(each.view(labels.shape), j)
        loss.backward()
        losses[j], likely[j] = loss.item(), logits.argmax(-1)
    grads = {"embedding": embedding.grad, "output": output.grad}
    for number, stage in enumerate(every):
        for name, parameter in stage.named_parameters():
            grads[f"{number}.{name}"] = parameter.grad
    return {"losses": losses, "grads": grads, "likely": likely}


class _Logits(TorchDispatchMode):
    """Finds the most tokens of which a tensor has numbers for all of a shard's rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows, self.most = rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(tensor, torch.Tensor) or func is torch.ops.aten.t.default:
                continue  # a transposed weight has as many columns
            if tensor.shape[1:] == (self._rows,):
                self.most = max(self.most, tensor.shape[0])
        return out


def vocabulary(
    context: Context,
    name: str,
    microbatches: int,
    training: bool = True,
    depths: int = 0,
) -> dict[str, Any]:
    """Largest differences from one process: of losses and of gradients, relative to the largest."""
    costs = Costs.of(1, 1, 1, vocabulary=["0.25", "0.125", "0.01", "0.01", "0.02"])
    order = generate(name, context.size, microbatches, costs=costs)
    schedule = add_vocabulary(order)
    if not training:
        schedule = forward_only(order.placement, microbatches, 1)
    plan = lower(schedule)
    check(plan, forward_only=not training)
    placement, rows = plan.placement, ROWS // context.size
    store, ledger = WeightGradStore(), toy.Ledger()
    stages = {n: toy.Stage(n, WIDE, store, ledger) for n in placement.stages[context.rank]}
    runner = Runner(stages, placement, context.rank, store, ledger, not training)
    first = context.rank * rows
    embedding, output = (matrix[first : first + rows] for matrix in matrices())
    runner.gradients = {k: torch.zeros_like(output) for k in ("embedding", "output")}
    runner.depths, runner.likely, samples = depths, {}, (1 + depths) * BATCH
    runner.asked = []
    hidden = SEQUENCE, samples, toy.HIDDEN
    runner.passes = VocabularyPasses(
        plan,
        collectives(context.group, CPU),
        EmbeddingShard(embedding, first),
        OutputShard(output, first, needs_gradient=training, predicts=depths > 0),
        lambda _: Batch((samples, SEQUENCE), hidden, WIDE, CPU, 1 + depths),
        runner,
    )
    executor = Executor(
        plan,
        context.rank,
        runner,
        channel(context, WIDE),
        Watchdog("nobody", 1),
        Recorder(False, CPU),
        runner.passes,
    )
    with _Logits(rows) as logits:
        executor.run()
    right = reference(placement.num_stages, microbatches, depths)
    found = {k: torch.frombuffer(bytearray(v), dtype=WIDE).item() for k, v in runner.losses.items()}
    worst = max((abs(found[j] - right["losses"][j]) for j in found), default=0.0)
    result = {"losses": len(found), "loss": worst, "left": len(runner.live)}
    result["tokens with logits"], result["asked"] = logits.most, runner.asked
    result["predicted"] = sum(
        (found != right["likely"][j]).sum().item() == 0 for j, found in runner.likely.items()
    )
    if training:
        mine = dict(runner.gradients)
        for number, stage in stages.items():
            mine |= {f"{number}.{k}": p.grad for k, p in stage.named_parameters()}
        for key, grad in mine.items():
            expected = right["grads"][key]
            own = expected[first : first + rows] if key in runner.gradients else expected
            difference = (grad - own).abs().max() / expected.abs().max()
            result["gradient"] = max(result.get("gradient", 0.0), difference.item())
    return result


def tensor_ranks(context: Context, sequence_parallel: bool, dtype: str) -> dict[str, float]:
    """The cross entropy of shards on tensor-parallel ranks, against the whole."""
    kind = getattr(torch, dtype)
    weight, whole = matrices()[1].to(kind), numbers(3, 8, BATCH, toy.HIDDEN).to(kind)
    labels = torch.randint(ROWS, (BATCH, 8), generator=torch.Generator().manual_seed(4))
    grads = numbers(5, BATCH, 8).to(torch.promote_types(kind, torch.float32))
    rows, part = ROWS // context.size, 8 // context.size
    ranks = TensorRanks(context.group, sequence_parallel)
    first, start = context.rank * rows, context.rank * part
    own = slice(start, start + part) if sequence_parallel else slice(None)
    shard = OutputShard(weight[first : first + rows], first, ranks, predicts=True)
    with torch.no_grad():
        scores = shard.score(whole[own], labels)
        shard.scale(scores, scores.statistics[None])
        grad = grads.t().reshape(-1)
        found = shard.input_gradient(scores, grad)
        x, logits_grad = shard.operands(scores, grad)
    likely = (whole @ weight.t()).argmax(-1).reshape(-1)
    exact, inputs = (t.double().requires_grad_() for t in (weight, whole))
    logits = (inputs @ exact.t()).transpose(0, 1)
    losses = torch.nn.functional.cross_entropy(
        logits.reshape(-1, ROWS), labels.reshape(-1), reduction="none"
    ).view(BATCH, 8)
    losses.backward(grads.double())

    def difference(one: torch.Tensor, other: torch.Tensor) -> float:
        return ((one.double() - other).abs().max() / other.abs().max()).item()

    dist.barrier(context.group)
    return {
        "losses": difference(scores.losses.view(8, BATCH).t(), losses.detach()),
        "input": difference(found, inputs.grad[own]),
        "weight": difference(
            logits_grad.double().t() @ x.double(),
            exact.grad[first : first + rows],
        ),
        "other predictions": (scores.statistics[3] != likely).sum().item(),
    }
