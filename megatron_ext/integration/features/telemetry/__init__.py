"""``--pp-trace``, and bubble and peak in Megatron's log line."""

from __future__ import annotations

from collections.abc import Sequence

from ...callbacks import Callback
from ...feature import Feature, Flag, Run
from .log_line import LogLine
from .traces import Traces


class Telemetry(Feature):
    """The log line is on for every schedule inside Megatron's training loop."""

    flags = (
        Flag(
            "--pp-trace",
            "write each rank's measured timeline and peak resident activation sets here",
            "DIR",
            compared=lambda value, args: "a directory",  # may be each node's own
        ),
    )

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None:
            return ()
        trace = run.args.pp_trace
        return (
            *(() if trace is None else (Traces(trace),)),
            *((LogLine(),) if run.training else ()),
        )
