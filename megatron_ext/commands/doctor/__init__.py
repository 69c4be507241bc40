"""``doctor``: what of this machine, its torch and its Megatron works with us, and what to change.

Runs on a bare interpreter. torch and Megatron are looked at by ``probe.py``, in a process of its
own, so that nothing which they do can end this one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..._terminal import Progress
from ..common import InputError, user_input
from ..parser import JSON, Options, Parser
from ..training_command import FORMS, read_command
from .command import diagnose_command
from .findings import ERROR, OK, WARNING, Finding, diagnose

PROBE = Path(__file__).with_name("probe.py")
PROBE_SECONDS = 180.0  # imports take seconds; an importer that hangs must not hold the report
SECONDS_ENVIRONMENT = "MEGATRON_EXT_DOCTOR_SECONDS"


def declare(parser: Parser) -> None:
    parser.description = (
        "One line a subject: ok, warning or error, with the fix. Exit status 1 if one is an error."
    )
    _OWN.declare(parser)
    parser.set_defaults(run=_doctor)


_OWN = Options(
    {
        "--megatron CHECKOUT": "a Megatron-LM folder to look at; default: $MEGATRON_LM, else what "
        "Python finds",
        "--from-args LINE|FILE": f"a training command to look at too: {FORMS}",
        **JSON.help,
    },
    kinds={"--megatron": Path, "--from-args": read_command},
)


def _doctor(args: argparse.Namespace) -> int:
    checkout: Path | None = args.megatron
    if checkout is not None and not checkout.is_dir():
        raise InputError(f"--megatron {checkout} is no folder; give a Megatron-LM checkout")
    named = os.environ.get("MEGATRON_LM")
    if checkout is None and named:
        checkout = Path(named)
    command = args.from_args
    with Progress("doctor") as progress:
        progress("importing torch and Megatron in a process of its own")
        facts = run_probe(checkout)
        findings = list(diagnose(facts, checkout, Path("/")))
    if command is not None:
        with user_input(command.given):
            devices = len(facts.get("torch", {}).get("devices", ()))
            findings += diagnose_command(command, devices)
    worst = next(level for level in (ERROR, WARNING, OK) if any(f.level == level for f in findings))
    if args.json:
        print(json.dumps({"status": worst, "lines": [asdict(f) for f in findings]}))
    else:
        print("\n".join(table(findings)))
    return 1 if worst == ERROR else 0


def table(findings: list[Finding]) -> list[str]:
    """The findings as text; each fix is below its line."""
    level, name = (max(len(getattr(f, x)) for f in findings) for x in ("level", "name"))
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<{level}}  {finding.name:<{name}}  {finding.text}")
        if finding.fix:
            lines.append(f"{'':<{level}}  {'':<{name}}  -> {finding.fix}")
    return lines


def run_probe(checkout: Path | None) -> dict[str, Any]:
    """What ``probe.py`` finds out; ``{"error": ...}`` if it comes to no end."""
    command = [sys.executable, *(["-S"] if sys.flags.no_site else []), "-W", "ignore", str(PROBE)]
    if checkout is not None:
        command.append(str(checkout))
    return facts_of(command, float(os.environ.get(SECONDS_ENVIRONMENT, PROBE_SECONDS)))


def facts_of(command: list[str], seconds: float, **environment: str) -> dict[str, Any]:
    """The last line that a process prints, as JSON; ``{"error": ...}`` if it comes to no end."""
    # What Megatron compiles or captures for a GPU is not needed, and costs time.
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", **environment}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"status {done.returncode}: {last}"}
    facts: dict[str, Any] = json.loads(lines[-1])
    return facts
