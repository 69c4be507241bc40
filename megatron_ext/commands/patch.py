"""``patch``: let a Megatron-LM checkout take our flags, look whether it does, and undo it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .. import patching
from .common import InputError, Parser


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "patch", help="let a Megatron-LM checkout take the flags without the launcher"
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    for name, text in (
        ("apply", "insert a few lines in one file of the checkout"),
        ("status", "report whether they are there; exit status 0: applied, 1: not"),
        ("revert", "remove them: the file has its original bytes again"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("checkout", metavar="CHECKOUT", type=Path, help="a Megatron-LM folder")
        action.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_patch)


def _patch(args: argparse.Namespace) -> int:
    action = {"apply": patching.apply, "status": patching.status, "revert": patching.revert}
    try:
        found = action[args.action](args.checkout)
    except patching.PatchError as error:
        raise InputError(str(error)) from None
    patches = [] if found.tag is None else [patching.PATCH_NAME]
    if args.json:
        data = {
            "checkout": str(found.checkout),
            "version": found.version,
            "tag": found.tag,
            "state": found.state,
            "patches": patches,
            "files": {patching.FILE: found.state},
            "warning": found.warning or None,
            "problem": found.problem or None,
        }
        print(json.dumps(data))
    else:
        tag = found.tag or "none of the supported versions"
        print(f"{found.checkout}: Megatron {found.version}, {tag}")
        print(f"  {patching.FILE}: {found.state}")
        if found.problem:
            print(f"  {found.problem}")
    if found.warning:
        print(f"megatron-ext patch: warning: {found.warning}", file=sys.stderr)
    return 0 if args.action != "status" or found.state == patching.APPLIED else 1
