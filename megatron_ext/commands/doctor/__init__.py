"""``doctor``: what of this machine's torch and Megatron works with us, and what to change.

Runs on a bare interpreter. torch and Megatron are looked at by ``probe.py``, in a process of its
own, so that nothing which they do can end this one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ... import __version__, patching
from ..._terminal import Progress
from ...releases import PYTHON, TAGS
from .. import training_command
from ..common import InputError
from ..parser import JSON, Options, Parser

OK, WARNING, ERROR = "ok", "warning", "error"
PROBE = Path(__file__).with_name("probe.py")
PROBE_SECONDS = 180.0  # imports take seconds; an importer that hangs must not hold the report
SECONDS_ENVIRONMENT = "MEGATRON_EXT_DOCTOR_SECONDS"
_INSTALL = "pip install 'megatron-ext[megatron]', or use an image that has torch and Megatron"
# Variable -> value that works against a schedule, effect, fix.
_CONFLICTS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        *("1", "one hardware queue: messages and copies wait for the kernels before them"),
        "set 32 with tensor and context parallelism 1 or on Blackwell; else Megatron demands 1",
    ),
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel: nothing overlaps", "unset it"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "passes no longer hide messages", "unset it"),
    "NCCL_P2P_DISABLE": ("1", "neighbouring ranks communicate through the host", "unset it"),
}


class Finding(NamedTuple):
    """One line: ``level`` is ok, warning or error, and only ok needs no ``fix``."""

    name: str
    level: str
    text: str
    fix: str = ""


def declare(parser: Parser) -> None:
    parser.description = (
        "One line a subject: ok, warning or error, with the fix. Exit status 1 if one is an error. "
        "With a training command, Megatron judges its sizes too."
    )
    training_command.declare(parser)
    Options(
        {
            "--megatron CHECKOUT": "a Megatron-LM folder to look at; default: $MEGATRON_LM, else "
            "what Python finds",
            **JSON.help,
        },
        kinds={"--megatron": Path},
    ).declare(parser)
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    checkout: Path | None = args.megatron
    if checkout is not None and not checkout.is_dir():
        raise InputError(f"--megatron {checkout} is no folder; give a Megatron-LM checkout")
    named = os.environ.get("MEGATRON_LM")
    if checkout is None and named:
        checkout = Path(named)
    command = training_command.command_of(args)
    with Progress("doctor") as progress:
        progress("importing torch and Megatron in a process of its own")
        facts = run_probe(checkout)
        findings = list(diagnose(facts, checkout))
        if command is not None:
            progress("letting Megatron judge the command")
            findings += _command(command, facts)
    worst = next(level for level in (ERROR, WARNING, OK) if any(f.level == level for f in findings))
    if args.json:
        print(json.dumps({"status": worst, "lines": [f._asdict() for f in findings]}))
    else:
        print("\n".join(table(findings)))
    return 1 if worst == ERROR else 0


def table(findings: list[Finding]) -> list[str]:
    """The findings as text; each fix is below its line."""
    lines = []
    for one in findings:
        lines.append(f"{one.level:<7}  {one.name:<18}  {one.text}")
        lines += [f"{'':<29}-> {one.fix}"] * bool(one.fix)
    return lines


def run_probe(checkout: Path | None) -> dict[str, Any]:
    """What ``probe.py`` finds out; ``{"error": ...}`` if it comes to no end."""
    command = [sys.executable, *(["-S"] if sys.flags.no_site else []), "-W", "ignore", str(PROBE)]
    if checkout is not None:
        command.append(str(checkout))
    try:
        done = subprocess.run(
            command,
            # What Megatron compiles for a GPU is not needed, and costs time.
            env={**os.environ, "TORCHDYNAMO_DISABLE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=float(os.environ.get(SECONDS_ENVIRONMENT, PROBE_SECONDS)),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"status {done.returncode}: {last}"}
    facts: dict[str, Any] = json.loads(lines[-1])
    return facts


def diagnose(facts: dict[str, Any], checkout: Path | None) -> Iterator[Finding]:
    """All findings about the machine, in the order in which they are shown.

    Args:
        facts: of ``probe``.
        checkout: the Megatron-LM folder meant, if any.
    """
    version = platform.python_version()
    good = sys.version_info >= PYTHON
    fix = "" if good else f"use Python {'.'.join(map(str, PYTHON))} to train"
    yield Finding("python", OK if good else WARNING, version, fix)
    yield Finding("megatron_ext", OK, f"{__version__}, patches for {', '.join(TAGS)}")
    torch = facts.get("torch", {"error": facts.get("error")})
    if "error" in torch:
        text = f"only the schedule tools work, not training ({torch['error']})"
        yield Finding("torch", ERROR, text, _INSTALL)
    else:
        yield Finding("torch", OK, torch["version"])
        devices = torch["devices"]
        if devices:
            text = f"{torch['cuda']}, {len(devices)} x {', '.join(sorted(set(devices)))}"
            yield Finding("cuda", OK, text)
        else:
            fix = "use a machine with GPUs, or train with `megatron_ext.launch --device cpu`"
            yield Finding("cuda", WARNING, "no device", fix)
    if checkout is not None:
        yield _checkout(checkout)
    if "error" not in torch:
        yield from _megatron(facts["megatron"], checkout)
        yield from _libraries(facts["libraries"])
    bad = [name for name, (value, *_) in _CONFLICTS.items() if os.environ.get(name) == value]
    for name in bad:
        value, effect, fix = _CONFLICTS[name]
        yield Finding("environment", WARNING, f"{name}={value}: {effect}", fix)
    if not bad:
        yield Finding("environment", OK, "no conflicting variables")


def _checkout(checkout: Path) -> Finding:
    try:
        found = patching.status(checkout)
    except patching.PatchError as error:
        return Finding("checkout", ERROR, str(error), "scripts/get_megatron.sh fetches one")
    text = f"{checkout}: Megatron {found.version}, patch {found.state}"
    if not (checkout / "pretrain_gpt.py").is_file():
        fix = "fetch it again with scripts/get_megatron.sh"
        return Finding("checkout", ERROR, f"{text}, without pretrain_gpt.py", fix)
    if found.problem:
        fix = "restore the file to patch it; the launcher needs no patch"
        return Finding("checkout", WARNING, f"{text}: {found.problem}", fix)
    return Finding("checkout", OK, text)


def _megatron(found: dict[str, Any], checkout: Path | None) -> Iterator[Finding]:
    if "error" in found:
        text = f"megatron.core cannot be imported ({found['error']})"
        yield Finding("megatron", ERROR, text, f"give --megatron CHECKOUT; or {_INSTALL}")
        return
    where = f"{found['version']}, in {found['path']}"
    if "unsupported" in found:
        yield Finding("megatron", ERROR, found["unsupported"], "use one of the supported releases")
        return
    if checkout is not None and Path(found["path"]) != checkout.resolve():
        fix = f"see why {checkout} has no megatron.core; fetch it again"
        yield Finding("megatron", ERROR, f"{where}, not the checkout", fix)
    elif found["untested"]:
        text, _, advice = found["untested"].partition(". ")
        yield Finding("megatron", WARNING, f"{text}, in {found['path']}", advice)
    else:
        yield Finding("megatron", OK, where)
    if "training_error" in found:
        text = f"megatron.training cannot be imported ({found['training_error']})"
        yield Finding("training", ERROR, text, "install what it names, or repair the checkout")
    elif found["missing"]:
        fix = "use an unmodified release; if it is one, report this"
        yield Finding("hooks", ERROR, "; ".join(found["missing"]), fix)
    else:
        yield Finding("hooks", OK, f"{found['hooks']} found")


def _libraries(found: dict[str, str]) -> Iterator[Finding]:
    engine, apex = found["transformer_engine"], found["apex"]
    numbers = tuple(int(x) for x in engine.split(".")[:2] if x.isdigit())
    if len(numbers) < 2:
        fix = "install it, or train with --transformer-impl local, whose layers split too"
        yield Finding("transformer engine", WARNING, engine, fix)
    elif numbers < (2, 3):
        fix = "use 2.3 or later for zb-*, v-* and interleaved-zb to pay off"
        yield Finding("transformer engine", WARNING, f"{engine}: B and W run as one", fix)
    else:
        yield Finding("transformer engine", OK, engine)
    yield Finding("apex", OK, apex)


def _command(command: training_command.Command, facts: dict[str, Any]) -> Iterator[Finding]:
    """What Megatron says of a command's sizes."""
    from ...prove.session import refusal
    from ..prove import script_of

    ranks = f", {command.world} ranks" if command.world else ""
    text = f"{len(command.flags)} words{ranks}"
    if "error" in facts.get("torch", facts) or "error" in facts["megatron"]:
        yield Finding("command", OK, f"{text}; not checked without torch and Megatron")
        return
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        script = script_of(command.script or "pretrain_gpt")
        why = refusal(script, command.flags, command.world, Path(folder))
    if why:
        yield Finding("command", ERROR, f"{text}; Megatron refuses it: {why}", "correct the sizes")
    else:
        yield Finding("command", OK, f"{text}; Megatron accepts its sizes")
