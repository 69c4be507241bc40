"""The scripts of ``examples`` on two forked ranks, as torchrun would start them; see test_examples.

A result is {"output": text of both ranks, "status": their exit statuses}. In cases that end in
"-wrong" a schedule of ours, or an MoE layer of ours, makes a small error on one rank.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import runpy
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from megatron_ext import cpu

cpu.install()

import torch  # noqa: E402
from megatron.core import optimizer  # noqa: E402, F401 (for all scripts, before ranks fork)
from megatron.core.models import gpt  # noqa: E402, F401

from megatron_ext.integration.features.moe.layer import PipelinedMoE  # noqa: E402
from megatron_ext.integration.pipeline import ScheduledPipeline  # noqa: E402
from tests.support import ROOT  # noqa: E402
from tests.support.case_server import serve  # noqa: E402

RANKS = 2
SCRIPTS = ("train_v_half", "custom_schedule", "offload_policy", "moe_chunks", "any_trainer")
CASES: dict[str, dict[str, Any]] = {
    f"{name}{suffix}": {"script": name, "wrong": bool(suffix), "world": 1}
    for name in SCRIPTS
    for suffix in ("", "-wrong")
}


def wrong_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward-backward call that leaves one element of a gradient on the last rank wrong."""

    def call(self: Any, **kwargs: Any) -> Any:
        result = original(self, **kwargs)
        models = kwargs["model"] if isinstance(kwargs["model"], list) else [kwargs["model"]]
        parameter = next(models[-1].parameters())
        gradient = getattr(parameter, "main_grad", parameter.grad)
        if os.environ["RANK"] == "1" and not kwargs["forward_only"]:
            gradient.view(-1)[0] += 1e-3
        return result

    return call


def wrong_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """An MoE layer with one element of its output wrong, on the last rank."""

    def forward(self: Any, *args: Any) -> Any:
        output, *rest = original(self, *args)
        error = torch.zeros_like(output)
        error.view(-1)[0] = 1e-9 if os.environ["RANK"] == "1" else 0
        return (output + error, *rest)

    return forward


def become(script: str, wrong: bool, rank: int, port: int, log: Path) -> NoReturn:
    """Run ``script`` as rank ``rank`` in this process, and end it."""
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    path = ROOT / "examples" / f"{script}.py"
    sys.argv, sys.path[:0] = [str(path)], [str(path.parent)]
    status: Any = 0
    try:
        with contextlib.ExitStack() as stack:
            if wrong:
                call = wrong_gradient(ScheduledPipeline.__call__)
                output = wrong_output(PipelinedMoE.forward)
                stack.enter_context(mock.patch.object(ScheduledPipeline, "__call__", call))
                stack.enter_context(mock.patch.object(PipelinedMoE, "forward", output))
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as left:
        status = left.code
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def rank_main(folder: Path, name: str, case: dict[str, Any], rank: int) -> None:
    """Fork the script's ranks and wait for them; they may end without returning."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [folder / f"rank{r}" for r in range(RANKS)]
    pids = []
    for number, log in enumerate(logs):
        pid = os.fork()
        if not pid:
            become(case["script"], case["wrong"], number, port, log)
        pids.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    output = "".join(log.read_text() for log in logs)
    (folder / "result.pickle").write_bytes(pickle.dumps({"output": output, "status": statuses}))


if __name__ == "__main__":
    serve(CASES, rank_main, 1)
