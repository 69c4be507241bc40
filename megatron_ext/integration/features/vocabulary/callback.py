"""What ``--pp-vocab-parallel`` puts in force for a run: the passes of every iteration."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ....runtime.collectives import collectives
from ....runtime.edges import MessageOptions
from ....runtime.vocabulary import Batch, VocabularyPasses
from ....runtime.vocabulary_shards import EmbeddingShard, OutputShard, TensorRanks
from ...callbacks import Callback, Step
from ...errors import ConfigError
from ...gradients import require_gradient_hooks
from ...hooks import Hook
from ...utils import LastModels, unwrapped
from .ends import FLAG, depths_of, require_no_hooks
from .model import shard_of
from .run import VocabularyRunner, runner_of


class ShardedVocabulary(Callback):
    """Runs the vocabulary passes of every iteration.

    Args:
        messages: how the collectives' communicator is made.
        chunks: of tokens, in the cross entropy.
    """

    def __init__(self, messages: MessageOptions, chunks: int, hooks: Sequence[Hook]) -> None:
        self._messages, self._chunks, self._hooks = messages, chunks, hooks
        self._checked = LastModels()

    def hooks(self) -> Sequence[Hook]:
        return self._hooks

    def begin(self, step: Step) -> None:
        models = step.call.iteration.models
        if not self._checked.are(models):
            require_gradient_hooks(models)
            self._checked.set(models)
        require_no_hooks(models)  # in every step: they cost microseconds, and hooks may come late
        passes = functools.partial(_passes, step, self._messages, self._chunks)
        step.runner_type = runner_of(step.runner_type, passes)

    def close(self) -> None:
        self._checked = LastModels()


def _passes(
    step: Step, messages: MessageOptions, chunks: int, runner: VocabularyRunner
) -> VocabularyPasses:
    """The passes of one iteration; collective over the pipeline at the first one."""
    iteration, shape = step.call.iteration, step.call.shape
    config, shard = iteration.config, shard_of(iteration.models)
    if shape is None:
        raise ConfigError(f"{FLAG} needs microbatches of one known shape; drop it")
    ranks = TensorRanks(unwrapped(iteration.models[0]).tp_group, bool(config.sequence_parallel))
    sequence = shape[0] * (ranks.size if ranks.sequence_parallel else 1)
    weight, first_row = shard.output, shard.first_row
    training, depths = not iteration.forward_only, depths_of(config)
    samples, part = shape[1] * (1 + depths), sequence // shape[0]

    @functools.cache
    def batch(microbatch: int) -> Batch:
        begin, end = runner.span(0, microbatch, sequence)
        hidden = (end - begin) // part, samples, shape[2]
        return Batch((samples, end - begin), hidden, weight.dtype, weight.device, 1 + depths)

    return VocabularyPasses(
        step.plan,
        collectives(step.call.group, weight.device, messages),
        EmbeddingShard(shard.embedding, first_row),
        OutputShard(weight, first_row, chunks, ranks, training, predicts=depths > 0),
        batch,
        runner,
    )
