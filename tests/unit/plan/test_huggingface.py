"""Models from a Hugging Face config."""

from __future__ import annotations

import json

import pytest

from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.huggingface import read_config
from megatron_ext.plan.layout import Stage
from megatron_ext.plan.model import PlanError
from megatron_ext.plan.parameters import stage_parameters
from tests.unit.plan.test_architectures import MODELS

# The fields that plan reads, as the models' own files have them.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 8192,
    "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
    "num_key_value_heads": 8, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 128256, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
QWEN2 = {
    **LLAMA, "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "num_hidden_layers": 28,
    "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
    "vocab_size": 152064, "use_sliding_window": False,
}  # fmt: skip
QWEN3_MOE = {
    **LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "head_dim": 128,
    "num_hidden_layers": 48, "intermediate_size": 6144, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "architectures": ["MixtralForCausalLM"], "hidden_size": 4096,
    "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
    "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 128,
    "num_key_value_heads": 128, "num_hidden_layers": 61, "first_k_dense_replace": 3,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_nextn_predict_layers": 1, "vocab_size": 129280, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"}, "tie_word_embeddings": False,
}  # fmt: skip
# Billions of parameters by the model cards.
CONFIGS = {
    "Llama-3-70B": (LLAMA, 70.6), "Qwen2.5-7B": (QWEN2, 7.62), "Qwen3-30B-A3B": (QWEN3_MOE, 30.5),
    "Mixtral-8x7B": (MIXTRAL, 46.7), "DeepSeek-V3": (DEEPSEEK, 671.0),
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    def write(data):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(data))
        return str(path)

    return write


def described(given):
    return job_of({k: v for k, v in given.items() if v is not None} | {"seq_length": 4096})


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_of_published_models(config, name):
    data, billions = CONFIGS[name]
    job = described(read_config(config(data))[0])
    stage = Stage(range(job.num_layers), first=True, last=True)
    total = stage_parameters(job, stage).total
    assert total / 1e9 == pytest.approx(billions, rel=0.003)
    if name in MODELS and name != "DeepSeek-V3":
        line = f"{MODELS[name]} --seq-length 4096"
        job = job.with_(moe_grouped_gemm=True, moe_token_dispatcher_type="allgather")
        assert job == job_of(read(line.split())[0]).with_(ffn_hidden_size=job.ffn_hidden_size)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["FancyForCausalLM"]}, "architecture 'FancyForCausalLM'; it knows"),
        ({"architectures": [["x"]]}, "does not express the architecture"),
        ({"architectures": None, "model_type": None}, "architecture None"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": "8192"}, "hidden_size must be a whole number"),
        ({"hidden_size": 1e40}, "hidden_size must be a whole number"),
        ({"hidden_act": "relu"}, "hidden_act silu"),
        ({"tie_word_embeddings": "no"}, "true or false"),
    ],
)
def test_configs_that_are_refused(config, change, words):
    with pytest.raises(PlanError, match=words) as error:
        read_config(config(LLAMA | change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["[]", "{", "{'a': 1}", "NaN", "\x00"])
def test_files_that_are_none(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(PlanError):
        read_config(str(path))
    with pytest.raises(PlanError, match="cannot read"):
        read_config(str(tmp_path / "missing"))
