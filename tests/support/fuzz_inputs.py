"""What is fuzzed: every reader of what a user gives us, with the rule that its answer must keep.

A target takes bytes. It either uses them or refuses them with a ``ValueError`` of one sentence;
anything else is a fault, and so is an accepted input that later steps cannot live with.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_ext._input import parse_bytes
from megatron_ext.commands.common import Parser, verify
from megatron_ext.commands.options import declare_schedule
from megatron_ext.plan.layout import read_layout
from megatron_ext.schedule import (
    Costs,
    Link,
    generate,
    lower,
    offload_pass,
    simulate,
)
from megatron_ext.schedule.costs import with_stage_file
from megatron_ext.schedule.generators import MOST_SETS
from megatron_ext.schedule.io import from_json, load
from megatron_ext.schedule.memory_cap import cap_sets, parse_cap
from megatron_ext.view import recorded

LONGEST_SENTENCE = 1000  # characters, the path of the file included


class Fault(AssertionError):
    """An input that was answered against the rules; the text says how."""


@dataclass(frozen=True)
class Target:
    """One reader.

    Attributes:
        name: as in a report.
        seeds: inputs that it accepts, to start from.
        use: reads one input, and uses what it has read; raises ``ValueError`` to refuse it.
    """

    name: str
    seeds: tuple[bytes, ...]
    use: Callable[[bytes], None]


def feed(target: Target, data: bytes) -> bool:
    """One input; True if it was accepted.

    Raises:
        Fault: it was answered against the rules. Whatever else is raised is a fault too.
    """
    try:
        target.use(data)
    except ValueError as error:
        sentence(str(error))
        return False
    return True


def sentence(text: str) -> None:
    """Check that a refusal is one sentence; a schedule's fault is followed by a picture of it."""
    first = text.split("\n", 1)[0]
    if not first.strip():
        raise Fault("the refusal says nothing")
    if len(first) > LONGEST_SENTENCE:
        raise Fault(f"the refusal has {len(first)} characters: {first[:200]}...")
    if not first.isprintable():
        raise Fault(f"the refusal holds control characters: {first!r}")
    text.encode()  # lone surrogates could not be written to a log


@cache
def _folder() -> Path:
    """Where inputs lie while they are read: in memory, where the system has such a place."""
    shared = Path("/dev/shm")
    own = tempfile.TemporaryDirectory(
        prefix="fuzz-", dir=shared if os.access(shared, os.W_OK) else None
    )
    _KEPT.append(own)
    return Path(own.name)


_KEPT: list[Any] = []


def _file(name: str, data: bytes) -> str:
    path = _folder() / name
    path.write_bytes(data)
    return str(path)


def _schedule(path: str) -> None:
    """As ``simulate``, ``show`` and ``--pp-schedule`` use a file."""
    schedule = load(path)
    verify(schedule)
    again = from_json(json.loads(json.dumps(schedule.to_json())))
    if again.fingerprint() != schedule.fingerprint():
        raise Fault("written and read again, the schedule is another one")
    lowered = lower(schedule.unlowered())
    if simulate(lowered).makespan <= 0:
        raise Fault("the schedule takes no time")


def _json(data: bytes) -> None:
    _schedule(_file("schedule.json", data))


def _stage_costs(data: bytes) -> None:
    costs = with_stage_file(Costs(), _file("costs.json", data))
    if costs.stages is not None and len(costs.stages) == 4:
        simulate(generate("zb-h1", 4, 3, costs=costs))


def _traces(data: bytes) -> None:
    """Both ranks' files in one input, with a line of three dashes between them."""
    folder = _folder() / "traces"
    folder.mkdir(exist_ok=True)
    for rank, part in enumerate(data.split(b"\n---\n", 1)):
        (folder / f"rank{rank}.jsonl").write_bytes(part)
    run = recorded.load(folder, generate("1f1b", 2, 2))
    if not 0 <= run.makespan < float("inf"):
        raise Fault(f"a run of {run.makespan} ms")


