"""``--pp-offload``: PipeOffload, activation sets on the host between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

from ....schedule.link import POLICIES
from ...callbacks import Callback
from ...errors import ConfigError
from ...feature import Feature, Flag, Needs, Run

_ON = Needs({"--pp-offload": (), "--pp-offload-chunks": ()}, "--pp-offload auto (or half, full)")


class Offload(Feature):
    """On with ``--pp-offload``, ``--pp-offload-chunks`` or a schedule file that offloads."""

    per_model = True

    flags = (
        Flag(
            "--pp-offload",
            "keep activations in host memory between forward and backward pass: of half of each "
            "rank's model chunks (rounded up), of all, or (auto) as many as lower the peak without "
            "a wait",
            choices=("off", "half", "full", "auto"),
        ),
        Flag(
            "--pp-offload-chunks",
            "offload N chunks of each rank, those with the longest lifespan; in place of "
            "--pp-offload",
            "N",
            int,
            least=1,
            excludes=("--pp-offload", "both choose what is offloaded; give one of them"),
        ),
        Flag(
            "--pp-offload-time",
            "transfer time of one activation set to the host, and back, as a fraction of its "
            "chunk's F+B+W; default: measured in the first step",
            "T[,T2]",
            needs=_ON,
        ),
        Flag(
            "--pp-offload-transfer",
            "single: one copy stream; dual: one a direction; paired: two neighbours that share a "
            "switch never copy the same way at once; default: measured at start",
            choices=tuple(POLICIES),
            needs=_ON,
        ),
        Flag(
            "--pp-offload-policy",
            "which tensors of an offloaded set stay on the device: all are offloaded (default), "
            "keep-attention-inputs, or your own function that returns True for tensors to keep",
            "{all,keep-attention-inputs,MODULE:FUNCTION}",
        ),
    )

    def check_flags(self, run: Run) -> None:
        policy = run.args.pp_offload_policy
        if policy is None or run.request is None:
            return
        if not run.request.offloads:
            raise ConfigError(
                f"--pp-offload-policy {policy} is for offloading, which is off; add --pp-offload "
                "auto (or half, full), or drop --pp-offload-policy"
            )
        from .policy import keep_nothing, policy_of

        if policy_of(policy) is not keep_nothing and run.request.cap_bytes is not None:
            raise ConfigError(
                f"--pp-offload-policy {policy} keeps parts of offloaded sets on the device, which "
                f"--pp-memory-cap {run.args.pp_memory_cap} cannot count; give the cap as a "
                "fraction, or use --pp-offload-policy all"
            )

    def start(self, run: Run) -> Sequence[Callback]:
        request = run.request
        if request is None or not request.offloads:
            return ()
        from .policy import policy_of
        from .runtime import Offloading

        return (
            Offloading(
                request.offload,
                None if request.file is None else request.file.link,
                run.inputs,
                trace=run.args.pp_trace is not None,
                policy=policy_of(run.args.pp_offload_policy or "all"),
            ),
        )
