"""How the tests run a command, and what they share."""

from __future__ import annotations

import json

import pytest

from megatron_ext import _terminal, cli
from megatron_ext.schedule.io import save

FIELDS = [
    "schedule",
    "pp",
    "chunks",
    "microbatches",
    "cost",
    "makespan",
    "bubble",
    "span_bubble",
    "peak_activation",
    "peak_activation_vs_1f1b",
    "generation_seconds",
    "lower_bound",
    "bound_kind",
    "above_bound",
]


@pytest.fixture(autouse=True)
def no_progress(monkeypatch):
    """None on stderr, however slow the machine is."""
    monkeypatch.setattr(_terminal, "_QUIET_S", 1e6)


@pytest.fixture
def run(capsys):
    """Run one command in this process: (exit status, stdout, stderr)."""

    def run(*argv):
        try:
            status = cli.main([str(arg) for arg in argv])
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, err

    return run


def answer(run, *argv):
    """What a command answers as JSON."""
    status, out, err = run(*argv, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def options(name, pp, m):
    """Of the commands that make one schedule."""
    return ["--schedule", name, "--pp", pp, "--microbatches", m]


@pytest.fixture
def file_of(tmp_path):
    """A saved schedule's path."""

    def file_of(schedule):
        path = tmp_path / "schedule.json"
        save(schedule, path)
        return path

    return file_of