def _flags(data: bytes) -> None:
    """First line: which flag; the rest: its value."""
    name, _, value = data.decode("utf-8", "surrogateescape").partition("\n")
    if name == "cost":
        simulate(generate("zb-h1", 2, 2, costs=Costs.parse(value)))
    elif name == "cap":
        if cap_sets(parse_cap(value), 4, 2) < 1:
            raise Fault("a cap of less than one set")
    elif name == "bytes":
        if parse_bytes(value) <= 0:
            raise Fault("a budget of nothing")
    elif name == "time":
        link = Link.parse(4, value)
        plan = offload_pass(generate("po", 4, 8), link, "auto")
        simulate(plan.schedule)
    elif name == "layout":
        read_layout(value, 8)
    else:
        _command_line(value)


def _offload_request(data: bytes) -> None:
    """A time, as ``--pp-offload-time`` takes it."""
    from megatron_ext.integration.offload_request import OffloadRequest

    value = data.decode("utf-8", "surrogateescape")

    args = {"pp_offload_chunks": None}
    request = OffloadRequest.of(
        argparse.Namespace(pp_offload="half", pp_offload_time=value, **args)
    )
    if request is None or request.link(4) is None:
        raise Fault("a time was given and lost")


def _command_line(value: str) -> None:
    """Numbers as argparse takes them; sizes that no machine has must be refused, not tried."""
    parser = Parser(prog="fuzz", exit_on_error=False)
    declare_schedule(parser)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            args = parser.parse_args(["--schedule", "gis", *value.split(" ")])
    except (SystemExit, argparse.ArgumentError) as error:
        raise ValueError(str(error) or "argparse refused it") from None
    pp, m = args.pp or 2, args.microbatches or 2
    if 64 < pp * m * (args.chunks or 2) <= MOST_SETS:
        return  # it works, and takes its time
    generate("gis", pp, m, args.chunks, group_size=args.group_size)


def _bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


def _trace_seed() -> bytes:
    schedule = generate("1f1b", 2, 2)
    run, parts = simulate(schedule), []
    for rank, row in enumerate(run.schedule.ranks):
        events = [
            {"action": str(action), "start_us": 10.0 * start, "end_us": 10.0 * end}
            for action, start, end in zip(row, run.start[rank], run.end[rank])
        ]
        line = {"schedule": "1f1b", "pipeline_rank": rank, "microbatches": 2, "iteration": 1}
        line |= {"forward_only": False, "zero_unix_us": 1.7e15, "events": events, "plan": "ab12"}
        parts.append(json.dumps(line) + "\n" + json.dumps({**line, "iteration": 2}))
    return "\n---\n".join(parts).encode()


def bare_targets() -> dict[str, Target]:
    """Every target that needs no torch, by name."""
    offloaded = offload_pass(generate("po", 2, 4), Link.of(2, "0.2", "0.3"), "full").schedule
    orders = [generate("1f1b", 2, 2), lower(generate("v-half", 2, 3)), offloaded]
    flags = ("cost\n1,0.98,1/2,1e-3", "cap\n0.5", "bytes\n1.5GiB", "time\n0.25,0.3")
    flags += ("line\n--pp 2 --microbatches 3 --group-size 1", "layout\nE(t*2)*2|tttt,L")
    found = [
        Target("schedule", tuple(_bytes(order.to_json()) for order in orders), _json),
        Target("stage-costs", (_bytes({"stages": [[1, 2, 0.5]] * 4}),), _stage_costs),
        Target("traces", (_trace_seed(),), _traces),
        Target("flags", tuple(flag.encode() for flag in flags), _flags),
    ]
    return {target.name: target for target in found}


def torch_targets() -> dict[str, Target]:
    """Those whose readers import torch."""
    return {"request": Target("request", (b"0.25", b"0.25,0.5"), _offload_request)}


def targets() -> dict[str, Target]:
    """Every target by name; those that need torch are left out where there is none."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return bare_targets()
    return {**bare_targets(), **torch_targets()}


__all__ = ["Fault", "Target", "bare_targets", "feed", "sentence", "targets", "torch_targets"]
