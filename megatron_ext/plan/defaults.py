"""A job from Megatron's arguments: with its defaults for the rest."""

from __future__ import annotations

from dataclasses import fields
from math import lcm
from typing import Any

from .._input import flag_of
from .model import Job, PlanError
from .pattern import layer_kinds
from .quantization import recipe_of


def job_with_defaults(given: dict[str, Any]) -> Job:
    """From Megatron's arguments that were given, by name; the rest gets Megatron's defaults.

    Raises:
        PlanError: numbers that do not divide each other, or flags that contradict.
    """
    assumed: list[str] = []
    h, heads = given["hidden_size"], given["num_attention_heads"]
    tp = given.get("tensor_model_parallel_size", 1)
    _positive(given)
    _known(given)
    if h % heads and not given.get("kv_channels"):
        raise PlanError(
            f"--hidden-size {h} is no multiple of --num-attention-heads {heads}; Megatron needs "
            "one, or --kv-channels"
        )
    kv = given.get("kv_channels") or h // heads
    # Megatron's default is one group.
    groups = given.get("num_query_groups") or (1 if given.get("group_query_attention") else heads)
    if given.get("num_query_groups") and not given.get("group_query_attention"):
        groups = heads
        assumed.append("--num-query-groups has no effect without --group-query-attention")
    if heads % groups:
        raise PlanError(f"--num-attention-heads {heads} is no multiple of {groups} query groups")
    ffn = given.get("ffn_hidden_size")
    if ffn is None:
        # Megatron: two thirds of 4h for SwiGLU, in multiples of 64.
        ffn = int((4 * h * 2 / 3) / 64) * 64 if given.get("swiglu") else 4 * h
    experts = given.get("num_experts") or 0
    values = {f.name: given[f.name] for f in fields(Job) if f.name in given}
    values.update(
        ffn_hidden_size=ffn,
        num_query_groups=groups,
        kv_channels=kv,
        max_position_embeddings=given.get("max_position_embeddings", given["seq_length"]),
        padded_vocab_size=_vocabulary(given, tp, assumed),
        num_experts=experts,
        moe_ffn_hidden_size=given.get("moe_ffn_hidden_size") or ffn,
        moe_shared_expert_intermediate_size=given.get("moe_shared_expert_intermediate_size") or 0,
        add_bias_linear=not given.get("disable_bias_linear"),
        flash_attention=_flash(given),
        # Megatron's scaling of queries and keys by the layer's number implies it.
        attention_softmax_in_fp32=bool(
            given.get("attention_softmax_in_fp32") or given.get("apply_query_key_layer_scaling")
        ),
        transformer_engine=given.get("transformer_impl", "transformer_engine") != "local",
        expert_tensor_parallel_size=given.get("expert_tensor_parallel_size", tp),
        cp_comm_type=_exchange(given, assumed),
        params_dtype=_dtype(given),
        layout=given.get("pipeline_model_parallel_layout"),
        cheap_recompute=bool(given.get("pp_cheap_recompute")),
        # Without a pipeline there is nothing to share it with.
        vocab_parallel=bool(given.get("pp_vocab_parallel"))
        and given.get("pipeline_model_parallel_size", 1) > 1,
        **layer_kinds(given),
        **precision(given),
        **recompute(given),
        **_gradients(given),
        **_data_parallel(given, tp, assumed),
    )
    if given.get("quick_geglu"):
        values["swiglu"] = True  # as many parameters and bytes, whatever the gated function
    if given.get("use_rotary_position_embeddings"):
        values["position_embedding_type"] = "rope"
    if given.get("moe_token_dispatcher_type") == "flex":
        assumed.append("flex dispatcher: sets as with alltoall; its own buffers are not counted")
    if values["recipe"] is not None:
        assumed.append(
            f"{values['recipe']}: quantized weights are kept row-wise and column-wise, inputs of "
            "quantized layers once; attention, embeddings and the output layer stay in 16 bits"
        )
    job = Job(**values, assumptions=tuple(assumed))
    job.check()
    return job


