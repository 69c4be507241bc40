"""Runs named cases on forked ranks when a test asks for them, importing torch and Megatron once.

A module of cases ends in ``serve(CASES, rank_main)``. ``Cases`` is the tests' end: a mapping from
names to results that runs a case at its first use, so a test pays for its own cases only.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.checkouts import environment, python_path
from tests.support.preload import keep_writing_here, preload
from tests.support.ranks import on_ranks
from tests.support.waiting import PATIENCE


class Cases(Mapping[str, Any]):
    """Results of ``tests.MODULE`` by case.

    Args:
        module: below ``tests``, e.g. ``megatron.cases.gpt_cases``.
        folder: an empty one, for logs and results.
        environment: of the process.
        python: its interpreter.
    """

    def __init__(
        self,
        module: str,
        folder: Path,
        environment: Mapping[str, str],
        python: str = sys.executable,
    ) -> None:
        self._folder, self._results = folder, dict[str, Any]()
        self._process = subprocess.Popen(
            [python, "-m", f"tests.{module}", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "log").open("w"),
            text=True,
            env=dict(environment),
            start_new_session=True,
        )
        self._names: list[str] = self._answer()

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._results:
            assert self._process.stdin is not None
            self._process.stdin.write(name + "\n")
            self._process.stdin.flush()
            self._results[name] = pickle.loads(Path(self._answer()).read_bytes())
        return self._results[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def ran(self) -> list[str]:
        """The cases that have run so far."""
        return list(self._results)

    def log(self) -> str:
        """What the ranks have printed so far."""
        return (self._folder / "log").read_text()

    def close(self) -> None:
        """End the process and its ranks."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> Any:
        stream = self._process.stdout
        assert stream is not None
        ready, _, _ = select.select([stream], [], [], PATIENCE)
        line = stream.readline() if ready else ""
        assert line, f"no answer within {PATIENCE} s, or the process ended:\n{self.log()[-8000:]}"
        answer = json.loads(line)
        assert "error" not in answer, f"{answer['error']}:\n{self.log()[-8000:]}"
        return answer["value"]


def case_results(module: str, *versions: Any, first: bool = False) -> Any:
    """A fixture that gives the ``Cases`` of ``tests.MODULE`` to one test file.

    Args:
        versions: of Megatron, each a parameter; default: the installed one, without parameter.
        first: the module puts stand-ins where Megatron looks once, when it is imported.
    """

    @pytest.fixture(scope="module", params=versions or None)
    def results(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Cases]:
        tag = request.param if versions else "installed"
        variables = {**environment(), "PYTHONPATH": python_path(tag)}
        folder = tmp_path_factory.mktemp("cases")
        cases = Cases(module, folder, variables, warm.python("" if first else tag))
        yield cases
        cases.close()

    return results


def write_all(folder: Path, mine: Any) -> None:
    """End a case: rank 0 writes what every rank has, in rank order."""
    import torch.distributed as dist

    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if dist.get_rank() == 0:
        (folder / "result.pickle").write_bytes(pickle.dumps(every))
    dist.barrier()


def serve(
    cases: Mapping[str, dict[str, Any]],
    rank_main: Callable[[Path, str, dict[str, Any], int], None],
    world: int,
) -> None:
    """Answer names on standard input with files of results, until it ends.

    Ranks of its own for each case: a process never gets back the threads of gloo's groups, and
    thousands of them slow a machine to a crawl.

    Args:
        cases: by name; ``world`` in one overrides the number of ranks.
        rank_main: called as ``rank_main(folder, name, case, rank)`` on every rank; rank 0 writes
            ``folder/result.pickle``.
        world: ranks.
    """
    folder = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    preload()
    keep_writing_here()
    gc.collect()
    gc.freeze()  # else every rank copies what the collector touches
    print(json.dumps({"value": list(cases)}), file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        name = line.rstrip("\n")
        own = folder / str(number)
        own.mkdir()
        task = functools.partial(rank_main, own, name, cases[name])
        good = on_ranks(cases[name].get("world", world), task)
        answer = {"value": str(own / "result.pickle")} if good else {"error": f"{name} failed"}
        print(json.dumps(answer), file=answers, flush=True)
