"""Runs a Megatron training script several times on CPU ranks, importing torch and Megatron once.

    python -m megatron_ext.prove.ranks SCRIPT JOBS.json

A job is {"words": [...], "world": 4, "folder": "...", "timeout": 600}. Its ranks are forked one
job after another; each runs the launcher as torchrun would and writes ``rankN.log`` into the
folder, exact losses and the files of ``recorder``. A job with ``"check": true`` has Megatron parse
and validate the words as rank 0 of ``world`` ranks, and trains nothing. A line is printed for
every job, ``ok`` or ``failed``; the first that fails is the last.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from megatron_ext import cpu, launch

_GRACE = 10.0  # seconds that the other ranks have to end when one has failed


def main() -> None:
    """Run the jobs on the command line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever imports print
    script = Path(sys.argv[1]).resolve()
    jobs = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    os.environ["LOCAL_WORLD_SIZE"] = str(max(job["world"] for job in jobs))
    launch._set_path(script)
    launch._set_tools_path()
    cpu.install()
    from . import double

    double.install()
    launch._execute(script, "preloaded_script")
    import torch

    torch.set_num_threads(1)
    for job in jobs:
        status = "ok" if _run(script, job) else "failed"
        print(status, file=answers, flush=True)
        if status != "ok":
            break


def _run(script: Path, job: dict[str, Any]) -> bool:
    """Fork the ranks of a job; True if all of them end well."""
    port = _free_port()
    Path(job["folder"]).mkdir(parents=True)
    end = time.monotonic() + job["timeout"]
    running = set()
    for rank in range(1 if job.get("check") else job["world"]):
        pid = os.fork()
        if pid == 0:
            _rank(script, job, rank, port)
        running.add(pid)
    good = True
    while running:
        pid, code = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.discard(pid)
            if code and good:
                good, end = False, time.monotonic() + _GRACE
        elif time.monotonic() > end:
            good = False
            for left in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)
            end = float("inf")
        else:
            time.sleep(0.01)
    return good


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _rank(script: Path, job: dict[str, Any], rank: int, port: int) -> None:
    """Run the launcher in a forked process; never returns."""
    world, folder = str(job["world"]), Path(job["folder"])
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world)
    os.environ.update(LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    status = 1
    try:
        if job.get("check"):
            _validate(script, job["words"])
        else:
            from . import recorder

            recorder.record(rank, folder)
            own = ["--device", "cpu", "--loss-log", str(folder / "losses.jsonl")]
            launch.main([*own, str(script), *job["words"]])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exc()
        if not str(error):  # an assertion without words is its own condition
            line = traceback.extract_tb(error.__traceback__)[-1].line
            sys.stderr.write(f"{type(error).__name__}: {line}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _validate(script: Path, words: list[str]) -> None:
    """Let Megatron judge a command's own sizes, before it would build the model.

    Raises:
        ValueError: a rule that Megatron has in the middle of training only.
    """
    from megatron.core import num_microbatches_calculator as batches
    from megatron.core.transformer import transformer_block
    from megatron.training import arguments

    from megatron_ext.integration import install

    sys.argv = [str(script), *launch._cpu_arguments(words)]
    install()
    args = arguments.parse_args()
    arguments.validate_args(args)
    config = arguments.core_transformer_config_from_args(args)
    sizes = args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    batches.init_num_microbatches_calculator(0, None, *sizes)
    count, pp = batches.get_num_microbatches(), args.pipeline_model_parallel_size
    group, chunks = (
        args.microbatch_group_size_per_vp_stage or pp,
        args.virtual_pipeline_model_parallel_size or 1,
    )
    if chunks > 1 and 0 < count % group < pp:
        raise ValueError(f"{count} microbatches leave {count % group} for a group of {group}")
    if chunks > 1 and not config.pipeline_model_parallel_layout:
        for rank in (0, pp - 1):
            transformer_block.get_num_layers_to_build(config, chunks - 1, rank)
    tokens = args.seq_length // args.context_parallel_size
    if args.sequence_parallel and tokens % args.tensor_model_parallel_size:
        tp = args.tensor_model_parallel_size
        raise ValueError(f"--seq-length {args.seq_length} cannot be divided by {tp}")


if __name__ == "__main__":
    main()
