"""Megatron's GPT models on CPU tensors: their parameters and what autograd keeps; prints JSON.

    python memory_cases.py FOLDER

Of every shape in ``shapes.py``: how many parameters the model has, by its first module's name, the
bytes that autograd holds after a forward pass (distinct storages, parameters apart), and the bytes
that the weight-gradient store holds between B and W. And layouts as Megatron reads them.
"""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections import Counter
from typing import Any

from megatron_ext import cpu

cpu.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ext.integration import split_local as wgrad
from megatron_ext.integration.features import recompute
from megatron_ext.integration.hooks import Hooks
from megatron_ext.integration.versions import megatron_version
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.model import Job
from megatron_ext.runtime.sharded import Sharded
from megatron_ext.runtime.wgrad import WeightGradStore
from tests.unit.plan.shapes import (
    BASE,
    DIVIDED,
    EIGHT_BITS,
    FLAGS_ALONE,
    LAYOUTS,
    SHAPES,
    tokens,
)


def config_of(job: Job) -> TransformerConfig:
    """Megatron's configuration of a job."""
    modules = list(job.recompute_modules)
    if job.cheap_recompute:
        modules.append("layernorm")
    full = job.recompute_granularity == "full"
    options: dict[str, Any] = {
        "num_layers": job.num_layers,
        "hidden_size": job.hidden_size,
        "num_attention_heads": job.num_attention_heads,
        "num_query_groups": job.num_query_groups,
        "kv_channels": job.kv_channels,
        "ffn_hidden_size": job.ffn_hidden_size,
        "normalization": job.normalization,
        "gated_linear_unit": job.swiglu,
        "add_bias_linear": job.add_bias_linear,
        "add_qkv_bias": job.add_qkv_bias,
        "qk_layernorm": job.qk_layernorm,
        "qk_l2_norm": job.qk_l2_norm,
        "hidden_dropout": job.hidden_dropout,
        "attention_dropout": job.attention_dropout,
        "attention_softmax_in_fp32": job.attention_softmax_in_fp32,
        "bias_activation_fusion": not job.squared_relu,
        "recompute_granularity": job.recompute_granularity or ("selective" if modules else None),
        "recompute_modules": modules or None,
        "recompute_method": job.recompute_method if full else None,
        "recompute_num_layers": job.recompute_num_layers if full else None,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
    }
    if job.swiglu:
        options["activation_func"] = torch.nn.functional.silu
    if job.squared_relu:
        options["activation_func"] = squared_relu
    if job.params_dtype == "bf16":
        options.update(bf16=True, params_dtype=torch.bfloat16)
    if job.mtp_layers:
        options["mtp_num_layers"] = len(job.mtp_layers)
    if job.num_experts:
        options.update(
            num_moe_experts=job.num_experts,
            moe_router_topk=job.moe_router_topk,
            moe_ffn_hidden_size=job.moe_ffn_hidden_size,
            moe_layer_freq=[int("E" in kinds) for kinds in job.layers],
            moe_token_dispatcher_type="alltoall",
            moe_shared_expert_intermediate_size=job.moe_shared_expert_intermediate_size or None,
        )
    if not job.multi_latent_attention:
        return TransformerConfig(**options)
    del options["num_query_groups"]
    return MLATransformerConfig(
        **options,
        multi_latent_attention=True,
        rope_type="rope",
        **{name: getattr(job, name) for name in LATENT},
    )


LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


