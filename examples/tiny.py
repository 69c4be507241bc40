"""What the examples share: a tiny GPT, its data, a plain reference, and exact comparisons.

Importing this module prepares the process for CPU ranks; on GPUs leave the lines with ``cpu`` out.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ext import cpu

# So that the proof is alone on the screen. In training leave them on: rank 0 logs what runs.
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|full scope|experimental).*")
logging.getLogger("megatron.core").setLevel(logging.ERROR)
logging.getLogger("megatron_ext").setLevel(logging.ERROR)
cpu.install()  # before Megatron is imported

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

LAYERS, HIDDEN, SEQUENCE, BATCH, VOCAB = 8, 64, 64, 4, 128
MICROBATCHES, STEPS, RATE = 8, 3, 0.1
Tensors = dict[str, torch.Tensor]


def start(pp: int, virtual: int | None = None, experts: int = 1) -> None:
    """Join the ranks that torchrun has started: pipelines of ``pp``, experts on ``experts``."""
    if "RANK" not in os.environ:
        sys.exit(f"start two ranks: torchrun --nproc-per-node 2 {sys.argv[0]}")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual,
        expert_model_parallel_size=experts,
    )
    model_parallel_cuda_manual_seed(1)


def finish() -> None:
    """End this rank, without the interpreter's shutdown: gloo's threads may outlive it."""
    dist.barrier()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


def say(*words: object) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def config(pp: int = 1, chunks: int = 1) -> TransformerConfig:
    """Megatron's configuration of the GPT, with ``chunks`` model chunks on each of ``pp`` ranks."""
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=False,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Fused kernels are for GPUs.
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )


def gpt(cfg: TransformerConfig, first: bool, last: bool, vp_stage: int | None = None) -> GPTModel:
    """This rank's part of the model.

    Args:
        cfg: of the whole model.
        first, last: whether the part holds the embedding, and the output layer with the loss.
        vp_stage: which of the rank's chunks it is; None: it is the only one.
    """
    return GPTModel(
        config=cfg,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=False,
        vp_stage=vp_stage,
    )


def global_names(model: GPTModel) -> dict[str, torch.nn.Parameter]:
    """Parameters by names that do not depend on where a layer lies."""
    found = {}
    for name, parameter in model.named_parameters():
        words = name.split(".")
        if words[:2] == ["decoder", "layers"]:
            words[2] = str(model.decoder.layers[int(words[2])].layer_number)
        found[".".join(words)] = parameter
    return found


def load(models: list[GPTModel], weights: Tensors) -> None:
    """Copy ``weights``, by global name, into this rank's parts of the model."""
    with torch.no_grad():
        for model in models:
            for name, parameter in global_names(model).items():
                parameter.copy_(weights[name])


def batch(step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels, each (BATCH, SEQUENCE), of every microbatch of a step."""
    draw = torch.Generator().manual_seed(step)
    for _ in range(MICROBATCHES):
        text = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=draw)
        yield text[:, :-1].contiguous(), text[:, 1:].contiguous()


def token_losses(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Run one microbatch: every token's loss on the last stage, else what the next stage needs."""
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    return model(tokens, torch.arange(SEQUENCE).expand(BATCH, -1), mask, labels=labels)


def forward_step(microbatches: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
    """Run one microbatch as Megatron's pipeline functions want it."""

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = losses.float().mean()
        return loss, loss.detach().clone()

    return token_losses(model, *next(microbatches)), loss_of


class Trained:
    """What training left on this rank; a step's gradients are over its microbatches' mean.

    Args:
        models: this rank's parts of the model.
        losses: of every microbatch of all steps, on the rank that returns them; else none.

    Attributes:
        losses: ``losses`` as one tensor, float32, by the name "losses"; empty on other ranks.
        gradients: of the last step, by global name.
        weights: after the last step, by global name.
    """

    def __init__(self, models: list[GPTModel], losses: list[torch.Tensor]) -> None:
        named = {name: p for model in models for name, p in global_names(model).items()}
        self.losses = {"losses": torch.stack(losses)} if losses else {}
        self.gradients = {name: p.grad for name, p in named.items()}
        self.weights = {name: p.detach() for name, p in named.items()}

    def require_equal(self, reference: Trained) -> None:
        """Compare what all ranks hold together with ``reference``, bit for bit."""
        for what in ("losses", "gradients", "weights"):
            require_equal(what, getattr(self, what), getattr(reference, what))


class Plain(Trained):
    """The reference: the whole model in one process, ``backward()`` and SGD; no pipeline.

    Attributes:
        initial: weights before the first step, by global name.
    """

    def __init__(self) -> None:
        start(pp=1)
        torch.manual_seed(1)
        model = gpt(config(), first=True, last=True)
        self.initial = {n: p.detach().clone() for n, p in global_names(model).items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            for tokens, labels in batch(step):
                loss = token_losses(model, tokens, labels).float().mean()
                (loss / MICROBATCHES).backward()
                losses.append(loss.detach())
            optimizer.step()
        super().__init__([model], losses)
        parallel_state.destroy_model_parallel()


def everywhere(mine: Any) -> list[Any]:
    """What every rank gave, in the order of ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def require_equal(what: str, ours: Tensors, expected: Tensors) -> None:
    """Compare, bit for bit, what all ranks hold together with a reference; print the result.

    Every rank exits with status 1 if a tensor differs, or if one is missing on all ranks.
    """
    wrong = [name for name, value in ours.items() if not torch.equal(value, expected[name])]
    held = everywhere((wrong, set(ours)))
    differing = sorted(name for names, _ in held for name in names)
    missing = set(expected) - set().union(*(names for _, names in held))
    if differing or missing:
        say(f"FAILED: {what}: {len(differing)} differ, {len(missing)} missing: {differing[:3]}")
        sys.exit(1)
    say(f"equal bit for bit: {what}, {len(expected)} tensors")


def require(claim: str, holds: bool) -> None:
    """Print ``claim``; exit with status 1 where it does not hold on some rank."""
    if not all(everywhere(holds)):
        say(f"FAILED: {claim}")
        sys.exit(1)
    say(claim)


def folder() -> Path:
    """A temporary folder that all ranks share; rank 0 removes it at its end."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    if dist.get_rank() == 0:
        atexit.register(shutil.rmtree, made[0], ignore_errors=True)
    return Path(made[0])


def traced(traces: Path) -> list[dict[str, Any]]:
    """What ``trace=`` wrote of every rank's last step."""
    dist.barrier()
    files = [traces / f"rank{rank}.jsonl" for rank in range(dist.get_world_size())]
    return [json.loads(file.read_text().splitlines()[-1]) for file in files]
