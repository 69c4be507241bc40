"""``patch``: put the patch series into a Megatron-LM checkout, look, and take it out again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .. import patching
from .common import InputError, Parser


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "patch", help="let a Megatron-LM checkout know the flags without the launcher"
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    for name, text in (
        ("apply", "patch the checkout, all or nothing"),
        ("status", "say whether it is patched; exit status 0: applied, 1: not, or not as it was"),
        ("revert", "give every patched file its original bytes back"),
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
    if args.json:
        data = {
            "checkout": str(found.checkout),
            "version": found.version,
            "tag": found.series.tag,
            "state": found.state,
            "patches": [patch.name for patch in found.series.patches],
            "files": dict(found.files),
        }
        print(json.dumps(data))
    else:
        print(f"{found.checkout}: Megatron {found.version}, {found.series.tag} patches")
        print(f"  {found.state}: {', '.join(patch.name for patch in found.series.patches)}")
        for path, state in found.files.items():
            print(f"  {path}: {state}")
    if args.action == "status":
        return 0 if found.state == patching.APPLIED else 1
    return 0
