"""What the page asks: every schedule's numbers, timelines, flags, and a copy of what it shows."""

from __future__ import annotations

import argparse
import html
import shlex
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from ..._input import shown
from ...schedule import GENERATORS, Schedule, simulate
from ...view import recorded, timeline
from ...view.data import view_data
from ...view.web import asset, document
from ..common import InputError, load, user_input, verify
from ..numbers import PAGE, Shown, table_of
from . import request
from .flags import training_flags
from .model import Model

FIRST = "options=--pp+8+--microbatches+16&schedule=1f1b&schedule=v-half"
MOST_SHOWN = 4  # timelines one above the other
_KEPT = 256  # results in memory
_MOST_BYTES = 1 << 26  # of a file that the page sends


class Explorer:
    """Answers, each made once. Safe to call from several threads.

    Args:
        model: whose times and bytes all schedules have; None: the options give times.
    """

    def __init__(self, model: Model | None = None) -> None:
        self._model = model
        self.first = FIRST
        if model is not None:
            sizes = model.sizes
            options = f"--pp+{sizes['pp']}+--microbatches+{sizes['microbatches']}"
            self.first = f"options={options}&schedule=1f1b&schedule=v-half"
        self._files: dict[str, Schedule] = {}
        self._measured: dict[str, list[timeline.Timeline]] = {}
        self._made: OrderedDict[tuple[str, ...], Future[Shown]] = OrderedDict()
        self._lock = threading.RLock()

    # What can be chosen besides the generated schedules.

    def add_file(self, name: str, path: str | Path) -> str:
        """Offer a schedule file; returns the name that it has on the page.

        Raises:
            ValueError, InputError: it holds no schedule that can run.
        """
        schedule = load(str(path))
        verify(schedule)
        with self._lock:
            name = f"file: {name}"
            self._files[name] = schedule
            self._made.clear()
        return name

    def add_text(self, name: str, data: bytes) -> str:
        """As ``add_file``, of what the page sends: ``name`` gives the format."""
        suffix = Path(name).suffix
        if suffix not in (".json", ".csv") or len(data) > _MOST_BYTES:
            raise InputError(f"{shown(name)} is no schedule file (.json or .csv, at most 64 MiB)")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"schedule{suffix}"
            path.write_bytes(data)
            with user_input():
                return self.add_file(Path(name).name, path)

    def add_measured(self, folder: str) -> str:
        """Offer the last iteration that ``--pp-trace`` recorded, under its plan."""
        schedule = recorded.plan_of(folder)
        plan, run = timeline.planned(simulate(schedule)), recorded.load(folder, schedule)
        with self._lock:
            name = f"measured: {folder}"
            self._measured[name] = [plan.scaled_to(run), run]
        return name

    @property
    def names(self) -> list[str]:
        """Everything that a timeline can be asked of."""
        return [*GENERATORS, *self._files, *self._measured]

    # Answers.

    def compare(self, options: str) -> Iterator[dict[str, Any]]:
        """A row a schedule, those that take longest to make last; then the end's."""
        args = request.parse(options, self._model)
        for name in [*self._files, *sorted(GENERATORS, key=request.slowness)]:
            yield self._row(options, args, name)
        yield {"end": True, "cap": request.cap_of(args)}

    def timelines(self, options: str, names: list[str]) -> dict[str, Any]:
        """What the viewer draws, with every schedule's row and flags."""
        args = request.parse(options, self._model)
        if not 1 <= len(names) <= MOST_SHOWN:
            raise InputError(f"choose one to {MOST_SHOWN} schedules, got {len(names)}")
        runs: list[timeline.Timeline] = []
        rows = []
        for name in names:
            if name in self._measured:
                runs += self._measured[name]
                rows.append({"schedule": name, "flags": None})
                continue
            row = self._row(options, args, name)
            if "reason" in row:
                raise InputError(f"{name}: {row['reason']}")
            run = self._result(options, args, name).run
            runs.append(timeline.planned(run, microseconds=self._model is not None))
            flags = None if name in self._files else training_flags(args, name)
            rows.append({**row, "flags": flags})
        words = " ".join(shlex.quote(n.removeprefix("file: ")) for n in names)
        command = f"megatron-ext show {words} {options}"
        # Other commands do not take a model.
        return {**view_data(runs), "rows": rows, "command": "" if self._model else command}

    def export(self, query: str) -> str:
        """One view as a page of its own: the table, the timelines and the flags.

        Args:
            query: the part of the page's address after ``#``; empty: the first view.
        """
        fields = parse_qs(query or self.first)
        if "options" not in fields:
            raise InputError(
                f"{shown(query)} is no view: give the part of the page's address after #, such as "
                f"{self.first}"
            )
        options = " ".join(fields.get("options", []))
        data = self.timelines(options, fields.get("schedule", []))
        names = [row["schedule"] for row in self.compare(options) if "makespan" in row]
        args = request.parse(options, self._model)
        rows = sorted((self._result(options, args, n) for n in names), key=lambda r: r.run.makespan)
        gone = [row["schedule"] for row in self.compare(options) if "reason" in row]
        shown_flags = [row["flags"] for row in data["rows"] if row["flags"]]
        about = [] if self._model is None else [f"<p>{html.escape(self._model.json['text'])}</p>"]
        asked = "" if about else "megatron-ext compare "
        body = "\n".join(
            [
                '<main class="export"><h1>Pipeline schedules</h1>',
                *about,
                f"<p><code>{asked}{html.escape(options)}</code></p>",
                _table(rows, gone),
                '<div id="timeline"></div>',
                *(f"<p><code>{html.escape(flags)}</code></p>" for flags in shown_flags),
                "</main>",
            ]
        )
        script = 'const VIEWER = new Viewer(document.getElementById("timeline"), TIMELINE);'
        styles = asset("explore.css", __package__)
        return document("Pipeline schedules", body, styles, script, {"TIMELINE": data})

    def page(self) -> str:
        """The page itself."""
        return document(
            "Pipeline schedules",
            asset("explore.html", __package__),
            asset("explore.css", __package__),
            asset("explore.js", __package__),
            {"FIRST": self.first, "NAMES": self.names, "MODEL": self._model and self._model.json},
        )

    def _row(self, options: str, args: argparse.Namespace, name: str) -> dict[str, Any]:
        """A schedule's numbers, or ``reason``, why there are none."""
        try:
            return request.row(self._result(options, args, name))
        except (ValueError, OverflowError, InputError) as error:
            return {"schedule": name, "reason": str(error)}

    def _result(self, options: str, args: argparse.Namespace, name: str) -> Shown:
        file = self._files.get(name)
        if file is None and name not in GENERATORS:
            raise InputError(f"unknown schedule {shown(name)}")
        return self._once((options, name), lambda: request.result(args, name, file, self._model))

    def _once(self, key: tuple[str, ...], make: Callable[[], Shown]) -> Shown:
        """What ``make`` returns or raises, made by the first who asks, and kept."""
        with self._lock:
            first = key not in self._made
            made = self._made.setdefault(key, Future())
            self._made.move_to_end(key)
            while len(self._made) > _KEPT:
                self._made.popitem(last=False)
        if first:
            try:
                made.set_result(make())
            except BaseException as error:  # for all who ask
                made.set_exception(error)
        return made.result()


def _table(rows: Sequence[Shown], impossible: Sequence[str]) -> str:
    """The table of an exported view."""
    heads, *cells = table_of(rows, PAGE)
    head = "<th>".join("peak, microbatches" if one == "peak" else one for one in heads)
    lines = [f"<table><thead><tr><th>{head}</tr></thead>", "<tbody>"]
    for row, one in zip(rows, cells):
        over = ' class="over" title="over the cap"' if row.over_cap else ""
        lines.append(f"<tr{over}><td>{'<td>'.join(map(html.escape, one))}</tr>")
    missing = f'<td colspan="{len(heads) - 1}">not possible here'
    lines += [f'<tr class="over"><td>{html.escape(name)}{missing}</tr>' for name in impossible]
    return "\n".join([*lines, "</tbody></table>"])
