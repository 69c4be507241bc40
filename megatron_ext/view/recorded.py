"""Reads what ``--pp-trace DIR`` wrote: the measured timeline of one training iteration."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._input import parse_json, read_text, real, shown, whole
from ..schedule.io import load as load_schedule
from ..schedule.schedule import Schedule
from . import timeline


def plan_of(directory: str | Path, iteration: int | None = None) -> Schedule:
    """What one iteration was planned as: the schedule file that the run has put beside its traces.

    Args:
        directory: what ``--pp-trace`` was given.
        iteration: which training iteration (from 1); default: the last that all ranks have.

    Raises:
        ValueError: traces or the file are missing or damaged.
    """
    line = _chosen(directory, _per_rank(directory), iteration)[0]
    path = Path(directory) / plan_file(line.get("plan", ""))
    if not path.is_file():
        raise ValueError(
            f"{directory} holds no {path.name}, the plan of iteration {line['iteration']}; give "
            "the schedule too, a file or --schedule NAME"
        )
    return load_schedule(path)


def plan_file(fingerprint: str) -> str:
    """The name of a plan's file beside the traces, by the fingerprint that they carry.

    Raises:
        ValueError: it is none, so the name might lead anywhere.
    """
    if not isinstance(fingerprint, str) or not re.fullmatch("[0-9a-f]{1,64}", fingerprint):
        raise ValueError(f"a plan's fingerprint is hexadecimal, found {shown(fingerprint)}")
    return f"plan-{fingerprint}.json"


def load(
    directory: str | Path, schedule: Schedule, iteration: int | None = None
) -> timeline.Timeline:
    """The measured run of ``schedule`` from ``DIR/rank<R>.jsonl``, all ranks on one clock.

    With data or tensor parallelism several files belong to one pipeline rank; the lowest global
    rank of each is taken, which together are one pipeline. Clocks of different nodes may differ.

    Args:
        directory: what ``--pp-trace`` was given.
        schedule: what the run executed; other schedules in the files are an error.
        iteration: which training iteration (from 1); default: the last that all ranks have.

    Raises:
        ValueError: files are missing or damaged, or are of another schedule.
    """
    per_rank = _per_rank(directory)
    if sorted(per_rank) != list(range(schedule.pp)):
        raise ValueError(
            f"{directory} holds traces of pipeline ranks {shown(sorted(per_rank))}, but the "
            f"schedule has {schedule.pp} ranks; give the directory of one run with this schedule"
        )
    chosen = _chosen(directory, per_rank, iteration)
    for rank, line in enumerate(chosen):
        found = [event["action"] for event in line["events"]]
        if sorted(found) != sorted(str(a) for a in schedule.compute().ranks[rank]):
            raise ValueError(
                f"{directory}: rank {rank} ran schedule {shown(line.get('schedule'))} with "
                f"{shown(line.get('microbatches'))} microbatches, not {schedule.name} with "
                f"{schedule.microbatches}"
            )
    zero = min(line["zero_unix_us"] for line in chosen)
    run = timeline.measured(schedule, [_shifted(line, zero) for line in chosen])
    return replace(run, machine=" and ".join(dict.fromkeys(_machine(line) for line in chosen)))


def _machine(line: Any) -> str:
    """What a rank ran on; older traces do not have it."""
    found = line.get("machine", "")
    if not isinstance(found, str):
        raise ValueError(f"machine is no text but {shown(found)}; not a --pp-trace file")
    return found[:80]


def _per_rank(directory: str | Path) -> dict[int, dict[int, Any]]:
    """Lines of training iterations, by pipeline rank and iteration."""
    if not Path(directory).is_dir():
        raise ValueError(f"{directory} is no folder; train with --pp-trace {directory} to make it")
    found: dict[int, dict[int, Any]] = {}
    for path in sorted(Path(directory).glob("rank*.jsonl"), key=_global_rank):
        for line in _lines(path):
            if not line["forward_only"]:
                mine = found.setdefault(line["pipeline_rank"], {})
                mine.setdefault(line["iteration"], line)
    return found


def _chosen(
    directory: str | Path, per_rank: dict[int, dict[int, Any]], iteration: int | None
) -> list[Any]:
    """One iteration's line of every pipeline rank."""
    common = set.intersection(*map(set, per_rank.values())) if per_rank else set()
    if not common or (iteration is not None and iteration not in common):
        there = f"{min(common)} to {max(common)}" if common else "none"
        which = "" if iteration is None else f" {iteration}"
        raise ValueError(f"{directory}: no iteration{which} of all ranks (has {there})")
    return [per_rank[rank][iteration or max(common)] for rank in sorted(per_rank)]


def _global_rank(path: Path) -> int:
    digits = path.stem.removeprefix("rank")
    if not digits.isdigit():
        raise ValueError(f"{path}: expected a name like rank0.jsonl")
    return int(digits)


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    try:
        texts = read_text(path, most_bytes=_MOST_BYTES).splitlines()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}; not a --pp-trace file") from None
    for number, text in enumerate(texts, 1):
        try:
            line = parse_json(text)
        except ValueError:
            line = None
        fault = "no JSON" if line is None else _fault(line)
        if fault:
            raise ValueError(f"{path}, line {number}: {fault}; not a --pp-trace file")
        lines.append(line)
    return lines


def _fault(line: Any) -> str:
    """What a line of a trace lacks, or has of another kind; empty if nothing."""
    fields = ("forward_only", "pipeline_rank", "iteration", "events", "zero_unix_us")
    missing = [field for field in fields if not isinstance(line, dict) or field not in line]
    if missing:
        return f"no {', '.join(missing)}"
    try:
        for field in ("pipeline_rank", "iteration"):
            whole(line[field], field)
        _time(line, "zero_unix_us")
        if not isinstance(line["events"], list):
            return f"events are no list but {shown(line['events'])}"
        for event in line["events"]:
            if not isinstance(event, dict) or not isinstance(event.get("action"), str):
                return f"an event names no action: {shown(event)}"
            for field in ("start_us", "end_us"):
                _time(event, field)
    except ValueError as error:
        return str(error)
    return ""


def _time(holder: dict[str, Any], field: str) -> None:
    """Every rank's zero is its own, so times before it are right."""
    value = holder.get(field)
    good = isinstance(value, int | float) and not isinstance(value, bool)
    real(abs(value) if good else value, field, _LATEST_US)  # type: ignore[arg-type]


_LATEST_US = 1e16  # since 1970: the year 2286
_MOST_BYTES = 1 << 30  # of one rank's file


def _shifted(line: dict[str, Any], zero: float) -> list[dict[str, Any]]:
    shift = line["zero_unix_us"] - zero
    return [
        {**event, "start_us": event["start_us"] + shift, "end_us": event["end_us"] + shift}
        for event in line["events"]
    ]
