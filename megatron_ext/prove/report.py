"""What ``megatron-ext prove`` says: as text, JSON, and a page."""

from __future__ import annotations

import dataclasses
import html
import time
from typing import Any

from .._megatron_flags import OURS
from .session import Check, Progress, Session
from .shrink import Shrunk


@dataclasses.dataclass
class Report:
    """All checks of one configuration.

    Attributes:
        shrunk: what was run.
        checks: in their order.
        needed: flags without any one of which the first difference goes.
        seconds: of everything.
    """

    shrunk: Shrunk
    checks: list[Check]
    needed: list[str] | None = None
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """True if every check ended and found no difference."""
        return all(check.status == "equal" for check in self.checks)

    @property
    def json(self) -> dict[str, Any]:
        """One object."""
        found: dict[str, Any] = {
            "format": "megatron-ext-prove",
            "version": 1,
            "equal": self.equal,
            "ranks": self.shrunk.world,
            "steps": self.shrunk.steps,
            "flags": self.shrunk.flags.words,
            "changed": [list(change) for change in self.shrunk.changes],
            "not_kept": [list(entry) for entry in self.shrunk.lost],
            "checks": [check.json for check in self.checks],
            "seconds": round(self.seconds, 1),
        }
        if self.needed is not None:
            found["smallest_set"] = self.needed
        return found

    @property
    def text(self) -> str:
        """For people."""
        lines = []
        for check in self.checks:
            lines.append(f"{check.name:<24} {_verdict(check)}")
            if check.comparison is not None:
                lines += [f"    {one.text}" for one in check.comparison.differences[:4]]
                lines += [f"    not compared: {one}" for one in check.comparison.omitted]
        if self.needed is not None:
            lines.append(f"smallest set of flags:   {' '.join(self.needed) or 'none'}")
            lines.append("    (without any one of them the difference is gone, or nothing runs)")
        lines.append("")
        lines.append(f"run here: {self.shrunk.world} ranks, {self.shrunk.steps} steps")
        if self.shrunk.flags.slices:
            count, *_ = self.shrunk.flags.slices
            lines[-1] += f"; with --pp-slices, one process runs {count} slices, too"
        lines.append("smaller:  " + ", ".join(f"{n[2:]} {b} -> {a}" for n, b, a in self._sizes()))
        for flag, why in self.shrunk.lost:
            lines.append(f"not kept: {flag} ({why})")
        lines.append(f"{'equal' if self.equal else 'NOT EQUAL'} after {self.seconds:.0f} s")
        return "\n".join(lines)

    def _sizes(self) -> list[tuple[str, str, str]]:
        return [change for change in self.shrunk.changes if change[1]]

    @property
    def page(self) -> str:
        """An HTML page."""
        rows = ""
        for check in self.checks:
            rows += f"<tr><td>{html.escape(check.name)}<td class={check.status}>"
            rows += html.escape(_verdict(check))
            if (made := check.comparison) is not None:
                found = [one.text for one in made.differences]
                found += [f"not compared: {one}" for one in made.omitted]
                rows += "".join(f"<p>{html.escape(text)}" for text in found)
        sizes = "".join(
            f"<tr><td>{html.escape(n)}<td>{html.escape(b)}<td>{html.escape(a)}"
            for n, b, a in self._sizes()
        )
        lost = "".join(
            f"<tr><td>{html.escape(flag)}<td>{html.escape(why)}" for flag, why in self.shrunk.lost
        )
        smallest = ""
        if self.needed is not None:
            flags = " ".join(self.needed) or "none"
            smallest = f"<p>Smallest set of flags: <code>{html.escape(flags)}</code>"
        return _PAGE.format(
            verdict="equal" if self.equal else "not equal",
            rows=rows,
            smallest=smallest,
            sizes=sizes,
            lost=lost,
            ranks=self.shrunk.world,
            command=html.escape(" ".join(self.shrunk.flags.words)),
        )


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>megatron-ext prove: {verdict}</title>
<style>body{{font:16px/1.5 system-ui;max-width:60em;margin:2em auto;padding:0 1em}}
table{{border-collapse:collapse}}td{{border-top:1px solid #8888;padding:.3em .8em .3em 0;
vertical-align:top}}.equal{{color:#2a7d2a}}.different,.failed,.hung{{color:#c22}}
code{{overflow-wrap:anywhere}}@media(prefers-color-scheme:dark){{body{{background:#111;color:#ddd}}
.equal{{color:#6c6}}.different,.failed,.hung{{color:#f77}}}}</style>
<h1>{verdict}</h1><table>{rows}</table>{smallest}
<h2>Run on {ranks} CPU ranks</h2><p><code>{command}</code>
<h2>Smaller than the command</h2><table>{sizes}</table>
<h2>Not kept</h2><table>{lost}</table>
"""


def _verdict(check: Check) -> str:
    if check.comparison is None:
        return f"{check.status}: {check.detail}"
    made = check.comparison
    largest = max(made.largest.values(), default=0.0)
    within = "bit for bit" if not largest else f"largest difference {largest:.1e}"
    if check.status == "equal":
        return f"equal: {made.tensors} tensors, {within} ({check.seconds:.1f} s)"
    return f"different: {made.tensors} tensors compared ({check.seconds:.1f} s)"


def make(session: Session, shrunk: Shrunk, races: int, bisect: bool, progress: Progress) -> Report:
    """Run all checks of a configuration.

    Args:
        session: runs them.
        shrunk: the configuration.
        races: runs with late messages.
        bisect: look for the smallest set of flags that a difference needs.
        progress: called with a line before each run.
    """
    start = time.monotonic()
    report = Report(shrunk, [])
    progress(f"one process, then stock Megatron on {session.world(shrunk.stock)} ranks")
    report.checks.append(session.check("layout, stock", shrunk.stock))
    flags, failed = shrunk.stock, report.checks[0].status != "equal"
    if shrunk.ours and not report.checks[0].detail.startswith("one process"):
        flags = shrunk.flags
        given = " ".join(flags.text(name) for name in flags.of_kind(OURS))
        progress(f"with {given}")
        report.checks.append(session.check("layout, megatron_ext", flags))
        failed = report.checks[1].status != "equal"
    if not failed:
        progress("a checkpoint and its resumption")
        report.checks.append(session.resume(flags))
        if races:
            report.checks += session.races(flags, races, progress)
    if bisect:
        for check, those in zip(report.checks, (shrunk.stock, shrunk.flags), strict=False):
            if check.status == "different":
                report.needed = session.smallest(those, progress)
                break
    report.seconds = time.monotonic() - start
    return report
