"""Saved settings as Megatron's arguments: a checkpoint's, and a Megatron-Bridge recipe's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..._conflict import argument
from ..._input import attribute, parse_json, read_text, reason, shown
from ..divisions import SIZES, WEIGHT_SHARDS
from ..flags import FLAGS, not_modelled
from ..launches import graphed
from ..model import PlanError

Given = dict[str, Any]
# A file describes a model and a batch; how both are divided is the flags' or the search's to say.
_LEFT_OUT = {
    *(
        *SIZES,
        *WEIGHT_SHARDS,
        "cp_comm_type",
        "world_size",
        "sequence_parallel",
        "padded_vocab_size",
    ),
    *("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers"),
    *("decoder_last_pipeline_num_layers", "num_distributed_optimizer_instances"),
}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}
_BACKENDS = ("flash", "fused", "unfused", "local", "auto")  # AttnBackend, from 1


def of_arguments(values: Mapping[str, Any], source: str) -> Given:
    """Megatron's flags, by argument name, from its parsed arguments or a file of them.

    Args:
        values: as Megatron's namespace has them, before or after its validation.

    Raises:
        PlanError: a value of another kind, or a model that plan does not express.
    """
    why = not_modelled(values.get)
    if why is not None:
        raise PlanError(f"{source}: {why}, which plan does not model")
    given: Given = {}
    for flag, kind in FLAGS.items():
        name = attribute(flag)
        value = _plain(values.get(argument(flag)))
        absent = value is None or value is False or (kind is int and value == 0)
        if not absent and name not in _LEFT_OUT:
            given[name] = _typed(value, kind, name, source)
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        if name in given:
            given[name] = given[name].replace("|", "")
    modules = graphed(values)
    if modules:
        given["graphed"] = modules
    if values.get("padded_vocab_size"):
        given.setdefault("vocab_size", values["padded_vocab_size"])
    given["disable_bias_linear"] = values.get("add_bias_linear") is False
    if values.get("gradient_accumulation_fusion") is False:
        given["no_gradient_accumulation_fusion"] = True
    if not given.get("group_query_attention"):
        given.pop("num_query_groups", None)
    return given


def _plain(value: Any) -> Any:
    """The word of a dtype or an attention backend, as pickles and Bridge's JSON have them."""
    numbers: Any = ()
    if isinstance(value, dict) and isinstance(value.get("_target_"), str):
        numbers = value.get("_args_")
        value = value["_target_"].rsplit(".", 1)[-1]
    elif isinstance(value, str) and value.startswith("AttnBackend("):
        numbers = [int(n) for n in re.findall(r"\d", value)]
        value = "AttnBackend"
    if value == "AttnBackend":
        number = numbers[0] if isinstance(numbers, list) and numbers else 5
        return _BACKENDS[number - 1] if number in range(1, 6) else "auto"
    return _DTYPES.get(value.removeprefix("torch."), value) if isinstance(value, str) else value


def _typed(value: Any, kind: Any, name: str, source: str) -> Any:
    if kind is str:
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    if kind is list:
        good = isinstance(value, list | tuple)
    elif kind is bool:
        good = value is True
    else:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        good = good and (kind is float or value == int(value))
    if not good:
        raise PlanError(f"{source}: {name} is {shown(value)}, which is no {kind.__name__}")
    return list(value) if kind is list else kind(value)


# Megatron-Bridge's names (and megatron-core's TransformerConfig's) that are not the flags'.
_RENAMED = {
    "num_moe_experts": "num_experts",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "layernorm_epsilon": "norm_epsilon",
}
_PARTS = ("model", "train", "dataset", "optimizer", "ddp", "mixed_precision", "dist")


def read_recipe(path: str) -> tuple[Given, list[str]]:
    """The model and batch of a Megatron-Bridge recipe.

    Args:
        path: JSON of its ``ConfigContainer.to_dict()``, one object for each part.

    Raises:
        PlanError: it cannot be read, or describes what plan does not express.
    """
    try:
        data = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot read --bridge-config {path}: {reason(error)}") from None
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(model, dict):
        raise PlanError(
            f'--bridge-config {path} must be the JSON of ConfigContainer.to_dict(), with "model"'
        )
    source = f"--bridge-config {path}"
    for refused in (
        "heterogeneous_layers_config_path",
        "vision_config",
        "enable_hyper_connections",
        "enable_mhc_connections",
    ):
        if model.get(refused):
            raise PlanError(f"{source}: plan does not express a model with {refused}")
    return of_arguments(of_recipe(data, source), source), [
        f"the model and batch: {path}, a Megatron-Bridge recipe"
    ]


def of_recipe(data: Mapping[str, Any], source: str) -> Given:
    """A recipe's fields under the names of Megatron's arguments; of several the model's.

    Args:
        data: its parts, ``model``, ``train`` and so on, or the fields themselves.
        source: names it in errors.

    Raises:
        PlanError: no flag says what a field does.
    """
    values: Given = {}
    parts = data if any(isinstance(data.get(part), dict) for part in _PARTS) else {"model": data}
    for name, value in _values(parts):
        values.setdefault(_RENAMED.get(name, name), value)
    return _flags(values, source)


def _values(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of all parts; the model's first."""
    for part in _PARTS:
        fields = data.get(part)
        if isinstance(fields, dict):
            yield from ((n, v) for n, v in fields.items() if v is not None)
        elif part == "mixed_precision" and isinstance(fields, str):
            yield ("bf16" if fields.startswith("bf16") else "fp16"), True


def _flags(values: Given, source: str) -> Given:
    """Fields of Bridge's configuration under the names of Megatron's arguments."""
    out = dict(values)
    name = str(_plain(values.get("activation_func")) or "").rsplit(".", 1)[-1]
    if name not in ("", "silu", "gelu", "fast_gelu", "quick_gelu", "squared_relu"):
        raise PlanError(f"{source}: no flag says the activation function {shown(name)}")
    # What is gated keeps as many bytes as SwiGLU, whatever the function.
    out["swiglu"] = bool(values.get("gated_linear_unit"))
    out["squared_relu"] = name == "squared_relu"
    out["group_query_attention"] = bool(values.get("num_query_groups"))
    shared = values.get("share_embeddings_and_output_weights", True)
    out["untie_embeddings_and_output_weights"] = not shared
    if isinstance(values.get("window_size"), list):
        out["window_size"] = tuple(values["window_size"])
    if values.get("sequence_length"):
        out["seq_length"] = values["sequence_length"]
    if values.get("grad_reduce_in_fp32") is False:
        out["grad_reduce_in_bf16"] = True
    dtype = _plain(values.get("params_dtype"))
    if dtype in ("bf16", "fp16"):
        out[dtype] = True
    return out
