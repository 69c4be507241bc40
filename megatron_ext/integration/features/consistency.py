"""Consistency check: all ranks of a job run with the same flags, packages and plan.

A rank with other flags, another plan or other packages does not fail by itself: the others wait for
messages that never come, or train on mixed data. So all ranks gather what they run with as soon as
the process group exists, and end with the same sentence where it differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..callbacks import Callback
from ..errors import ConfigError
from ..feature import Feature, Run
from ..hooks import hooked
from ..targets import INITIALIZE
from ..utils import gather, gather_over, most_microbatches

_SHOWN = 8


class Consistency(Feature):
    """Compares all ranks of a run with our flags."""

    def check(self, run: Run) -> None:
        if run.library:  # else as soon as there is a process group
            _require_equal(dict(gather_over((dist.get_rank(), _facts(run)), run.groups)))

    def start(self, run: Run) -> Sequence[Callback]:
        from ..flags import given

        self._run = run
        if run.library or set(given(run.args).values()) <= {"off"}:
            return ()
        if dist.is_initialized():
            agree(run)
        # Without the training package the process group is made by code that we do not know.
        return (self,) if run.training and not dist.is_initialized() else ()

    @hooked(INITIALIZE, "ranks with other flags or packages would hang or train on other data")
    def _initialize_distributed(
        self, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        result = original(*args, **kwargs)
        agree(self._run)
        return result


def agree(run: Run) -> None:
    """Compare this run over all ranks, which call this.

    Raises:
        ConfigError: on every rank: they differ.
    """
    facts = _facts(run)
    if run.schedule is not None:
        microbatches = most_microbatches(run.args)
        plan = run.schedule.first(microbatches)
        pp = run.args.pipeline_model_parallel_size
        size = f"pp={pp}, {run.chunks} chunks, {microbatches} microbatches"
        facts["the plan"] = f"{plan.name} {plan.fingerprint()} ({size})"
    _require_equal(dict(enumerate(gather(facts))))


def _facts(run: Run) -> dict[str, str]:
    """What this rank runs with, in the order in which a difference is reported."""
    from megatron_ext import __version__

    from ..flags import given

    versions = {"megatron-core": run.version, "torch": torch.__version__}
    return {**given(run.args, compared=True), **versions, "megatron_ext": __version__}


def _require_equal(facts: Mapping[int, Mapping[str, str]]) -> None:
    """Refuse ranks that run with different facts.

    Raises:
        ConfigError: the first difference.
    """
    for name in dict.fromkeys(name for held in facts.values() for name in held):
        values = {rank: held.get(name, "not given") for rank, held in facts.items()}
        usual, count = Counter(values.values()).most_common(1)[0]
        odd = [rank for rank, value in values.items() if value != usual]
        if odd:
            same = [rank for rank in odd if values[rank] == values[odd[0]]]
            listed = ", ".join(map(str, same[:_SHOWN])) + ", ..." * (len(same) > _SHOWN)
            raise ConfigError(
                f"{'ranks' if len(same) > 1 else 'rank'} {listed} "
                f"{'run' if len(same) > 1 else 'runs'} with {name} {values[odd[0]]}, "
                f"but {count} of {len(values)} ranks with {usual}; start every rank with the same "
                "flags, files and packages"
            )