class LocalAttention(DotProductAttention):
    """Megatron's own unfused attention, which does not take the widths that MLA gives."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options = {n: v for n, v in options.items() if n not in ("k_channels", "v_channels")}
        super().__init__(*args, **options)


def model_of(job: Job) -> GPTModel:
    """The whole model on one rank."""
    config = config_of(job)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    if job.num_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=job.qk_layernorm,
            normalization=job.normalization,
            multi_latent_attention=job.multi_latent_attention,
            qk_l2_norm=job.qk_l2_norm,
        )
    if job.multi_latent_attention:
        for layer in getattr(spec, "layer_specs", [spec]):
            layer.submodules.self_attention.submodules.core_attention = LocalAttention
    more = {}
    if job.mtp_layers:
        more["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(
        config,
        spec,
        job.padded_vocab_size,
        job.max_position_embeddings,
        share_embeddings_and_output_weights=not job.untie_embeddings_and_output_weights,
        position_embedding_type=job.position_embedding_type,
        **more,
    )


def run(name: str) -> dict[str, Any]:
    """One shape."""
    job = job_of(read(tokens(name))[0])
    store = WeightGradStore()
    hooks = Hooks(megatron_version())
    hooks.apply(
        [*wgrad.hooks(store), *(recompute.Recompute().hooks() if job.cheap_recompute else ())]
    )
    MTPLossLoggingHelper.tracker = {}  # of a former model's depths
    model = model_of(job)
    counts: Counter[str] = Counter()
    for parameter_name, parameter in model.named_parameters():
        counts[parameter_name.split(".")[0]] += parameter.numel()
    found: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage, tuple(tensor.shape), str(tensor.dtype)
        return tensor

    forward = Float16Module(model.config, model) if model.config.bf16 else model
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    shape = job.micro_batch_size, job.seq_length
    numbers = torch.arange(shape[0] * shape[1]).reshape(shape) % job.padded_vocab_size
    mask = torch.ones(1, 1, job.seq_length, job.seq_length, dtype=torch.bool).triu(1)
    positions = torch.arange(job.seq_length).expand(shape).contiguous()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(numbers, positions, mask, labels=numbers)
    items: Counter[str] = Counter()
    for storage, dims, dtype in found.values():
        items[f"{dims} {dtype}".replace("torch.", "")] += storage.nbytes()
    found.clear()
    # Without these hooks, under which a weight comes back as another tensor.
    loss = forward(numbers, positions, mask, labels=numbers)
    with store.collect("1"):
        loss.float().sum().backward()
    waiting = waiting_bytes(store, own)
    store.run("1")
    hooks.revert()
    return {"parameters": counts, "kept": +items, "waiting": waiting}


def waiting_bytes(store: WeightGradStore, own: set[int]) -> int:
    """Distinct storages that tasks in the store hold, parameters apart."""
    seen: dict[int, int] = {}
    todo: list[Any] = list(vars(store).values())
    visited: set[int] = set()
    while todo:
        one = todo.pop()
        if id(one) in visited:
            continue
        visited.add(id(one))
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            if storage._cdata not in own:
                seen[storage._cdata] = storage.nbytes()
        elif isinstance(one, dict):
            todo += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set) or type(one).__name__ == "deque":
            todo += list(one)
        elif isinstance(one, Sharded):
            todo.append(one.shard)
        elif hasattr(one, "func") and hasattr(one, "args"):
            todo += [*one.args, *one.keywords.values()]
        elif getattr(one, "__closure__", None):
            todo += [cell.cell_contents for cell in one.__closure__]
        elif hasattr(one, "__dataclass_fields__"):
            todo += [getattr(one, field) for field in one.__dataclass_fields__]
        elif hasattr(one, "__slots__"):
            todo += [getattr(one, slot, None) for slot in one.__slots__]
    return sum(seen.values())


def of_stages(line: str) -> list[int]:
    """Parameters of every stage, in model order, of a model that is divided over ranks, whose
    messages no one sends: it is built on the meta device."""
    job = job_of(read(line.split())[0])
    tp, pp = job.tensor_model_parallel_size, job.pipeline_model_parallel_size
    chunks = int(line.split("--chunks ")[1])
    config = config_of(job)
    config.tensor_model_parallel_size, config.pipeline_model_parallel_size = tp, pp
    config.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
    config.num_layers_in_first_pipeline_stage = job.decoder_first_pipeline_num_layers
    config.num_layers_in_last_pipeline_stage = job.decoder_last_pipeline_num_layers
    found = {}
    for rank in range(pp):
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank * tp, world_size=pp * tp, store=FakeStore())
        parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
        for chunk in range(chunks):
            stage = chunk * pp + rank
            with torch.device("meta"):
                model = GPTModel(
                    config,
                    get_gpt_layer_local_spec(normalization=job.normalization),
                    job.padded_vocab_size,
                    job.max_position_embeddings,
                    pre_process=stage == 0,
                    post_process=stage == pp * chunks - 1,
                    share_embeddings_and_output_weights=False,
                    position_embedding_type=job.position_embedding_type,
                    vp_stage=chunk if chunks > 1 else None,
                )
            found[stage] = sum(p.numel() for p in model.parameters())
    return [found[stage] for stage in sorted(found)]


def keeps_lower_halves(recipe: str, offload: bool) -> bool:
    """True if Megatron's precision-aware optimizer has no fp32 parameters of its own."""
    config = OptimizerConfig(bf16=True, use_distributed_optimizer=True)
    config.optimizer_cpu_offload, config.fp8_recipe = offload, recipe
    config.use_precision_aware_optimizer = True
    with contextlib.suppress(RuntimeError):  # for want of Transformer Engine, once it has decided
        config.__post_init__()
    found: bool = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    return found


def layers_of(text: str) -> list[int]:
    """Layers of every stage, as Megatron reads a layout; it raises if it would refuse it."""
    stages = PipelineParallelLayerLayout.parse_str_to_list(text)
    counts = [sum(layer.name == "decoder" for layer in stage) for stage in stages]
    PipelineParallelLayerLayout(stages, len(stages)).validate_layer_layout(sum(counts), None)
    return counts


def from_megatrons_arguments(name: str) -> str:
    """What differs between the job of a command line and that of Megatron's parsed arguments."""
    from megatron.training.arguments import parse_args

    from megatron_ext.integration.features.schedule.job import job_of_args
    from megatron_ext.integration.flags import add_arguments

    more = ["--tensor-model-parallel-size", "1", "--use-distributed-optimizer"]
    sys.argv = ["pretrain_gpt.py", *tokens(name), *more]
    ours, theirs = (
        job_of(read(sys.argv[1:])[0]),
        job_of_args(parse_args(add_arguments, ignore_unknown_args=False)),
    )
    differ = [f for f in vars(ours) if f != "assumptions" and vars(ours)[f] != vars(theirs)[f]]
    return ", ".join(f"{f}: {vars(ours)[f]} and {vars(theirs)[f]}" for f in differ)


def main() -> None:
    """See the module's text."""
    folder = sys.argv[1]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    found: dict[str, Any] = {name: run(name) for name in SHAPES}
    found["layouts"] = {text: layers_of(text) for text in LAYOUTS}
    found["remainders"] = {r: [keeps_lower_halves(r, o) for o in (False, True)] for r in EIGHT_BITS}
    if importlib.util.find_spec("megatron.training") is not None:
        names = SHAPES | FLAGS_ALONE
        found["arguments"] = {name: from_megatrons_arguments(name) for name in names}
    found["stages"] = {name: of_stages(f"{BASE} {line}") for name, line in DIVIDED.items()}
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
