"""The planner's numbers of kernels that the host launches are those of Megatron's layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from megatron_ext.plan import launches
from tests.support import ROOT
from tests.support.waiting import PATIENCE

COUNT = """
import json
from megatron_ext import cpu
cpu.install()
import torch, torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from tests.ranks.moe.test_launches import Operations

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)


def layer(latent, experts):
    options = dict(
        num_layers=1, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0,
        bias_activation_fusion=True, bias_dropout_fusion=True, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, num_moe_experts=experts, moe_ffn_hidden_size=64,
        moe_router_topk=experts, moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-3)
    if latent:
        options |= dict(
            q_lora_rank=32, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16,
            multi_latent_attention=True, rope_type="rope", qk_layernorm=True)
    config = (MLATransformerConfig if latent else TransformerConfig)(**options)
    spec = get_gpt_layer_local_spec(
        num_experts=experts, multi_latent_attention=latent, normalization="RMSNorm",
        qk_layernorm=latent)
    return build_module(spec, config=config, layer_number=1)


def count(call, x):
    with Operations() as forward:
        out = call(x)
    grad = torch.randn_like(out)
    with Operations() as backward:
        out.backward(grad)
    return [len(forward.names), len(backward.names)]


x = torch.randn(32, 1, 64, requires_grad=True)
mask = torch.triu(torch.ones(1, 1, 32, 32, dtype=torch.bool), 1)
few, many, latent = layer(False, 4), layer(False, 8), layer(True, 4)
attention = lambda one: lambda x: one.self_attention(one.input_layernorm(x), mask)[0]
print("RESULT", json.dumps({
    "attention": count(attention(few), x),
    "latent": count(attention(latent), x),
    "router": count(lambda x: few.mlp.router(x)[0], x),
    "few": count(lambda x: few(x, attention_mask=mask)[0], x),
    "many": count(lambda x: many(x, attention_mask=mask)[0], x),
}))
"""


@pytest.mark.matrix
def test_launches_are_those_of_megatrons_layers() -> None:
    """Within a tenth and two: a version more or less changes some."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", COUNT], env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(one for one in done.stdout.splitlines() if one.startswith("RESULT "))
    found = json.loads(line.removeprefix("RESULT "))
    for way in (0, 1):
        each = (found["many"][way] - found["few"][way]) / 4
        rest = found["few"][way] - 4 * each - found["attention"][way] - found["router"][way]
        for counted, planned in (
            (found["attention"][way], launches.ATTENTION[way]),
            (found["latent"][way], launches.LATENT[way]),
            (found["router"][way], launches.ROUTER[way]),
            (each, launches.ONE_BY_ONE[way]),
            (rest, launches.DISPATCH[way]),
        ):
            assert abs(counted - planned) <= 2 + planned / 10, (way, found)
