"""A Hugging Face ``config.json`` as Megatron's arguments.

The fields are those of Megatron-Bridge's conversion (067f987d, ``models/conversion`` and each
model's bridge). What the planner's layers cannot express is refused.
"""

from __future__ import annotations

from typing import Any

from .._input import parse_json, read_text, reason, shown, whole
from .model import PlanError

Given = dict[str, Any]

# Of every model: Hugging Face's name, Megatron's.
_FIELDS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
_MIXTURE = {
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_experts_per_tok": "moe_router_topk",
}
_GROUPED: Given = {"moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}
_LATENT = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
_MOST = 1 << 40  # of any number


class _Config:
    """The file's fields, each checked where it is read."""

    def __init__(self, path: str, data: dict[str, Any]) -> None:
        self.path, self.data = path, data

    def number(self, name: str) -> int:
        """A whole number that must be there."""
        if self.data.get(name) is None:
            raise PlanError(f"--hf-config {self.path} has no {name}, which its architecture needs")
        try:
            return whole(self.data[name], name, 1, _MOST)
        except ValueError as error:
            raise PlanError(f"--hf-config {self.path}: {error}") from None

    def maybe(self, name: str) -> int:
        """A whole number; 0 if it is not there."""
        value = self.data.get(name)
        return 0 if value is None or value == 0 else self.number(name)

    def switch(self, name: str) -> bool:
        """A truth value; false where there is none."""
        value = self.data.get(name)
        if not isinstance(value, bool | None):
            raise PlanError(
                f"--hf-config {self.path}: {name} must be true or false, got {shown(value)}"
            )
        return bool(value)

    def take(self, names: dict[str, str]) -> Given:
        """Numbers under Megatron's names."""
        return {mine: self.number(theirs) for theirs, mine in names.items()}


def read_config(path: str) -> tuple[Given, list[str]]:
    """Megatron's arguments of the model, and what was assumed.

    Args:
        path: of ``config.json``.

    Raises:
        PlanError: it cannot be read, lacks a field, or is of an architecture that plan does not
            express.
    """
    try:
        data = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot read --hf-config {path}: {reason(error)}") from None
    if not isinstance(data, dict):
        raise PlanError(f"--hf-config {path} must hold an object, got {shown(data)}")
    names = data.get("architectures")
    name = names[0] if isinstance(names, list) and names else data.get("model_type")
    reader = _READERS.get(name) if isinstance(name, str) else None
    if reader is None:
        raise PlanError(
            f"--hf-config {path}: plan does not express the architecture {shown(name)}; it knows "
            f"{', '.join(sorted(_READERS))}"
        )
    config = _Config(path, data)
    given = _common(config) | reader(config)
    return given, _notes(config, given)


def _common(config: _Config) -> Given:
    given: Given = config.take(_FIELDS)
    heads = given["num_attention_heads"]
    groups = config.maybe("num_key_value_heads") or heads
    if groups != heads:
        given |= {"group_query_attention": True, "num_query_groups": groups}
    if config.maybe("head_dim"):
        given["kv_channels"] = config.number("head_dim")
    if not config.switch("tie_word_embeddings"):
        given["untie_embeddings_and_output_weights"] = True
    dtype = config.data.get("torch_dtype") or config.data.get("dtype") or "bfloat16"
    if dtype in ("bfloat16", "float16"):
        given["bf16" if dtype == "bfloat16" else "fp16"] = True
    return given | {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "disable_bias_linear": True,
        "swiglu": True,
    }


def _llama(config: _Config) -> Given:
    _only_silu(config)
    if config.switch("mlp_bias"):
        raise PlanError(f"--hf-config {config.path}: mlp_bias without Megatron's other biases")
    given: Given = {"ffn_hidden_size": config.number("intermediate_size")}
    if config.switch("attention_bias"):
        given["add_qkv_bias"] = True
    return given


def _windowed(config: _Config) -> Given:
    """Mistral's sliding window, of all layers."""
    given = _llama(config)
    window = config.maybe("sliding_window")
    return given | ({"window_size": f"{window - 1},0"} if window else {})


def _qwen2(config: _Config) -> Given:
    if config.switch("use_sliding_window"):
        raise PlanError(f"--hf-config {config.path}: use_sliding_window of some layers only")
    return _llama(config) | {"add_qkv_bias": True}


def _qwen3(config: _Config) -> Given:
    return _llama(config) | {"qk_layernorm": True}


def _experts(config: _Config, count: str) -> Given:
    given = config.take(_MIXTURE)
    return given | {"num_experts": config.number(count)} | _GROUPED


def _qwen2_moe(config: _Config) -> Given:
    shared = config.number("shared_expert_intermediate_size")
    given = _qwen_experts(config) | {"add_qkv_bias": True}
    return given | {"moe_shared_expert_intermediate_size": shared, "moe_shared_expert_gate": True}


def _qwen3_moe(config: _Config) -> Given:
    return _qwen_experts(config) | {"qk_layernorm": True}


def _qwen_experts(config: _Config) -> Given:
    dense = config.data.get("mlp_only_layers") or []
    layers, step = config.number("num_hidden_layers"), config.maybe("decoder_sparse_step") or 1
    if not isinstance(dense, list):
        raise PlanError(f"--hf-config {config.path}: mlp_only_layers must be a list")
    kinds = [int((n + 1) % step == 0 and n not in dense) for n in range(layers)]
    given = _llama(config) | _experts(config, "num_experts")
    return given if all(kinds) else given | {"moe_layer_freq": str(kinds)}


def _mixtral(config: _Config) -> Given:
    ffn = config.number("intermediate_size")
    given: Given = {
        "moe_ffn_hidden_size": ffn,
        "moe_router_topk": config.number("num_experts_per_tok"),
    }
    given |= {"num_experts": config.number("num_local_experts")} | _GROUPED
    return _windowed(config) | given


def _deepseek(config: _Config) -> Given:
    """Multi-latent attention, dense first layers, shared experts, prediction depths."""
    _only_silu(config)
    given: Given = config.take(_LATENT)
    rank = config.maybe("q_lora_rank")
    given |= {"q_lora_rank": rank} if rank else {}
    given |= {"multi_latent_attention": True, "qk_layernorm": True}
    given["ffn_hidden_size"] = config.number("intermediate_size")
    for name in ("group_query_attention", "num_query_groups", "kv_channels"):
        given[name] = None
    depths = config.maybe("num_nextn_predict_layers")
    given |= {"mtp_num_layers": depths} if depths else {}
    if not config.maybe("n_routed_experts"):
        return given
    given |= _experts(config, "n_routed_experts")
    shared = config.maybe("n_shared_experts") * given["moe_ffn_hidden_size"]
    given |= {"moe_shared_expert_intermediate_size": shared} if shared else {}
    dense, layers = config.maybe("first_k_dense_replace"), config.number("num_hidden_layers")
    return given | {"moe_layer_freq": f"([0]*{dense}+[1]*{max(0, layers - dense)})"}


def _only_silu(config: _Config) -> None:
    activation = config.data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise PlanError(
            f"--hf-config {config.path}: plan expects hidden_act silu of this architecture, got "
            f"{shown(activation)}"
        )


def _notes(config: _Config, given: Given) -> list[str]:
    notes = [f"the model: {config.path}, as Megatron-Bridge converts it"]
    if config.data.get("quantization_config"):
        notes.append("quantization_config is of the stored weights; training is in 16 bits")
    if given.get("seq_length") is None:
        notes.append("--seq-length is the training's, not the config's max_position_embeddings")
    return notes


_READERS = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _windowed,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
}
