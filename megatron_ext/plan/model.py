"""The training job: the model and its division, from which memory and time are computed."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, fields, replace
from typing import Any

from .._input import flag_of


class PlanError(ValueError):
    """Input that cannot be planned with; the text gives the reason and the fix."""


_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class Job:
    """One training job. Names and defaults are those of Megatron's arguments.

    Sizes are in elements, ``micro_batch_size`` in samples. ``moe_layers[i]`` is true where layer i
    has experts. ``padded_vocab_size`` is what Megatron pads the vocabulary to. ``cheap_recompute``
    is ``--pp-cheap-recompute``.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    ffn_hidden_size: int
    num_query_groups: int
    kv_channels: int
    max_position_embeddings: int
    padded_vocab_size: int
    moe_layers: tuple[bool, ...]
    moe_ffn_hidden_size: int
    position_embedding_type: str = "learned_absolute"
    normalization: str = "LayerNorm"
    swiglu: bool = False
    squared_relu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    untie_embeddings_and_output_weights: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    flash_attention: bool = True
    attention_softmax_in_fp32: bool = False
    transformer_engine: bool = True
    num_experts: int = 0
    moe_router_topk: int = 2
    moe_expert_capacity_factor: float | None = None
    moe_shared_expert_intermediate_size: int = 0
    moe_shared_expert_gate: bool = False
    moe_grouped_gemm: bool = False
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    data_parallel_size: int = 1
    params_dtype: str = "fp32"
    grads_in_fp32: bool = False
    grad_reduce_in_bf16: bool = False
    use_distributed_optimizer: bool = False
    use_precision_aware_optimizer: bool = False
    main_params_dtype: str = "fp32"
    main_grads_dtype: str = "fp32"
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    optimizer: str = "adam"
    sgd_momentum: float = 0.9
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int = 1
    recompute_modules: tuple[str, ...] = ()
    distribute_saved_activations: bool = False
    cheap_recompute: bool = False
    micro_batch_size: int = 1
    global_batch_size: int | None = None
    layout: str | None = None
    assumptions: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, given: dict[str, Any]) -> Job:
        """From Megatron's arguments that were given, by name; the rest gets Megatron's defaults.

        Raises:
            PlanError: numbers that do not divide each other, or flags that contradict.
        """
        assumed: list[str] = []
        h, heads = given["hidden_size"], given["num_attention_heads"]
        layers = given["num_layers"]
        tp = given.get("tensor_model_parallel_size", 1)
        _positive(given)
        kv = given.get("kv_channels") or h // heads
        groups = given.get("num_query_groups") or heads
        if given.get("num_query_groups") and not given.get("group_query_attention"):
            groups = heads
            assumed.append("--num-query-groups has no effect without --group-query-attention")
        if heads % groups:
            raise PlanError(
                f"--num-attention-heads {heads} is no multiple of {groups} query groups"
            )
        ffn = given.get("ffn_hidden_size")
        if ffn is None:
            # Megatron: two thirds of 4h for SwiGLU, in multiples of 64.
            ffn = int((4 * h * 2 / 3) / 64) * 64 if given.get("swiglu") else 4 * h
        experts = given.get("num_experts") or 0
        values = {f.name: given[f.name] for f in fields(cls) if f.name in given}
        values.update(
            ffn_hidden_size=ffn,
            num_query_groups=groups,
            kv_channels=kv,
            max_position_embeddings=given.get("max_position_embeddings", given["seq_length"]),
            padded_vocab_size=_vocabulary(given, tp, assumed),
            num_experts=experts,
            moe_layers=_moe_layers(given.get("moe_layer_freq"), layers, experts),
            moe_ffn_hidden_size=given.get("moe_ffn_hidden_size") or ffn,
            moe_shared_expert_intermediate_size=given.get("moe_shared_expert_intermediate_size")
            or 0,
            add_bias_linear=not given.get("disable_bias_linear"),
            flash_attention=_flash(given),
            # Megatron's scaling of queries and keys by the layer's number implies it.
            attention_softmax_in_fp32=bool(
                given.get("attention_softmax_in_fp32") or given.get("apply_query_key_layer_scaling")
            ),
            transformer_engine=given.get("transformer_impl", "transformer_engine") != "local",
            expert_tensor_parallel_size=given.get("expert_tensor_parallel_size", tp),
            params_dtype=_dtype(given),
            layout=given.get("pipeline_model_parallel_layout"),
            cheap_recompute=bool(given.get("pp_cheap_recompute")),
            **_recompute(given),
            **_gradients(given),
            **_data_parallel(given, tp, assumed),
        )
        if given.get("use_rotary_position_embeddings"):
            values["position_embedding_type"] = "rope"
        job = cls(**values, assumptions=tuple(assumed))
        job._check()
        return job

    def _check(self) -> None:
        tp, pairs = self.tensor_model_parallel_size, []
        pairs += [("--num-attention-heads", self.num_attention_heads, tp)]
        pairs += [("the query groups", max(self.num_query_groups, tp), tp)]
        pairs += [("--seq-length", self.seq_length, self.context_parallel_size)]
        pairs += [("--ffn-hidden-size", self.ffn_hidden_size, tp)]
        if self.num_experts:
            pairs += [("--num-experts", self.num_experts, self.expert_model_parallel_size)]
        for what, value, divisor in pairs:
            if value % divisor:
                raise PlanError(f"{what} {value} cannot be divided by {divisor} ranks")
        if self.use_precision_aware_optimizer and not self.use_distributed_optimizer:
            raise PlanError(
                "--use-precision-aware-optimizer needs --use-distributed-optimizer; give both"
            )
        for name in ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(self, name) not in _BYTES:
                raise PlanError(f"{flag_of(name)} must be one of {', '.join(_BYTES)}")
        if self.cheap_recompute and self.recompute_granularity == "full":
            raise PlanError(
                "--pp-cheap-recompute has nothing to do under --recompute-granularity full; drop "
                "one of both"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of a parameter and of an activation."""
        return _BYTES[self.params_dtype]

    @property
    def tokens(self) -> int:
        """Of one microbatch, on one context-parallel rank."""
        return self.micro_batch_size * self.seq_length // self.context_parallel_size

    @property
    def sharded_tokens(self) -> int:
        """Tokens where sequence parallelism divides them over the tensor-parallel ranks."""
        return self.tokens // (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    @property
    def query_width(self) -> int:
        """Elements per token of all heads together, before tensor parallelism."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_width(self) -> int:
        """Elements per token of all keys, or of all values, before tensor parallelism."""
        # With more ranks than groups each rank keeps a group of its own.
        return max(self.num_query_groups, self.tensor_model_parallel_size) * self.kv_channels

    @property
    def gates(self) -> int:
        """2 for gated activation functions, else 1."""
        return 2 if self.swiglu else 1

    @property
    def expert_data_parallel_size(self) -> int:
        """Ranks that hold the same experts; context-parallel ranks count."""
        ranks = self.data_parallel_size * self.context_parallel_size
        ranks *= self.tensor_model_parallel_size
        experts = self.expert_model_parallel_size * self.expert_tensor_parallel_size
        return max(1, ranks // experts)

    def microbatches(self) -> int:
        """Of one iteration on one data-parallel rank.

        Raises:
            PlanError: no global batch was given, or it cannot be divided.
        """
        if self.global_batch_size is None:
            raise PlanError("plan needs --global-batch-size (or --microbatches) too")
        share = self.micro_batch_size * self.data_parallel_size
        if self.global_batch_size % share:
            raise PlanError(
                f"--global-batch-size {self.global_batch_size} is no multiple of "
                f"--micro-batch-size {self.micro_batch_size} times {self.data_parallel_size} "
                "data-parallel ranks"
            )
        return self.global_batch_size // share

    def with_(self, **changes: Any) -> Job:
        """The same job with other values."""
        return replace(self, **changes)


def _positive(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if type(value) is int and value < 1:
            raise PlanError(f"{flag_of(name)} must be a whole number >= 1, got {value}")


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
    multiple = given.get("make_vocab_size_divisible_by", 128) * tp
    return int(-(-vocabulary // multiple) * multiple)


def _moe_layers(text: str | None, layers: int, experts: int) -> tuple[bool, ...]:
    """``--moe-layer-freq``: N, or a Python list expression such as ``([0]*1+[1]*3)``."""
    if not experts:
        return (False,) * layers
    text = "1" if text is None else text
    try:
        pattern = _pattern(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        raise PlanError(
            f"--moe-layer-freq must be N or a list like ([0]*1+[1]*3), got {text!r}"
        ) from None
    if isinstance(pattern, int):
        return tuple(i % pattern == 0 for i in range(layers))
    if len(pattern) != layers:
        raise PlanError(f"--moe-layer-freq lists {len(pattern)} layers, but there are {layers}")
    return tuple(bool(x) for x in pattern)


def _pattern(node: ast.expr) -> Any:
    """A number, a list, and sums and multiples of lists; nothing else is evaluated."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value >= 0:
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_pattern(x) for x in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _pattern(node.left), _pattern(node.right)
        return left + right if isinstance(node.op, ast.Add) else left * right
    raise ValueError(ast.dump(node))


def _dtype(given: dict[str, Any]) -> str:
    if given.get("bf16") and given.get("fp16"):
        raise PlanError("--bf16 and --fp16 exclude each other; give one")
    return "bf16" if given.get("bf16") else "fp16" if given.get("fp16") else "fp32"


def _gradients(given: dict[str, Any]) -> dict[str, Any]:
    """Megatron accumulates bf16 gradients in fp32 unless flags keep or reduce them in bf16."""
    reduced = bool(given.get("grad_reduce_in_bf16"))
    narrow = given.get("main_grads_dtype", "fp32") != "fp32"
    wide = bool(given.get("accumulate_allreduce_grads_in_fp32"))
    wide = wide or (bool(given.get("bf16")) and not narrow)
    return {"grads_in_fp32": wide and not reduced, "grad_reduce_in_bf16": reduced}


def _recompute(given: dict[str, Any]) -> dict[str, Any]:
    granularity = given.get("recompute_granularity")
    if given.get("recompute_activations"):
        granularity = "selective"
    modules = given.get("recompute_modules")
    if granularity == "selective" and modules is None:
        modules = ["core_attn"]
    if granularity not in (None, "selective", "full"):
        raise PlanError(f"--recompute-granularity must be full or selective, got {granularity!r}")
    if granularity == "full" and given.get("recompute_method") not in ("uniform", "block"):
        raise PlanError("--recompute-granularity full needs --recompute-method uniform or block")
    return {
        "recompute_granularity": granularity,
        "recompute_modules": tuple(modules or ()),
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
    return {"data_parallel_size": world // (tp * pp * cp)}
