"""Help, colours, progress, and what cannot be written."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import time

import pytest

from megatron_ext import _terminal, cli
from megatron_ext.commands.table import COMMANDS
from megatron_ext.schedule import generate, simulate
from megatron_ext.view import text, timeline


class Terminal(io.StringIO):
    """A stream that is one."""

    def isatty(self):
        return True


def test_no_arguments_print_the_help(run):
    status, out, err = run()
    assert (status, err) == (0, "") and "COMMAND" in out and "compare" in out


def _parsers():
    (commands,) = (a for a in cli.make_parser()._actions if a.choices and a.dest == "command")
    return commands.choices


def test_every_command_ends_its_help_with_examples():
    for name, parser in _parsers().items():
        lines = parser.format_help().rstrip().splitlines()
        at = lines.index("examples:")
        assert 2 <= len(lines) - at <= 4, name
        assert all(line.startswith(f"  megatron-ext {name}") for line in lines[at + 1 :]), name


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_can_be_parsed(name):
    for line in COMMANDS[name].examples:
        words = [*shlex.split(line), "--"]
        args = cli.make_parser().parse_args([name, *words[: words.index("--")]])
        assert args.command == name


def test_the_examples_run(run, tmp_path, monkeypatch):
    """Those that need no model, device or folder; what one writes the next reads."""
    monkeypatch.chdir(tmp_path)
    for name in ("schedule", "simulate", "compare"):
        for line in COMMANDS[name].examples:
            status, out, err = run(name, *shlex.split(line))
            assert (status, err) == (0, "") and out, line
    for line in COMMANDS["show"].examples[:2]:
        assert run("show", *shlex.split(line))[0] == 0
    assert (tmp_path / "v-half.svg").exists()


def test_colours_are_for_terminals(monkeypatch):
    run = timeline.planned(simulate(generate("v-half", 2, 3)))
    plain = text.render(run, 100)
    assert "\x1b" not in plain
    for stream, variables, colored in (
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            patch.setenv("TERM", "xterm")
            patch.delenv("NO_COLOR", raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            assert _terminal.colored() is colored
            drawn = text.render(run, 100)
            assert ("\x1b[34mF0 F1 \x1b[0m" in drawn) is colored
            assert "\x1b" not in text.render(run), "of a file"
            assert (drawn == plain) is not colored


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_comes_when_it_takes_long(monkeypatch, terminal):
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with _terminal.Progress("plan") as progress:
        progress("searching")
        progress.line("found one")
    assert stream.getvalue() == ""
    monkeypatch.setattr(_terminal, "_QUIET_S", 0.01)
    with _terminal.Progress("plan") as progress:
        progress("searching")
        progress.line("found one")
        while "searching" not in stream.getvalue():
            time.sleep(0.01)
    shown = stream.getvalue()
    assert "plan: found one\n" in shown and "plan: searching (0 s)" in shown
    assert shown.endswith("\r\x1b[K" if terminal else "\n")


WORDS = ("show", "1f1b", "--pp", "2", "--microbatches", "2")


def _process(*words, unbuffered="", **streams):
    command = [sys.executable, "-m", "megatron_ext", *words]
    variables = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, env=variables, **streams)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_answer_that_cannot_be_written(unbuffered):
    with open("/dev/full", "w") as full:
        done = _process(*WORDS, unbuffered=unbuffered, stdout=full)
    words = "cannot write to standard output: No space left on device"
    assert (done.returncode, done.stderr) == (2, f"megatron-ext show: {words}\n")


def test_a_closed_output_is_said():
    done = _process(*WORDS, preexec_fn=lambda: os.close(1))
    assert done.returncode == 2
    assert done.stderr.startswith("megatron-ext: standard output is closed")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_has_seen_enough():
    end, start = os.pipe()
    os.close(end)
    done = _process(*WORDS, stdout=start)
    os.close(start)
    assert (done.returncode, done.stderr) == (141, "")


def test_control_c_is_one_line(run, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_ext.commands.common.load", interrupted)
    found = run("simulate", "--schedule", "x.json")
    assert found == (130, "", "megatron-ext simulate: interrupted\n")


def test_a_file_that_cannot_be_written(run, tmp_path):
    status, _, err = run("show", *WORDS[1:], "--output", tmp_path / "no" / "a.svg")
    assert status == 2 and "cannot write" in err and err.count("\n") == 1
