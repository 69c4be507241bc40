"""What bad input gets, and what all commands have in common."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

from megatron_ext import __version__, cli
from megatron_ext.commands import compare, schedule, show, simulate
from megatron_ext.commands.parser import Options, Parser
from tests.support.waiting import PATIENCE


def test_the_commands_share_their_options():
    """What shapes a schedule is spelled and explained alike wherever one is made."""
    choices = {}
    for module in (compare, schedule, show, simulate):
        choices[module.__name__.split(".")[-1]] = parser = Parser()
        module.declare(parser)
    for flag in ("--cost", "--hop", "--stage-cost", "--chunks", "--objective"):
        helps = {
            choices[name]._option_string_actions[flag].help
            for name in ("simulate", "schedule", "show", "compare")
        }
        assert len(helps) == 1, flag
    for flag in ("--memory-cap", "--group-size"):
        for name in ("simulate", "schedule", "show", "compare"):
            assert flag in choices[name]._option_string_actions


def test_tables_of_options_name_options():
    """Types, defaults and needs are of options that are there."""
    tables = 0
    for name in cli.COMMANDS:
        module = importlib.import_module(f"megatron_ext.commands.{name}")
        parser = Parser()
        module.declare(parser)
        flags = set(parser._option_string_actions)
        assert {needed.split()[0] for needed in parser.needs.values()} <= flags, name
        for value in vars(module).values():
            if isinstance(value, Options):
                tables += 1
                own = {words.split()[0] for words in value.help}
                for names in (value.kinds, value.defaults, value.needs, value.words):
                    assert set(names) <= own, name
                assert set(value.required) <= own, name
    assert tables > 10


_PO = "simulate --schedule po --pp 4 --microbatches 8"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("plna", "did you mean plan?"),
        (
            "simulate --shedule v-half",
            "unrecognized arguments: --shedule; did you mean --schedule?",
        ),
        ("simulate --schedule vhalf --pp 4 --microbatches 8", "did you mean v-half?"),
        ("simulate", "the following arguments are required: --schedule"),
        ("simulate --schedule nope --pp 4 --microbatches 8", "unknown schedule 'nope'; give one"),
        ("simulate --schedule 1f1b", "--schedule 1f1b needs --pp and --microbatches too"),
        ("simulate --schedule 1f1b --pp 0 --microbatches 8", "whole number >= 1, got '0'"),
        ("simulate --schedule 1f1b --pp 1 --microbatches 8", "at least 2 pipeline ranks, got pp=1"),
        ("simulate --schedule 1f1b --pp x --microbatches 8", "whole number >= 1, got 'x'"),
        ("simulate --schedule 1f1b --pp 4 --microbatches 8 --cost 1,2", "got '1,2'"),
        ("simulate --schedule 1f1b --pp 4 --microbatches 8 --cost 1,1,0", "cost W must be > 0"),
        ("simulate --schedule 1f1b --pp 4 --microbatches 8 --hop 1e400", "1e-100 to 1e100"),
        ("simulate --schedule 1f1b --pp 4 --microbatches 8 --hop 1e99", "must not exceed 1e+12"),
        ("simulate --schedule 1f1b --pp 4 --microbatches 8 --cost 1e13,1e13,1e13", "1e+12"),
        ("simulate --schedule 1f1b --pp 1000000000 --microbatches 8", "orders of more than"),
        ("simulate --schedule gis --pp 4 --microbatches 999999999999", "orders of more than"),
        ("simulate --schedule 1f1b --pp 4 --microbatches 8 --hop -1", "cost hop must be >= 0"),
        ("simulate --schedule 1f1b --pp 4 --microbatches 8 --group-size 3", "--group-size"),
        (
            "simulate --schedule 1f1b --pp 4 --microbatches 8 --memory-cap 0.5",
            "1f1b has none; leave --memory-cap out",
        ),
        (
            "simulate --schedule gis --pp 4 --microbatches 8 --group-size 5",
            "gis at pp=4 takes a group size from 2 (p/2 rounded up) to 4 (p), got 5",
        ),
        ("simulate --schedule gis --pp 4 --microbatches 8 --objective x", "invalid choice: 'x'"),
        (f"{_PO} --offload half", "--offload half needs --offload-time T too"),
        (f"{_PO} --offload-time 0.25", "--offload-time 0.25 is for --offload; give both"),
        (f"{_PO} --offload off --offload-transfer dual", "dual is for --offload; give both"),
        (f"{_PO} --offload 3 --offload-time 1", "cannot offload 3 chunks of a rank that has 2"),
        (f"{_PO} --offload most --offload-time 1", "must be off, half, full, auto or a number"),
        (f"{_PO} --offload half --offload-time 0", "an offload time must be a number > 0"),
        (f"{_PO} --offload half --offload-time 1,2,3", "a transfer time must be T or T,T2"),
        (f"{_PO} --offload half --offload-time 1 --offload-transfer x", "invalid choice: 'x'"),
        (
            f"{_PO} --offload auto --offload-time 0.25 --memory-cap 0.13",
            "activation sets on a device, but the cap is 1; raise --memory-cap to 0.25",
        ),
        (
            "schedule --schedule po --pp 4 --microbatches 8 --output a.json --offload half "
            "--offload-time 1",
            "--offload half needs --lowered too",
        ),
        (
            "show --block v-half --pp 4 --offload half",
            "--offload half is not for --block v-half",
        ),
        ("compare --pp 4", "the following arguments are required: --microbatches"),
        ("compare --pp 1 --microbatches 8", "needs at least 2 ranks, got --pp 1"),
        ("compare --pp 4 --microbatches 8 --memory-cap 40GiB", "such as 0.5, got '40GiB'"),
        ("compare --pp 4 --microbatches 8 --memory-cap 0", "a number > 0 such as 0.5, got '0'"),
        ("compare --pp 4 --microbatches 8 --memory-cap nan", "got 'nan'"),
        ("compare --pp 4 --microbatches 8 --hop 1e99", "must not exceed 1e+12"),
        ("compare --pp 4 --microbatches 8 --cost 1e13,1e13,1e13", "must not exceed 1e+12"),
        ("compare --pp 4 --microbatches 999999999", "orders of more than"),
        ("simulate --sched 1f1b --pp 4 --microbatches 8", "unrecognized arguments: --sched"),
        ("simulate --schedule gone.json", "cannot read schedule file gone.json: No such file"),
        ("check gone.json", "cannot read schedule file gone.json: No such file or directory"),
        ("compare --pp 4 --microbatches 8 --group-size 5", "at pp=4 takes 2 (p/2 rounded up) to 4"),
        ("show", "give either schedules or --schedule NAME"),
        ("show a.json --block v-half", "give either schedules or --schedule NAME or --block"),
        ("show --block v-half", "--block v-half needs --pp P, at least 2 pipeline ranks"),
        ("show --block v-half --pp 4 --hop 1", "--hop 1 is not for --block v-half; leave --hop"),
        ("show --block chimera --pp 4", "no building block 'chimera'; known: gpipe, 1f1b"),
        ("show --block v-half --pp 4 --chunks 3", "the block of v-half has 2 chunks per rank, got"),
        ("show --block gone.json", "cannot read block file gone.json: No such file or directory"),
        ("show --block v-half --pp 4 --json --width 9", "--width 9 is not for --json"),
        ("show --block 1f1b --pp 4 --microbatches 99999999", "more than the 4194304 that orders"),
        ("show --schedule 1f1b --pp 2 --microbatches 2 --json", "--json is for --block and --bl"),
        ("show --blocks", "--blocks needs --pp P, at least 2 pipeline ranks"),
        ("show --blocks --pp 4 --squeeze", "--squeeze is not for --blocks; leave --squeeze out"),
        ("show --blocks --block 1f1b --pp 4", "give either schedules or --schedule NAME or"),
        ("schedule --output a.json", "give either --schedule NAME or --block NAME, or a file"),
        ("schedule --block v-half --pp 4 --output a.json", "v-half needs --microbatches M too"),
        (
            "schedule --block v-half --pp 4 --microbatches 8 --memory-cap 0.5 --output a.json",
            "--memory-cap 0.5 is not for --block v-half; leave --memory-cap out",
        ),
        ("show --schedule v-half --pp 4 --microbatches 4 --squeeze", "--squeeze is for --block"),
        ("show a.json --schedule 1f1b", "give either schedules or --schedule NAME"),
        ("show --schedule 1f1b --pp 2 --microbatches 2 --output a.pdf", "use .svg, .html, .json"),
        (
            "schedule --schedule 1f1b --pp 2 --microbatches 2 --output no/such/dir/a.json",
            "cannot write no/such/dir/a.json: No such file or directory",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(run, argv, message):
    status, out, err = run(*argv.split())
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("megatron-ext")
    assert err.count("\n") == 1


def test_a_bug_stays_a_traceback(monkeypatch):
    def broken(*_):
        raise ValueError("a bug")

    monkeypatch.setattr(simulate, "simulated", broken)
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["simulate", "--schedule", "1f1b", "--pp", "2", "--microbatches", "2"])


def test_version(run):
    assert run("--version") == (0, f"megatron-ext {__version__}\n", "")


def test_a_reader_that_leaves_is_no_error(repo_root):
    command = [sys.executable, "-m", "megatron_ext"]
    command += ["show", "--schedule", "1f1b", "--pp", "8", "--microbatches", "4000"]
    # Unbuffered, Python drops the rest of a write that a pipe took in part, and never notices.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        command, cwd=repo_root, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=PATIENCE) == 141
        assert process.stderr.read() == b""
