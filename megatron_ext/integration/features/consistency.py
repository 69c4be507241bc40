"""Consistency check: all ranks of a job run with the same flags, files, packages and plan.

A rank with other flags, another plan or other packages does not fail by itself: the others wait for
messages that never come, or train on mixed data. So every rank publishes its facts as soon as the
process group exists, rank 0 compares, and all ranks end with the same sentence. The facts go
through the process group's key-value store, not through a collective: a rank without our flags
takes no part, and the others must be able to report that.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..callbacks import Callback
from ..errors import ConfigError
from ..feature import Feature, Run
from ..hooks import hooked
from ..pipeline import groups_of_call, pipeline_group
from ..targets import INITIALIZE, STEPS
from ..utils import chunks_of, device_name, gather_over, most_microbatches, unwrapped

WAIT_ENVIRONMENT = "MEGATRON_EXT_AGREEMENT_SECONDS"
WAIT_SECONDS = 120.0  # ranks come here together, straight from creating the process group
_PREFIX = "MEGATRON_EXT_"
# How a process was started is the same for all that matters, and one rank alone may be verbose.
_OWN = ("MEGATRON_EXT_STARTED", "MEGATRON_EXT_TRACE", "MEGATRON_EXT_VERBOSE")
_FIX = "start every rank with the same flags, files, environment and packages"
_SHOWN = 8
# Between rank 0's verdict and its exit, which may take the store away from those who read it.
_READ_SECONDS = 5.0
_rounds = 0


def facts(
    flags: Mapping[str, str],
    plan: str | None,
    megatron: str,
    megatrons_flags: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """What this rank runs with, in the order in which a difference is reported.

    Args:
        flags: those of ours that were given, with their values as text.
        plan: hash and size of the schedule; None without one.
        megatrons_flags: those of Megatron and the training script, as ``flags``.
    """
    from megatron_ext import __version__

    environment = {
        f"${name}": value
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIX) and name not in _OWN
    }
    return {
        **flags,
        **environment,
        "megatron-core": megatron,
        "torch": str(torch.__version__),
        "megatron_ext": __version__,
        "megatron_ext's source files": _sources(),
        **{f"Megatron's {flag}": value for flag, value in (megatrons_flags or {}).items()},
        **({} if plan is None else {"the plan": plan}),
    }


@functools.cache
def _sources() -> str:
    """A hash of this package's modules: checkouts of one version number may differ."""
    digest, package = hashlib.sha256(), Path(__file__).resolve().parents[2]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


