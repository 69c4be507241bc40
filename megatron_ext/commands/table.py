"""All commands: what ``--help`` says of each, and the examples at the end of its own.

A test parses all examples.
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """A module of this package, whose ``declare`` gives a parser its options and sets ``run``."""

    help: str
    examples: tuple[str, ...] = ()


_LLAMA = (
    '"--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --world-size '
    '8 --global-batch-size 64"'
)
COMMANDS = {
    "simulate": Command(
        "simulate a schedule (bubble, makespan, peak), and check a file",
        (
            "--schedule v-half --pp 4 --microbatches 8",
            "--schedule v-cap --memory-cap 0.6 --pp 8 --microbatches 32 --cost 1,1.1,0.8 "
            "--hop 0.05",
            "--schedule v-half.json",
        ),
    ),
    "schedule": Command(
        "write a schedule file",
        ("--schedule v-half --pp 4 --microbatches 8 --output v-half.json",),
    ),
    "compare": Command(
        "compare every schedule, and schedule files",
        (
            "--pp 4 --microbatches 8",
            "--pp 8 --microbatches 32 --cost 1,1.1,0.8 --hop 0.05 --memory-cap 0.6",
            "--pp 8 --microbatches 16 --output page.html",
        ),
    ),
    "plan": Command(
        "find the fastest flags that fit a memory budget",
        (
            f"--from-args {_LLAMA} --pp 8 --gpu H100 --memory-cap 60GiB",
            f"--from-args {_LLAMA} --gpu H100 --memory-cap 60GiB --output best.json",
        ),
    ),
    "show": Command(
        "draw a timeline with its memory, as text or picture",
        (
            "1f1b v-half --pp 4 --microbatches 8",
            "v-half.json --output v-half.svg",
            "--measured traces --output run.html",
        ),
    ),
    "patch": Command(
        "add our flags to a Megatron-LM checkout, or remove them",
        ("apply Megatron-LM", "status Megatron-LM", "revert Megatron-LM"),
    ),
    "doctor": Command(
        "check this machine, torch and Megatron, and suggest fixes",
        ("", "--megatron Megatron-LM --json"),
    ),
    "prove": Command(
        "shrink a training command, run it on CPU ranks, compare it with one process",
        (
            "-- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ...",
            "--ranks 4 -- srun python pretrain_gpt.py ... --pp-schedule v-half",
        ),
    ),
}
