"""``patch``: let a Megatron-LM checkout take our flags, look whether it does, and undo it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .. import patching
from .parser import JSON, InputError, Parser


def declare(parser: Parser) -> None:
    """Its actions."""
    actions = parser.add_subparsers(
        required=True, metavar="ACTION", dest="action", help="apply, status or revert"
    )
    for name, text in (
        ("apply", "insert a few lines in one file of the checkout"),
        ("status", "report whether they are there; exit status 0: applied, 1: not"),
        ("revert", "restore the file's original bytes"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("checkout", metavar="CHECKOUT", type=Path, help="a Megatron-LM folder")
        JSON.declare(action)
    parser.set_defaults(run=_patch)


_NEXT = (
    "next: start the checkout's own script with our flags, where Python finds megatron_ext (pip "
    "install it, or add its folder to PYTHONPATH):\n"
    "  torchrun --nproc-per-node 8 pretrain_gpt.py ... --pp-schedule v-half"
)


def _result(action: str, before: str, after: str) -> str:
    if action == "apply" and before == after:
        return "already applied"
    if action == "revert" and before == after:
        return "not applied, nothing to revert"
    return after


def _patch(args: argparse.Namespace) -> int:
    action = {"apply": patching.apply, "status": patching.status, "revert": patching.revert}
    try:
        before = patching.status(args.checkout)
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
            "changed": found.state != before.state,
            "patches": patches,
            "files": {patching.FILE: found.state},
            "warning": found.warning or None,
            "problem": found.problem or None,
        }
        print(json.dumps(data))
    else:
        tag = found.tag or "none of the supported versions"
        print(f"{found.checkout}: Megatron {found.version}, {tag}")
        print(f"  {patching.FILE}: {_result(args.action, before.state, found.state)}")
        if args.action == "apply":
            print(_NEXT)
        if found.problem:
            print(f"  {found.problem}")
    if found.warning:
        print(f"megatron-ext patch: warning: {found.warning}", file=sys.stderr)
    return 0 if args.action != "status" or found.state == patching.APPLIED else 1