class Consistency(Feature):
    """Compares all ranks of a run with our flags."""

    def check(self, run: Run) -> None:
        if run.library:  # else by a store, as soon as there is one
            _compare(run, run.groups)

    def start(self, run: Run) -> Sequence[Callback]:
        from ..flags import given

        self._run = run
        if run.library:
            # Models are compared one by one, over the ranks of their calls: by ``check`` where the
            # schedule is ours.
            self._compared = weakref.WeakSet[Any]()
            return () if run.request else (self,)
        if set(given(run.args).values()) <= {"off"}:
            return ()
        if dist.is_initialized():
            agree(run)
        # Without the training package the process group is made by code that we do not know.
        return (self,) if run.training and not dist.is_initialized() else ()

    @hooked(
        INITIALIZE,
        "ranks with other flags or packages would hang or train on other data",
        when=lambda self: not self._run.library,
    )
    def _initialize_distributed(
        self, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        result = original(*args, **kwargs)
        agree(self._run)
        return result

    @hooked(
        STEPS,
        "ranks with other options would hang or train in other ways",
        when=lambda self: self._run.library,
    )
    def _of_any_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from ..flags import in_options

        model = unwrapped(chunks_of(kwargs["model"])[0])
        if model not in self._compared:
            self._compared.add(model)
            collection = kwargs.get("pg_collection")
            pipeline = pipeline_group(kwargs.get("p2p_communicator"), collection)
            with in_options():
                _compare(self._run, groups_of_call(pipeline, collection))
        return original(*args, **kwargs)


def _compare(run: Run, groups: Sequence[Any]) -> None:
    """Compare a library's run over the ranks of a call.

    Raises:
        ConfigError: on every rank: they differ.
    """
    from ..flags import given

    mine = facts(given(run.args, compared=True), None, run.version)
    every = gather_over((dist.get_rank(), mine), groups)
    problem = difference([held for _, held in every], [rank for rank, _ in every])
    if problem:
        raise ConfigError(problem)


def agree(run: Run) -> None:
    """Compare this run over all ranks, which call this, and let them make one order.

    Raises:
        ConfigError: on every rank: they differ.
    """
    from ..flags import given

    flags = given(run.args, compared=True)
    # With an estimate the ranks must agree on a device before they can have one plan.
    settle = run.settle
    plan = _plan_of(run) if settle is None else None
    device = "" if settle is None else device_name()
    device = require_agreement(facts(flags, plan, run.version, run.stock_flags), device)
    if settle is not None:
        settle(device)
        require_agreement({"the plan": str(_plan_of(run))})


def _plan_of(run: Run) -> str | None:
    """Name, fingerprint and size of this rank's plan for the full batch; None without one."""
    args, schedule = run.args, run.schedule
    if schedule is None:
        return None
    pp, microbatches = args.pipeline_model_parallel_size, most_microbatches(args)
    plan = schedule.first(microbatches)
    size = f"pp={pp}, {run.chunks} chunks, {microbatches} microbatches"
    return f"{plan.name} {plan.fingerprint()} ({size})"


def require_agreement(mine: Mapping[str, str], value: str = "") -> str:
    """Compare ``mine`` over all ranks of the process group; all of them call this.

    Returns:
        Rank 0's ``value``.

    Raises:
        ConfigError: on every rank that came here: a rank differs, or did not come.
    """
    global _rounds
    world, rank = dist.get_world_size(), dist.get_rank()
    _rounds += 1
    if world == 1:
        return value
    default = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"megatron_ext/agreement/{_rounds}", default)  # of this round alone
    seconds = float(os.environ.get(WAIT_ENVIRONMENT, WAIT_SECONDS))
    store.set(f"facts/{rank}", json.dumps(dict(mine)))
    if rank == 0:
        verdict, there = _judge(store, world, seconds)
        store.set("verdict", json.dumps((verdict, value)))
        if verdict:
            _wait(store, [f"read/{r}" for r in there if r], _READ_SECONDS)
    else:
        # Rank 0 may itself wait for as long for another rank.
        if not _wait(store, ["verdict"], 2 * seconds):
            raise ConfigError(_silent([0], seconds, mine))
        verdict, value = json.loads(store.get("verdict"))
        store.set(f"read/{rank}", "1")
    if verdict:
        raise ConfigError(verdict)
    return value


def _judge(store: Any, world: int, seconds: float) -> tuple[str, list[int]]:
    """(the sentence, empty if all agree; the ranks that are there)."""
    keys = [f"facts/{r}" for r in range(world)]
    if not _wait(store, keys, seconds):
        there = [r for r in range(world) if store.check([keys[r]])]
        absent = sorted(set(range(world)) - set(there))
        if absent:
            return _silent(absent, seconds, json.loads(store.get(keys[0]))), there
    every = [json.loads(value) for value in store.multi_get(keys)]
    return difference(every), list(range(world))


def difference(every: Sequence[Mapping[str, str]], ranks: Sequence[int] = ()) -> str:
    """What is not the same on all ranks, as one sentence; empty if there is nothing.

    Args:
        every: the facts of each rank.
        ranks: which they are; empty: all of the job.
    """
    names = list(dict.fromkeys(name for held in every for name in held))
    found = []
    for name in names:
        values = [held.get(name, "not given") for held in every]
        # Of equally many, what the lowest rank has.
        usual, count = Counter(values).most_common(1)[0]
        odd = [at for at, value in enumerate(values) if value != usual]
        if odd:
            found.append((name, values, usual, count, odd))
    if not found:
        return ""
    name, values, usual, count, odd = found[0]
    same = [ranks[at] if ranks else at for at in odd if values[at] == values[odd[0]]]
    more = [other[0] for other in found[1:]]
    return (
        f"{_ranks(same)} {'runs' if len(same) == 1 else 'run'} with {name} {values[odd[0]]}, but "
        f"{count} of {len(every)} ranks with {usual}"
        + (f" (they differ in {', '.join(more)} too)" if more else "")
        + f"; {_FIX}"
    )


def _silent(absent: Sequence[int], seconds: float, mine: Mapping[str, str]) -> str:
    flags = " ".join(f"{name} {value}" for name, value in mine.items() if name.startswith("--"))
    return (
        f"{_ranks(absent)} did not say within {seconds:g} s what "
        f"{'it runs' if len(absent) == 1 else 'they run'} with, as a rank does that has no flag of "
        f"megatron_ext's, or is stuck; this rank has {flags}; {_FIX}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:_SHOWN]))
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}{more}"


def _wait(store: Any, keys: list[str], seconds: float) -> bool:
    """True if all keys are there in time."""
    if not keys:
        return True
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError:  # of torch's store: the time is over, or the store is gone
        return False
    return True
