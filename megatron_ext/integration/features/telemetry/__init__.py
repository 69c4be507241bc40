"""``--pp-trace``, and bubble and peak in the log: planned, in Megatron's line, and in the end."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ....runtime import files
from ...callbacks import Callback
from ...errors import ConfigError
from ...feature import Feature, Flag, Run
from .log_line import LogLine
from .memory_line import MemoryLine
from .summary import Summary
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

    def check_flags(self, run: Run) -> None:
        trace = run.args.pp_trace
        if trace is None:
            return
        try:
            usable = os.access(files.folder(trace), os.W_OK)
            why = "it is not writable"
        except OSError as error:
            usable, why = False, error.strerror or str(error)
        if not usable:
            raise ConfigError(
                f"--pp-trace {trace} cannot be written ({why}); give a folder that every rank can "
                "make and write"
            )

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None:
            return ()
        trace, summary = run.args.pp_trace, Summary(run.training)
        return (
            summary,
            MemoryLine(run),
            *(() if trace is None else (Traces(trace),)),
            *((LogLine(summary),) if run.training else ()),
        )
