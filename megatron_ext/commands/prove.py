"""``prove``: does a training command compute what one process would?"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path

from . import training_command
from .common import InputError, user_input
from .parser import JSON, Options, Parser, positive


def declare(parser: Parser) -> None:
    parser.description = (
        "Makes the command small, runs it on CPU ranks in float64 and compares losses, gradients "
        "and weights of every parameter with one process. Exit status 1 if they differ; 2 if "
        "Megatron refuses the command."
    )
    training_command.declare(parser)
    Options(
        {
            "--ranks N": "CPU ranks to use at most (default: 16)",
            "--folder DIR": "keep logs and tensors in this new folder",
            **JSON.help,
        },
        kinds={"--ranks": positive},
        defaults={"--ranks": 16},
    ).declare(parser)
    parser.set_defaults(run=_prove)


def _prove(args: argparse.Namespace) -> int:
    from ..prove.session import prove
    from ..prove.shrink import shrink

    command = training_command.command_of(args)
    if command is None:
        raise InputError("give the command after --, or its flags with --from-args")
    script = script_of(command.script or "pretrain_gpt")
    with user_input():
        shrunk = shrink(command.flags, command.world, args.ranks)
    if importlib.util.find_spec("torch") is None:
        raise InputError("training on CPU ranks needs torch, which is not installed")
    start = time.monotonic()

    def progress(text: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {text}", file=sys.stderr, flush=True)

    with contextlib.ExitStack() as stack:
        if args.folder:
            folder = Path(args.folder).resolve()
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise InputError(f"--folder {folder}: {error.strerror}") from None
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prove-")))
        with user_input("Megatron refuses the command"):
            checks = prove(script, command.flags, command.world, shrunk, folder, progress)
    equal = all(check.status == "equal" for check in checks)
    if args.json:
        report = {"equal": equal, "ranks": shrunk.world, "flags": shrunk.flags.words}
        lists = {"not_kept": shrunk.lost, "checks": [check._asdict() for check in checks]}
        print(json.dumps({**report, **lists}))
        return 0 if equal else 1
    print(f"{shrunk.world} ranks: {script} {' '.join(shrunk.flags.words)}")
    if shrunk.lost:
        print("not kept: " + ", ".join(f"{flag} ({why})" for flag, why in shrunk.lost))
    print("\n".join(check.text for check in checks))
    return 0 if equal else 1


def script_of(text: str) -> Path:
    """Path of a training script, or of the one that ``pretrain_gpt`` means."""
    from ..launch import LaunchError, _resolve_script

    try:
        return _resolve_script(text)
    except LaunchError as error:
        raise InputError(str(error)) from None
