"""Examples at the end of each command's ``--help``; a test parses all of them."""

from __future__ import annotations

import argparse

_LLAMA = (
    '"--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --world-size '
    '8 --global-batch-size 64"'
)
EXAMPLES: dict[str, tuple[str, ...]] = {
    "simulate": (
        "--schedule v-half --pp 4 --microbatches 8",
        "--schedule v-cap --memory-cap 0.6 --pp 8 --microbatches 32 --cost 1,1.1,0.8 --hop 0.05",
        "--schedule v-half --pp 4 --microbatches 8 --offload full --offload-time 0.25",
    ),
    "schedule": (
        "--schedule v-half --pp 4 --microbatches 8 --output v-half.json",
        "--schedule zb-h1 --pp 4 --microbatches 8 --output zb-h1.csv",
    ),
    "compare": (
        "--pp 4 --microbatches 8",
        "--pp 8 --microbatches 32 --cost 1,1.1,0.8 --hop 0.05 --memory-cap 0.6",
    ),
    "plan": (
        f"--from-args {_LLAMA} --pp 8 --gpu H100 --memory-cap 60GiB",
        f"--from-args {_LLAMA} --gpu H100 --memory-cap 60GiB --output best.json",
    ),
    "check": ("v-half.json",),
    "show": (
        "1f1b v-half --pp 4 --microbatches 8",
        "v-half.json --output v-half.svg",
        "--measured traces --output run.html",
    ),
    "checkpoint": ("checkpoints", "checkpoints --json"),
    "patch": ("apply Megatron-LM", "status Megatron-LM", "revert Megatron-LM"),
    "doctor": ("", "--megatron Megatron-LM --json"),
    "reproduce": ("--list", "controllable-memory --output page.md"),
    "explore": ("--open", "mine.json --measured traces", "--export view.html"),
    "completion": ("bash", "zsh"),
}


def add_examples(parser: argparse.ArgumentParser, name: str) -> None:
    """Let the help of the command ``name`` end with its examples, if it has no end of its own."""
    lines = [f"  {parser.prog} {line}".rstrip() for line in EXAMPLES.get(name, ())]
    if lines and parser.epilog is None:
        parser.epilog = "\n".join(["examples:", *lines])
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
