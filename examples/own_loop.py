"""Run it with: torchrun --nproc-per-node 2 examples/own_loop.py

A training loop on megatron-core gets another pipeline schedule by one line, ``enable``. The script
trains twice, under Megatron's 1F1B and under ZB-H1, and compares losses and weights bit for bit.
"""

import os
import sys
from collections.abc import Iterator

from megatron_ext import cpu

cpu.install()  # CPU ranks, before Megatron is imported; on GPUs leave this line out

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_ext

SEQUENCE, VOCAB, MICROBATCHES, STEPS = 64, 128, 8, 3
SIZES = {"num_microbatches": MICROBATCHES, "seq_length": SEQUENCE, "micro_batch_size": 2}
FUSIONS = ("masked_softmax_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion")


def model() -> GPTModel:
    """This rank's half of a GPT of 8 layers."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(rank)
    model_parallel_cuda_manual_seed(1)
    sizes = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4}
    pipeline = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    numerics = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True}
    no_fusions = dict.fromkeys(FUSIONS, False)  # they are for GPUs
    config = TransformerConfig(**sizes, **pipeline, **numerics, **no_fusions)
    ends = {"pre_process": rank == 0, "post_process": rank == 1}
    spec, untied = get_gpt_layer_local_spec(), {"share_embeddings_and_output_weights": False}
    return GPTModel(config, spec, VOCAB, SEQUENCE, **ends, **untied)


def batch(step: int) -> Iterator[torch.Tensor]:
    """Tokens and the label of the last one, (2, SEQUENCE + 1), of every microbatch."""
    draw = torch.Generator().manual_seed(step)
    for _ in range(MICROBATCHES):
        yield torch.randint(VOCAB, (2, SEQUENCE + 1), generator=draw)


def forward_step(data: Iterator[torch.Tensor], part: GPTModel) -> tuple:
    """One microbatch through this rank's stage, and the function of its loss."""
    text = next(data)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    output = part(text[:, :-1], torch.arange(SEQUENCE).expand(2, -1), mask, labels=text[:, 1:])
    return output, lambda losses: (losses.mean(), losses.detach().mean())


def train() -> list[torch.Tensor]:
    """Losses (on the last rank) and weights after three steps; nothing of megatron_ext in here."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    part, losses = model(), []
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses += get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=batch(step), model=part, **SIZES
        )
        optimizer.step()
    parallel_state.destroy_model_parallel()
    return [*losses, *part.parameters()]


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(__doc__)
    dist.init_process_group("gloo")
    stock = train()
    megatron_ext.enable(schedule="zb-h1")
    ours = train()
    equal = all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))
    print(f"rank {dist.get_rank()}: {len(ours)} losses and weights equal bit for bit: {equal}")
    dist.destroy_process_group()
    sys.exit(not equal)
