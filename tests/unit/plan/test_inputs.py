"""Models from a Hugging Face config, a Megatron-Bridge recipe and a checkpoint."""

from __future__ import annotations

import json

import pytest

from megatron_ext.commands.plan_input import read_checkpoint
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.inputs.arguments import of_arguments, read_recipe
from megatron_ext.plan.inputs.huggingface import read_config
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
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 36,
    "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
    "vocab_size": 201088, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA = {
    "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu", "hidden_size": 3072,
    "intermediate_size": 24576, "num_attention_heads": 16, "num_key_value_heads": 16,
    "head_dim": 256, "num_hidden_layers": 28, "vocab_size": 256000, "torch_dtype": "bfloat16",
}  # fmt: skip
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"], "hidden_size": 4096, "intermediate_size": 21504,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 8,
    "attention_head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
    "ssm_state_size": 128, "vocab_size": 131072, "tie_word_embeddings": False,
}  # fmt: skip

# Billions of parameters by the model cards.
CONFIGS = {
    "Llama-3-70B": (LLAMA, 70.6), "Qwen2.5-7B": (QWEN2, 7.62), "Qwen3-30B-A3B": (QWEN3_MOE, 30.5),
    "Mixtral-8x7B": (MIXTRAL, 46.7), "DeepSeek-V3": (DEEPSEEK, 671.0),
    "gpt-oss-120b": (GPT_OSS, 116.8), "Gemma-7B": (GEMMA, 8.54), "Nemotron-H-8B": (NEMOTRON, 8.1),
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
        ({"architectures": ["Gemma3ForCausalLM"]}, "norms behind attention"),
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
    for reader in (read_config, read_recipe):
        with pytest.raises(PlanError):
            reader(str(path))
    with pytest.raises(PlanError, match="cannot read"):
        read_config(str(tmp_path / "missing"))


# What ConfigContainer.to_dict() of a Megatron-Bridge recipe has, of Qwen3 30B-A3B.
RECIPE = {
    "model": {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        "num_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_query_groups": 4,
        "kv_channels": 128, "ffn_hidden_size": 6144, "num_moe_experts": 128,
        "moe_ffn_hidden_size": 768, "moe_router_topk": 8, "moe_grouped_gemm": True,
        "moe_layer_freq": 1, "qk_layernorm": True, "gated_linear_unit": True,
        "add_bias_linear": False, "normalization": "RMSNorm", "position_embedding_type": "rope",
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "attention_backend": {"_target_": "megatron.core.enums.AttnBackend", "_args_": [1]},
        "share_embeddings_and_output_weights": False, "hidden_dropout": 0.0, "vocab_size": 151936,
        "attention_dropout": 0.0, "seq_length": 4096, "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 1, "params_dtype": {"_target_": "torch.bfloat16"},
    },
    "train": {"micro_batch_size": 1, "global_batch_size": 512},
    "ddp": {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    "mixed_precision": "bf16_mixed",
}  # fmt: skip


def test_a_recipe_is_the_model(config):
    given = read_recipe(config(RECIPE))[0]
    line = f"{MODELS['Qwen3-30B-A3B']} --seq-length 4096 --use-distributed-optimizer"
    job = job_of(read([*line.split(), "--global-batch-size", "512"])[0])
    assert described(given) == job
    assert given["overlap_grad_reduce"] and "tensor_model_parallel_size" not in given


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation_func": "torch.nn.functional.mish"}, "activation function 'mish'"),
        ({"heterogeneous_layers_config_path": "x"}, "heterogeneous_layers_config_path"),
        ({"num_layers": "many"}, "num_layers is 'many', which is no int"),
    ],
)
def test_recipes_that_are_refused(config, change, words):
    with pytest.raises(PlanError, match=words):
        read_recipe(config({**RECIPE, "model": RECIPE["model"] | change}))


def test_saved_arguments_are_the_flags():
    line = (
        "--num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --bf16 --swiglu "
        "--vocab-size 512 --disable-bias-linear --attention-backend unfused --main-grads-dtype bf16"
    )
    saved = {**read(line.split())[0], "add_bias_linear": False, "padded_vocab_size": 512}
    saved |= {"attention_backend": "AttnBackend(3,)", "main_grads_dtype": "bfloat16"}
    saved |= {"tensor_model_parallel_size": 2, "world_size": 8, "mtp_num_layers": None}
    saved |= {"num_distributed_optimizer_instances": 2}
    saved |= {"pipeline_model_parallel_layout": "PipelineParallelLayerLayout(...)"}
    given = of_arguments(saved, "--checkpoint x")
    assert job_of(given) == job_of(read(line.split())[0])
    with pytest.raises(PlanError, match="does not model"):
        of_arguments({**saved, "use_megatron_fsdp": True}, "--checkpoint x")


def test_folders_that_are_no_checkpoint(tmp_path):
    for path, words in ((tmp_path / "x", "no folder"), (tmp_path, "no iter_")):
        with pytest.raises(PlanError, match=words):
            read_checkpoint(str(path))


def test_a_file_does_not_say_how_weights_and_sequences_are_divided():
    """Validation sets shards to the number of tensor-parallel ranks, which plan may change."""
    saved = {"tensor_parallel_num_weight_shards": 2, "cp_comm_type": ["p2p"], "hidden_size": 64}
    saved["expert_tensor_parallel_num_weight_shards"] = 2
    found = of_arguments(saved, "a checkpoint")
    assert found.pop("hidden_size") == 64 and not any(found.values())