def _positive(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if type(value) is int and value < 1:
            raise PlanError(f"{flag_of(name)} must be a whole number >= 1, got {value}")


def _known(given: dict[str, Any]) -> None:
    dtype = given.get("output_logit_dtype")
    if dtype not in (None, "bf16", "fp32"):
        raise PlanError(f"--output-logit-dtype must be one of bf16, fp32, got {dtype}")


def _flash(given: dict[str, Any]) -> bool:
    """Left alone, Megatron's local layers do not use flash kernels, Transformer Engine's do."""
    backend = given.get("attention_backend", "auto")
    if backend == "auto":
        return given.get("transformer_impl") != "local"
    return backend not in ("unfused", "local")


def _vocabulary(given: dict[str, Any], tp: int, assumed: list[str]) -> int:
    if given.get("padded_vocab_size"):
        return int(given["padded_vocab_size"])
    vocabulary = given.get("vocab_size")
    if vocabulary is None:
        assumed.append("no --vocab-size (a tokenizer decides it): 128256 is assumed")
        vocabulary = 128256
    multiple = given.get("make_vocab_size_divisible_by", 128)
    if given.get("pp_vocab_parallel"):
        multiple = lcm(multiple, given.get("pipeline_model_parallel_size", 1))
    multiple *= tp
    return int(-(-vocabulary // multiple) * multiple)


def _exchange(given: dict[str, Any], assumed: list[str]) -> str:
    """How context-parallel ranks exchange keys and values: one way for all layers."""
    kinds = given.get("cp_comm_type") or ["p2p"]
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if len(kinds) == 1 and (kind := kinds.pop()) in ("p2p", "all_gather", "a2a"):
        return str(kind)
    if given.get("context_parallel_size", 1) > 1:
        assumed.append("--cp-comm-type of several ways, or in two levels: counted as p2p")
    return "p2p"


def _dtype(given: dict[str, Any]) -> str:
    if given.get("bf16") and given.get("fp16"):
        raise PlanError("--bf16 and --fp16 exclude each other; give one")
    return "bf16" if given.get("bf16") else "fp16" if given.get("fp16") else "fp32"


def precision(given: dict[str, Any]) -> dict[str, Any]:
    """FP8: the recipe, and whether parameters are gathered in it."""
    recipe = recipe_of(given.get)
    gathered = bool(recipe and given.get("fp8_param_gather"))
    return {"recipe": recipe, "quantized_parameters": gathered}


def _gradients(given: dict[str, Any]) -> dict[str, Any]:
    """Megatron accumulates bf16 gradients in fp32 unless flags keep or reduce them in bf16."""
    reduced = bool(given.get("grad_reduce_in_bf16"))
    narrow = given.get("main_grads_dtype", "fp32") != "fp32"
    wide = bool(given.get("accumulate_allreduce_grads_in_fp32"))
    wide = wide or (bool(given.get("bf16")) and not narrow)
    return {"grads_in_fp32": wide and not reduced, "grad_reduce_in_bf16": reduced}


def recompute(given: dict[str, Any]) -> dict[str, Any]:
    """What is recomputed."""
    granularity = given.get("recompute_granularity")
    if given.get("recompute_activations"):
        granularity = "selective"
    modules = given.get("recompute_modules")
    if given.get("moe_layer_recompute"):  # the older name of a module
        granularity = granularity or "selective"
        modules = [*(modules or ["core_attn"]), "moe"]
    if granularity == "selective" and modules is None:
        modules = ["core_attn"]
    if granularity not in (None, "selective", "full"):
        raise PlanError(f"--recompute-granularity must be full or selective, got {granularity!r}")
    if granularity == "full" and given.get("recompute_method") not in ("uniform", "block"):
        raise PlanError("--recompute-granularity full needs --recompute-method uniform or block")
    return {
        "recompute_granularity": granularity,
        # Without the granularity Megatron ignores them.
        "recompute_modules": tuple(modules or ()) if granularity == "selective" else (),
    }


def _data_parallel(given: dict[str, Any], tp: int, assumed: list[str]) -> dict[str, Any]:
    world = given.get("world_size")
    pp, cp = given.get("pipeline_model_parallel_size", 1), given.get("context_parallel_size", 1)
    if world is None:
        assumed.append(
            "no --world-size: one data-parallel rank, so optimizer states are not divided"
        )
        return {"data_parallel_size": 1}
    if world % (tp * pp * cp):
        raise PlanError(
            f"--world-size {world} is no multiple of tensor x pipeline x context parallel ranks, "
            f"{tp} x {pp} x {cp}"
        )
    experts = given.get("expert_model_parallel_size", 1)
    etp = given.get("expert_tensor_parallel_size", tp)
    experts *= etp
    if given.get("num_experts") and world // pp % experts:
        raise PlanError(
            f"--world-size {world} has {world // pp} ranks a pipeline stage, which "
            f"{experts} expert-parallel x expert-tensor-parallel ranks do not divide"
        )
    instances = given.get("num_distributed_optimizer_instances", 1)
    shared = [world // (tp * pp)]
    if given.get("num_experts"):
        shared.append(world // pp // experts)
    for ranks in shared:
        if ranks % instances:
            raise PlanError(
                f"--num-distributed-optimizer-instances {instances} does not divide the {ranks} "
                "ranks that hold the same parameters; give a divisor"
            )
    return {"data_parallel_size": world // (tp * pp * cp)}
