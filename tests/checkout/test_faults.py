"""Accidents in the stock ``pretrain_gpt.py``: all ranks end, say why, and a restart goes on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.configurations import TRAINED as BASE
from tests.support import ROOT
from tests.support.checkouts import MAIN_TAG, Serve, environment, existing
from tests.support.server import Outcome, ScriptServer
from tests.support.waiting import wait_until

LIMIT = 6  # seconds, from the accident on
ITERATIONS, EVERY = 6, 2
FLAGS = [
    *BASE.split(),
    *("--num-layers", "4", "--global-batch-size", "4", "--train-iters", str(ITERATIONS)),
    *("--save-interval", str(EVERY), "--pipeline-model-parallel-size", "2", "--bf16"),
    *("--pp-schedule", "v-half"),
]
DATA_PARALLEL = ["--use-distributed-optimizer", "--overlap-grad-reduce"]
OFFLOAD = ["--pp-offload", "full"]
REPORT = re.compile(
    r"^\[megatron_ext\] pipeline rank \d \(global rank (\d)\) .+\n  it was (.+)$", re.M
)


class Runs:
    """Runs that save to folders of their own and know what an uninterrupted one computes."""

    def __init__(self, server: ScriptServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self._good: dict[tuple[str, ...], list[Any]] = {}

    def run(
        self, name: str, *more: str, world: int = 2, injury: dict[int, Any] | None = None
    ) -> Outcome:
        """Train, from the last checkpoint of ``name`` if there is one."""
        place = str(self.folder / name)
        where = self.folder / f"{name}-log"
        own = {"MEGATRON_EXT_WATCHDOG_SECONDS": str(LIMIT), "ACCIDENT": str(where / "accident")}
        variables = {rank: {**own} for rank in range(world)}
        for rank, what in (injury or {}).items():
            variables[rank]["INJURY"] = json.dumps(what)
        return self.server.run(
            [*FLAGS, *more, "--save", place, "--load", place], world,
            where, environment=variables, grace=60.0,
            prelude=ROOT / "tests" / "support" / "injured.py",
        )  # fmt: skip

    def good(self, *more: str, world: int = 2) -> list[Any]:
        """Losses of a run without accident."""
        key = (*more, str(world))
        if key not in self._good:
            outcome = self.run(f"good-{len(self._good)}", *more, world=world)
            assert outcome.status == "ok", logs(outcome, world)
            self._good[key] = outcome.losses()
        return self._good[key]

    def continues(self, name: str, first: int, *more: str, world: int = 2) -> Outcome:
        """A restart goes on behind iteration ``first`` as if nothing had happened."""
        outcome = self.run(name, *more, world=world)
        assert outcome.status == "ok", logs(outcome, world)
        assert outcome.losses() == self.good(*more, world=world)[first:]
        return outcome


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> Runs:
    return Runs(serve(MAIN_TAG), tmp_path_factory.mktemp("faults"))


def logs(outcome: Outcome, world: int = 2) -> str:
    return "\n".join(f"--- {rank}\n{outcome.log(rank)[-3000:]}" for rank in range(world))


def tracked(folder: Path) -> int | None:
    """The iteration that a restart loads."""
    file = folder / "latest_checkpointed_iteration.txt"
    return int(file.read_text()) if file.exists() else None


def all_failed(outcome: Outcome, world: int = 2) -> None:
    """Every rank ended by itself (who is stopped or killed: by a signal), none with status 0."""
    assert outcome.status == "failed", logs(outcome, world)
    assert 0 not in outcome.exits and outcome.orphans == 0, (outcome, logs(outcome, world))


def reports(outcome: Outcome, rank: int) -> list[str]:
    return [found[2] for found in REPORT.finditer(outcome.log(rank)) if int(found[1]) == rank]


# (name, accident of rank 1, more flags, exit status of rank 1)
ACCIDENTS = [
    ("killed in B", {"do": "kill", "at": "B"}, [], -9),
    ("stopped in F", {"do": "stop", "at": "F"}, [], -9),
    ("exception in W", {"do": "raise", "at": "W"}, [], 1),
    ("out of memory in F", {"do": "memory", "at": "F"}, [], 1),
    ("out of memory in B", {"do": "memory", "at": "B"}, [], 1),
    ("out of memory in reload", {"do": "memory", "at": "PREPARE"}, OFFLOAD, 1),
    ("killed in RELOAD", {"do": "kill", "at": "RELOAD"}, OFFLOAD, -9),
    ("hang in SEND_B", {"do": "hang", "at": "SEND_B"}, [], 75),
]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "injury", "more", "status"),
    [pytest.param(*case, id=case[0]) for case in ACCIDENTS],
)
def test_accident_in_a_pass(
    runs: Runs, name: str, injury: dict[str, Any], more: list[str], status: int
) -> None:
    """In iteration 5, behind the checkpoint of iteration 4."""
    outcome = runs.run(name, *more, injury={1: {**injury, "iteration": 5}})
    all_failed(outcome)
    assert outcome.exits[1] == status, logs(outcome)
    assert outcome.exits[0] in (1, 75), logs(outcome)
    (other,) = reports(outcome, 0)
    assert re.search(r"in [A-Z_]+\d+\.\d+ .*pipeline rank 1", other)
    if status > 0:
        (own,) = reports(outcome, 1)
        assert re.search(rf"in {injury['at']}\d+\.\d+ ", own)
    runs.continues(name, 4, *more)


@pytest.mark.campaign
@pytest.mark.parametrize("do", ["kill", "stop"])
def test_accident_while_gradients_are_reduced(runs: Runs, do: str) -> None:
    """Two pipelines; the other one has no part in the accident and waits for its replica, or, if
    that has sent its gradients already, at the next check of all ranks."""
    injury = {3: {"do": do, "at": "finalize", "iteration": 5}}
    outcome = runs.run(f"reduce-{do}", *DATA_PARALLEL, world=4, injury=injury)
    all_failed(outcome, 4)
    for rank in (0, 1, 2):
        (said,) = reports(outcome, rank)
        where = r"pipeline rank 1|gradients .* over global ranks \[|behind its passes"
        assert re.search(where, said), logs(outcome, 4)
    runs.continues(f"reduce-{do}", 4, *DATA_PARALLEL, world=4)


@pytest.mark.campaign
def test_sigterm_saves_and_a_restart_goes_on(runs: Runs) -> None:
    """What a batch system does before it puts a job back into the queue."""
    more = ["--exit-signal-handler"]
    injury = {rank: {"do": "term", "at": "F", "iteration": 3} for rank in range(2)}
    outcome = runs.run("term", *more, injury=injury)
    assert outcome.exits == (0, 0) and outcome.orphans == 0, logs(outcome)
    assert tracked(runs.folder / "term") == 3
    runs.continues("term", 3, *more)


@pytest.mark.campaign
def test_killed_while_saving_in_the_background(runs: Runs) -> None:
    injury = {1: {"do": "kill", "at": "F", "iteration": 5}}
    outcome = runs.run("async-killed", "--async-save", injury=injury)
    all_failed(outcome)
    last = tracked(runs.folder / "async-killed")
    assert last in (None, 2, 4)
    runs.continues("async-killed", last or 0)


@pytest.mark.campaign
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_under_torchrun(tmp_path: Path, number: int) -> None:
    """torchrun itself ends with status 1, and none of its processes is left."""
    path = existing(MAIN_TAG)
    log = tmp_path / "log"
    # The first is noticed at once; the second only by the watchdog, here on a clock of its own.
    limit = 300 if number == signal.SIGKILL else 30
    launcher = ["-m", "megatron_ext.launch", "--device", "cpu", str(path / "pretrain_gpt.py")]
    flags = [*FLAGS, "--train-iters", "5000", "--save-interval", "9000"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             *launcher, *flags],
            stdout=file, stderr=file, start_new_session=True,
            env={**environment(), "MEGATRON_EXT_WATCHDOG_SECONDS": str(limit)},
        )  # fmt: skip
    ranks: dict[str, int] = {}
    try:
        wait_until(
            lambda: "iteration        3/" in log.read_text() or process.poll() is not None,
            lambda: log.read_text()[-3000:],
        )
        ranks = _ranks_of(process.pid)
        os.kill(ranks["1"], number)
        # torchrun itself waits 30 s for a rank that does not react to SIGTERM.
        wait_until(lambda: process.poll() is not None, lambda: log.read_text()[-3000:])
        assert process.returncode == 1
        (said,) = [found[2] for found in REPORT.finditer(log.read_text()) if found[1] == "0"]
        assert re.search(r"in [A-Z_]+\d.* pipeline rank 1|behind its passes|gradients", said)
        assert [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()] == []
    finally:
        ranks = ranks or _ranks_of(process.pid)
        for pid in (process.pid, *ranks.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _ranks_of(parent: int) -> dict[str, int]:
    """Rank -> process, of the children of torchrun."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "stat").read_text().rsplit(")", 1)[1].split()[1] != str(parent):
                continue
            variables = (folder / "environ").read_bytes().split(b"\0")
            rank = [v[5:].decode() for v in variables if v.startswith(b"RANK=")]
            found.update({rank[0]: int(folder.name)} if rank else {})
    return found
