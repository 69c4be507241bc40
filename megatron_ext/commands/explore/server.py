"""The page's server: of the standard library, for browsers of this machine only."""

from __future__ import annotations

import errno
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..common import InputError
from .answers import Explorer

_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_HEADER = "X-Explore"  # a page of another origin cannot send it
_MOST_BYTES = 1 << 26


def serve(explorer: Explorer, port: int, fallback: bool) -> ThreadingHTTPServer:
    """A server on ``port`` of the loopback device; with ``fallback`` on any if that is taken.

    Raises:
        OSError: the port cannot be had.
    """
    handler = functools.partial(_Handler, explorer)
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        if not fallback or error.errno != errno.EADDRINUSE:
            raise
        return ThreadingHTTPServer(("127.0.0.1", 0), handler)


class _Handler(BaseHTTPRequestHandler):
    """GET / and /export; /api/compare, /api/timelines and POST /api/load with the header."""

    def __init__(self, explorer: Explorer, *args: Any) -> None:
        self._explorer = explorer
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal stays quiet."""

    def do_GET(self) -> None:
        """Answer the page, or what its script asks."""
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        options, names = " ".join(query.get("options", [])), query.get("schedule", [])
        explorer = self._explorer
        if url.path == "/":
            self._answer(lambda: explorer.page(), "text/html", api=False)
        elif url.path == "/export":
            self._answer(lambda: explorer.export(url.query), "text/html", api=False, save=True)
        elif url.path == "/api/compare":
            self._answer(lambda: _lines(explorer.compare(options)), "application/x-ndjson")
        elif url.path == "/api/timelines":
            self._answer(lambda: json.dumps(explorer.timelines(options, names)), _JSON)
        elif url.path == "/favicon.ico":
            self._head(HTTPStatus.NO_CONTENT, "image/x-icon")
        else:
            self._plain(HTTPStatus.NOT_FOUND, "no such page")

    def do_POST(self) -> None:
        """Take a schedule file."""
        url = urlsplit(self.path)
        length = self.headers.get("Content-Length", "")
        if url.path != "/api/load" or not length.isdigit() or int(length) > _MOST_BYTES:
            self._plain(HTTPStatus.BAD_REQUEST, "POST a schedule file of at most 64 MiB")
            return
        (name,) = parse_qs(url.query).get("name", [""])[:1]
        data = self.rfile.read(int(length))
        self._answer(lambda: json.dumps({"name": self._explorer.add_text(name, data)}), _JSON)

    def _answer(
        self,
        make: Callable[[], str | Iterable[str]],
        kind: str,
        api: bool = True,
        save: bool = False,
    ) -> None:
        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        if host not in _LOCAL or (api and _HEADER not in self.headers):
            self._plain(HTTPStatus.FORBIDDEN, "only for the page of this server")
            return
        try:
            made = make()
        except (InputError, ValueError) as error:
            self._plain(HTTPStatus.BAD_REQUEST, str(error))
            return
        try:
            self._head(HTTPStatus.OK, kind, save)
            for part in [made] if isinstance(made, str) else made:
                self.wfile.write(part.encode())
                self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the page asks for something else by now

    def _plain(self, status: HTTPStatus, text: str) -> None:
        self._head(status, "text/plain")
        self.wfile.write(text.encode())

    def _head(self, status: HTTPStatus, kind: str, save: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        if save:
            self.send_header("Content-Disposition", 'attachment; filename="schedules.html"')
        self.end_headers()


_JSON = "application/json"


def _lines(rows: Iterator[dict[str, Any]]) -> Iterator[str]:
    """One JSON object a line. The first is made here, so that bad options are refused."""
    first = next(rows)
    return (json.dumps(row) + "\n" for row in chain([first], rows))
