#!/usr/bin/env python3
"""Injects faults into real pipelines of gloo ranks and judges how they end.

    python -m tests.campaigns.faults [--random 100 --seed 1] [--only PATTERN] [--jobs 4]
        [--json FILE]

Every kind of action (F, B, W, BW, messages, copies of activation sets) has each accident once: its
rank is killed, stopped, raises, exits, hangs, runs out of memory; a message is lost or late; a copy
fails or hangs. ``--random`` adds accidents at random actions of random schedules and ranks. A case
passes if

- every rank ends within the watchdog's time, no rank that should fail with status 0,
- every rank that can still speak has one report, which names its action or what it waited for,
- one of them names the rank that had the accident,
- neither processes nor shared memory are left, nor host memory behind an exception,
- a run whose message was only late gives the results of one without accident, bit for bit.

The watchdog's time starts at the accident, so that a busy machine does not look like a hang. As
under torchrun, a rank that is stopped is killed when the others have ended. A case that does not
come to its accident is repeated twice at most, and counted. Exit status 1 if a case does not pass;
its logs are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes

from megatron_ext.runtime.watchdog import (
    EXIT_STATUS,
    GRACE_SECONDS,
    POLL_SECONDS,
)
from tests.campaigns import fault_ranks
from tests.campaigns.fault_ranks import Case, plan, run

REPORT = re.compile(
    r"^\[megatron_ext\] pipeline rank (?P<rank>\d) \(global rank \d\) (?P<what>.+)\n"
    r"  it was (in (?P<action>[A-Z_]+\d+\.\d+(/\d+)?) \(action \d+ of \d+\), )?(?P<detail>.+)"
    r"(\n  not known to be taken: messages to pipeline rank\(s\) \[(?P<owed>[\d, ]+)\])?",
    re.MULTILINE,
)
NOT_COME = "the accident did not happen"
ACTIONS = ("F", "B", "W", "BW", "SEND_F", "RECV_F", "SEND_B", "RECV_B")
MOVES = ("OFFLOAD", "RELEASE", "PREPARE", "RELOAD")
SCHEDULES = ("1f1b", "zb-h1", "zb-h2", "v-min", "v-half", "v-zb")
# What a report says of an accident that its own rank can report.
WORDS = {
    "raise": "failed: ValueError: the model is on fire",
    "exit": "failed: SystemExit: 3",
    "memory": "failed: RuntimeError: .*allocate",
    "hang": "made no progress",
    "stuck copy": "made no progress",
    "bad copy": "failed: RuntimeError: (a transfer failed: )+the link is broken",
}
STATUS = {"kill": -9, "stop": -9, "raise": 1, "exit": 3, "memory": 1, "hang": EXIT_STATUS,
          "stuck copy": EXIT_STATUS, "bad copy": 1}  # fmt: skip


def deadline() -> float:
    """Seconds from an accident in which every rank must end.

    A stuck rank needs the limit, polls and the time between report and exit; a neighbour that gets
    stuck only when that rank has ended, the same again. The rest is for a busy machine.
    """
    one = fault_ranks.LIMIT_SECONDS + 2 * POLL_SECONDS + GRACE_SECONDS
    return 2 * one + 90.0


def middle(name: str, pp: int, rank: int, op: str, slices: int = 1) -> str | None:
    """The action of a kind in the middle of a rank's order, as text."""
    row = [str(a) for a in plan(name, pp, slices).ranks[rank] if a.op.value == op]
    return row[len(row) // 2] if row else None


def systematic() -> list[Case]:
    """Every kind of action with every accident that can befall it."""
    cases = []
    for op in (*ACTIONS, *MOVES):
        name = "1f1b" if op == "BW" else "v-half"
        action = middle(name, 3, 1, op)
        if action is None:
            raise ValueError(f"{name} has no {op} on rank 1")
        kinds = ["kill", "stop", "raise"]
        kinds += ["memory"] * (op in ("F", "B", "W", "BW", "PREPARE"))
        kinds += ["hang", "exit"] * (op in ("F", "B", "W"))
        kinds += ["lost"] * op.startswith("SEND")
        kinds += ["bad copy", "stuck copy"] * (op in ("OFFLOAD", "RELOAD"))
        cases += [Case(kind, name, 3, 1, action) for kind in kinds]
        if op.startswith("SEND"):
            cases += [
                Case("delayed", name, 3, 1, action, s) for s in (0.5, 3 * fault_ranks.LIMIT_SECONDS)
            ]
    for op in ("F", "B", "W", "SEND_F", "RECV_B", "PREPARE"):
        action = middle("v-half", 3, 1, op, 3)
        assert action is not None and "/" in action
        cases += [Case(kind, "v-half", 3, 1, action, slices=3) for kind in ("kill", "raise")]
    cases += [Case(kind, "v-half", 3, 1, "between") for kind in ("kill", "stop", "raise")]
    cases.append(Case("raise", "v-half", 3, 0, cases[2].action.replace("F1", "F0"), tidy=True))
    return cases


def drawn(seed: int, count: int) -> list[Case]:
    """Accidents anywhere."""
    rng, cases = random.Random(seed), []
    while len(cases) < count:
        name, pp = rng.choice(SCHEDULES), rng.choice((2, 3, 4))
        rank, slices = rng.randrange(pp), rng.choice((1, 1, 3))
        action = str(rng.choice(plan(name, pp, slices).ranks[rank]))
        op = action.rstrip("0123456789./")
        kinds = ["kill", "stop", "raise"]
        if op in ("F", "B", "W", "BW"):
            kinds += ["memory", "hang", "exit"]
        if op.startswith("SEND"):
            kinds += ["lost", "lost", "delayed", "delayed"]
        if op in ("OFFLOAD", "RELOAD"):
            kinds += ["bad copy", "stuck copy"]
        seconds = rng.choice((0.3, 1.0, 3 * fault_ranks.LIMIT_SECONDS))
        kind = rng.choice(kinds)
        cases.append(Case(kind, name, pp, rank, action, seconds, slices=slices))
    return cases


class World:
    """The ranks of one case, in a process group of their own."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        folder.mkdir()
        self.started = time.time()
        self.statuses: dict[int, int] = {}
        self.ended: dict[int, float] = {}
        self._pids: list[int] = []
        sys.stdout.flush()
        for rank in range(case.pp):
            pid = os.fork()
            group = self._pids[0] if self._pids else pid
            with contextlib.suppress(OSError):
                os.setpgid(pid, group)  # 0 is the child itself
            if pid == 0:
                with contextlib.suppress(OSError):
                    os.setpgid(0, group)
                run(case, rank, folder)
            self._pids.append(pid)
        self.late: list[int] = []

    def poll(self) -> bool:
        """Look who has ended; True when all have."""
        now = time.time()
        for rank, pid in enumerate(self._pids):
            if rank in self.statuses:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.statuses[rank], self.ended[rank] = os.waitstatus_to_exitcode(status), now
        left = [r for r in range(self.case.pp) if r not in self.statuses]
        patience = deadline() + (120.0 if self.when() is None else 0.0)  # to get to the accident
        if now - (self.when() or self.started) > patience:
            self.late += [r for r in left if not self._stopped(r)]
        elif left and not all(self._stopped(r) for r in left):
            return False
        for rank in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGKILL)
        return not left

    def _stopped(self, rank: int) -> bool:
        return self.case.kind == "stop" and rank == self.case.rank and self.when() is not None

    def when(self) -> float | None:
        """The time of the accident; None before it."""
        path = self.folder / "when"
        text = path.read_text() if path.is_file() else ""
        return float(text) if text else None

    def orphans(self) -> bool:
        """True if a process of the group lives, which is then killed."""
        try:
            os.killpg(self._pids[0], signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def log(self, rank: int) -> str:
        """What a rank has written."""
        path = self.folder / f"rank{rank}.log"
        return path.read_text() if path.is_file() else ""

    def results(self) -> list[Any]:
        """Losses and hashes of weights of every rank."""
        paths = [self.folder / f"result{rank}.json" for rank in range(self.case.pp)]
        return [json.loads(path.read_text()) if path.is_file() else None for path in paths]


def key_of(case: Case) -> tuple[str, int, int]:
    """Of the order that a case runs."""
    return case.schedule, case.pp, case.slices


def judge(world: World, good: dict[tuple[str, int, int], Any]) -> list[str]:
    """What is wrong with how a case ended."""
    case, wrong = world.case, []
    if world.late:
        wrong.append(f"ranks {world.late} were still there after {deadline():.0f} s")
    if world.orphans():
        wrong.append("a process was left behind")
    if case.kind != "none" and (world.when() is None or _too_early(world)):
        return [*wrong, NOT_COME]
    if fault_ranks.harmless(case):
        if set(world.statuses.values()) != {0}:
            wrong.append(f"exit statuses {world.statuses} where nothing was wrong")
        if case.kind != "none" and world.results() != good[key_of(case)]:
            wrong.append("other results than without the accident")
        return wrong
    return wrong + _judge_statuses(world) + _judge_reports(world)


def _too_early(world: World) -> bool:
    """True if the rank had given up waiting, for a busy machine, when its accident came."""
    case = world.case
    report = REPORT.search(world.log(case.rank))
    if report is None or case.kind in ("hang", "stuck copy", "lost", "delayed"):
        return False
    return report["what"].startswith("made no progress") and report["action"] != case.action


def _judge_statuses(world: World) -> list[str]:
    case, wrong = world.case, []
    expected = STATUS.get(case.kind)
    if expected is not None and world.statuses[case.rank] != expected:
        wrong.append(f"rank {case.rank} ended with {world.statuses[case.rank]}, not {expected}")
    others = {r: s for r, s in world.statuses.items() if r != case.rank}
    if not all(status in (1, EXIT_STATUS) for status in others.values()):
        wrong.append(f"the other ranks ended with {others}")
    if case.kind in ("lost", "delayed") and EXIT_STATUS not in world.statuses.values():
        wrong.append(f"no rank gave up: {world.statuses}")
    return wrong


def _judge_reports(world: World) -> list[str]:
    case, wrong = world.case, []
    blamed = set()
    for rank in range(case.pp):
        text = world.log(rank)
        if rank == case.rank:
            left = re.findall(r"^<left \((.+)\)>", text, re.M)
            if any(set(numbers.split(", ")) != {"0"} for numbers in left):
                wrong.append(f"behind the exception rank {rank} kept {left}")
            if case.kind in ("kill", "stop") or case.action == "between":
                continue
        reports = list(REPORT.finditer(text))
        if len(reports) != 1 or text.count("[megatron_ext]") != 1:
            wrong.append(f"rank {rank} has {len(reports)} reports")
            continue
        report = reports[0]
        peers = set(re.findall(r"pipeline rank (\d)", report["detail"]))
        peers |= set(re.findall(r"\d", report["owed"] or ""))
        own = rank == case.rank and case.kind in WORDS
        if own and not re.search(WORDS[case.kind], report["what"]):
            wrong.append(f"rank {rank} reports {report['what']!r}")
        surfaces_later = case.kind in ("bad copy", "stuck copy")
        if own and not surfaces_later and report["action"] != case.action:
            wrong.append(f"rank {rank} names {report['action']}, not {case.action}")
        if not own:
            if not peers:
                wrong.append(f"rank {rank} names no peer: {report['detail']!r}")
            if report["action"] is None and "last messages" not in report["detail"]:
                wrong.append(f"rank {rank} names no action: {report['detail']!r}")
            blamed |= peers
    if case.kind in ("lost", "delayed"):
        return wrong
    if str(case.rank) not in blamed:
        wrong.append(f"nobody names rank {case.rank}, only {sorted(blamed)}")
    return wrong


def _private_shared_memory() -> bool:
    """Give this process a /dev/shm of its own, so that all that appears there is ours."""
    if not hasattr(os, "unshare") or os.getuid() != 0:
        return False
    try:
        os.unshare(os.CLONE_NEWNS)
        for command in (
            ["mount", "--make-rprivate", "/"],
            ["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", "/dev/shm"],
        ):
            subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def campaign(
    cases: list[Case], jobs: int, folder: Path, shared: bool
) -> tuple[list[dict[str, Any]], int]:
    """Run all cases, ``jobs`` at a time; one entry each, and how many were repeated."""
    good: dict[tuple[str, int, int], Any] = {}
    kept = {key_of(case) for case in cases if case.kind == "delayed"}
    todo = [Case("none", name, pp, 0, "", slices=slices) for name, pp, slices in sorted(kept)]
    todo += cases
    running: list[tuple[int, World]] = []
    entries, number, repeated = [], 0, 0
    tries: Counter[Case] = Counter()
    while todo or running:
        while todo and len(running) < jobs:
            if todo[0].kind == "delayed" and key_of(todo[0]) not in good:
                break
            running.append((number, World(todo.pop(0), folder / str(number))))
            number += 1
        for at, world in list(running):
            if not world.poll():
                continue
            running.remove((at, world))
            case, wrong = world.case, judge(world, good)
            tries[case] += 1
            if wrong == [NOT_COME] and tries[case] < 3:
                todo.append(case)
                repeated += 1
                continue
            if case.kind == "none":
                good[key_of(case)] = world.results()
            if shared and not running and os.listdir("/dev/shm"):
                wrong.append(f"shared memory was left: {os.listdir('/dev/shm')}")
            when = world.when()
            seconds = max(world.ended.values(), default=0) - when if when else 0.0
            if case.kind != "none" or wrong:
                entries.append({"case": at, **asdict(case), "wrong": wrong,
                                "statuses": [world.statuses.get(r) for r in range(case.pp)],
                                "seconds": round(seconds, 1)})  # fmt: skip
                _tell(entries[-1], world)
            shutil.rmtree(world.folder, ignore_errors=True)
        time.sleep(0.02)
    if shared and os.listdir("/dev/shm"):
        entries[-1]["wrong"].append(f"shared memory was left: {os.listdir('/dev/shm')}")
    return entries, repeated


def _tell(entry: dict[str, Any], world: World) -> None:
    case = world.case
    late = f" {case.seconds:g} s" if case.kind == "delayed" else ""
    line = f"{case.kind}{late} in {case.action} of {case.schedule}, rank {case.rank} of {case.pp}"
    print(f"{'FAULT' if entry['wrong'] else 'ok':5} {line}: {entry['seconds']} s, "
          f"{entry['statuses']}", flush=True)  # fmt: skip
    for what in entry["wrong"]:
        print(f"      {what}")
    if entry["wrong"]:
        for rank in range(case.pp):
            print(f"--- rank {rank}\n{world.log(rank)[-3000:]}", flush=True)


def main() -> int:
    """Run what the command line asks for; exit status 1 if a case does not pass."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--random", type=int, default=0, metavar="N", help="so many drawn cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="cases that this regular expression finds")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="the watchdog's")
    parser.add_argument("--jobs", type=int, default=4, help="pipelines at a time")
    parser.add_argument("--json", type=Path, help="write the results")
    options = parser.parse_args()
    limit = fault_ranks.LIMIT_SECONDS = options.limit or fault_ranks.LIMIT_SECONDS
    cases = systematic() + drawn(options.seed, options.random)
    cases = [c for c in cases if re.search(options.only, f"{c.kind} {c.action} {c.schedule}")]
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    shared = _private_shared_memory()
    gc.freeze()
    start = time.monotonic()
    folder, own = Path(tempfile.mkdtemp(prefix="faults-")), os.getpid()
    try:
        entries, repeated = campaign(cases, options.jobs, folder, shared)
    finally:
        if os.getpid() == own:  # a rank's exception passes through here, too
            shutil.rmtree(folder, ignore_errors=True)
    failed = sum(bool(entry["wrong"]) for entry in entries)
    seconds = time.monotonic() - start
    longest = max((entry["seconds"] for entry in entries), default=0.0)
    print(
        f"{len(entries)} accidents, {failed} faults, {seconds:.0f} s, {repeated} repeated; the "
        f"longest time from an accident to the last rank's end was {longest:.1f} s (limit "
        f"{limit:g} s); shared memory {'was' if shared else 'could not be'} looked at"
    )
    if options.json is not None:
        about = {"seed": options.seed, "seconds": round(seconds), "faults": failed,
                 "repeated": repeated, "longest_seconds": longest, "limit_seconds": limit,
                 "shared_memory_watched": shared, "python": platform.python_version(),
                 "torch": torch.__version__, "cases": entries}  # fmt: skip
        options.json.write_text(json.dumps(about, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
