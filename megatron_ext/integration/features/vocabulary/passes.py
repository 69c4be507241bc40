"""The vocabulary's passes of one iteration."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ....runtime.collectives import collectives
from ....runtime.vocabulary import Batch, VocabularyPasses
from ....runtime.vocabulary_shards import EmbeddingShard, OutputShard, TensorRanks
from ....schedule.schedule import Schedule
from ...callbacks import Step
from ...errors import ConfigError
from ...runner import Call, MegatronRunner, beneath
from ...utils import unwrapped
from .ends import FLAG, depths_of
from .model import shard_of
from .run import VocabularyRunner


def runner_of(step: Step) -> Callable[..., MegatronRunner]:
    """Makes the runner of a step, beneath what makes one that may cut microbatches."""
    passes = functools.partial(_passes, step.call, step.plan)
    return beneath(step.runner_type, VocabularyRunner, passes=passes)


def _passes(call: Call, plan: Schedule, runner: VocabularyRunner) -> VocabularyPasses:
    """The passes of one iteration; collective over the pipeline at the first one."""
    iteration, shape = call.iteration, call.shape
    config, shard = iteration.config, shard_of(iteration.models)
    if shape is None:
        raise ConfigError(f"{FLAG} needs microbatches of one shape; drop it")
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
        plan,
        collectives(call.group, weight.device),
        EmbeddingShard(shard.embedding, first_row),
        OutputShard(weight, first_row, ranks, training, predicts=depths > 0),
        batch,
        runner,
    )
