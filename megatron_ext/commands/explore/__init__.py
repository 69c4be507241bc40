"""``explore``: a local page on which schedules, costs, caps and offload can be tried."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from ..common import InputError, output, user_input
from ..parser import Options, Parser
from .answers import Explorer
from .model import declare_model, model_of
from .server import serve

_PORT = 8765


def declare(parser: Parser) -> None:
    parser.description = (
        "Serves a page to this machine's browsers only. It needs nothing but Python."
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="schedule files to choose from on the page"
    )
    _OWN.declare(parser)
    declare_model(parser)
    parser.set_defaults(run=_explore)


def _port(value: str) -> int:
    if not value.isdigit() or not 0 <= int(value) <= 65535:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535, got {value!r}")
    return int(value)


_OWN = Options(
    {
        "--measured DIR": "a run that --pp-trace DIR recorded, to choose from on the page; may be "
        "repeated",
        "--port N": f"of this machine (default {_PORT}, or a free one if that is taken)",
        "--open": "open the page in the browser",
        "--export FILE.html": "write one view as a page that needs no server, and end",
        "--view LINK": "view to export: the part of the page's address after # (default: what the "
        "page shows first)",
    },
    kinds={"--measured": list, "--port": _port},
    defaults={"--measured": [], "--port": _PORT, "--view": ""},
    needs={"--view": "--export"},
)


def _explore(args: argparse.Namespace) -> None:
    with user_input():
        explorer = Explorer(model_of(args))
    for path in args.files:
        with user_input():
            explorer.add_file(Path(path).name, path)
    for folder in args.measured:
        with user_input():
            explorer.add_measured(folder)
    if args.export is not None:
        if not args.export.endswith(".html"):
            raise InputError(f"--export {args.export}: write a name that ends in .html")
        text = explorer.export(args.view)
        with output(args.export) as path:
            Path(path).write_text(text, encoding="utf-8")
        print(f"{args.export}: open it in a browser")
        return
    try:
        server = serve(explorer, args.port, fallback=args.port == _PORT)
    except OSError as error:
        raise InputError(f"--port {args.port}: {error.strerror}; give another") from None
    address = f"http://localhost:{server.server_port}/"
    print(f"{address}  (Ctrl-C ends it)", flush=True)
    if args.open:
        webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
