"""Runs one small GPT under stock schedules and under ours, on four gloo ranks.

The parameters are functions of their global names, so every partition starts from the same weights.
A result is {"losses": [bytes], "gradients": {global name: bytes}, "traces": {rank: text}, ...}.
"""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import megatron_ext
from megatron_ext import cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_ext.integration.feature import Run  # noqa: E402
from megatron_ext.integration.features.schedule.choose import ScheduleRequest  # noqa: E402
from megatron_ext.integration.install import Installation  # noqa: E402
from megatron_ext.schedule import AUTO, save  # noqa: E402
from tests.support.stand_ins import megatron_args  # noqa: E402

WORLD, LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH, VOCAB = 4, 8, 32, 4, 16, 2, 64


def initialize(pp: int, chunks: int, **parallel: Any) -> None:
    """Megatron's groups and seeds."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        **parallel,
    )
    model_parallel_cuda_manual_seed(1)


def config_of(case: dict[str, Any]) -> TransformerConfig:
    """Megatron's configuration of the model in ``case``."""
    chunks = case.get("chunks", 1)
    bf16 = case.get("bf16", False)
    more = {}
    if case.get("recompute"):
        more = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=case.get("hidden", HIDDEN),
        num_attention_heads=HEADS,
        pipeline_model_parallel_size=case["pp"],
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        bf16=bf16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        deallocate_pipeline_outputs=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        use_cpu_initialization=True,
        batch_p2p_comm=False,
        overlap_p2p_comm=chunks > 1,
        microbatch_group_size_per_vp_stage=case["pp"],
        variable_seq_lengths=case.get("lengths", False),
        moe_token_dispatcher_type="alltoall",  # the default refuses sequences of varying length
        **{"gradient_accumulation_fusion": False, **more, **case.get("config", {})},
    )


def global_names(chunk: GPTModel) -> dict[str, torch.nn.Parameter]:
    """Parameters of one chunk by names that do not depend on the partition."""
    numbers = {
        f"decoder.layers.{i}.": layer.layer_number for i, layer in enumerate(chunk.decoder.layers)
    }
    named = {}
    for name, parameter in chunk.named_parameters():
        for local, number in numbers.items():
            if name.startswith(local):
                name = f"layer{number}." + name[len(local) :]
        named[name] = parameter
    return named


def _mtp_spec(config: TransformerConfig, spec: Any, chunk: int) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    return get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=chunk)


def bare_chunks(case: dict[str, Any], config: TransformerConfig) -> list[GPTModel]:
    """This rank's chunks, with weights that depend on their names only."""
    rank, chunks = parallel_state.get_pipeline_model_parallel_rank(), case.get("chunks", 1)
    bare, spec = [], get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    for chunk in range(chunks):
        layers = {"transformer_layer_spec": spec}
        if config.mtp_num_layers:
            layers["mtp_block_spec"] = _mtp_spec(config, spec, chunk)
        model = GPTModel(
            config=config,
            **layers,
            vocab_size=VOCAB,
            max_sequence_length=SEQUENCE,
            pre_process=rank == 0 and chunk == 0,
            post_process=rank == case["pp"] - 1 and chunk == chunks - 1,
            share_embeddings_and_output_weights=case.get("tied", False),
            vp_stage=chunk if chunks > 1 else None,
        )
        for name, parameter in global_names(model).items():
            key = (
                "embedding.word_embeddings.weight"
                if case.get("tied") and name == "output_layer.weight"
                else name
            )
            seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.data.copy_(values / 10 + (1.0 if "layernorm.weight" in name else 0.0))
        bare.append(model)
    return bare


def build(case: dict[str, Any], config: TransformerConfig) -> tuple[list[Any], list[GPTModel]]:
    """This rank's chunks, wrapped as Megatron's training wraps them, and bare."""
    bare = bare_chunks(case, config)
    inner = [Float16Module(config, model) if config.bf16 else model for model in bare]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=case.get("overlap", False), bucket_size=4000
    )
    wrapped = [DistributedDataParallel(config, ddp, model) for model in inner]
    if case.get("overlap"):
        config.no_sync_func = [model.no_sync for model in wrapped]
        if len(wrapped) == 1:
            config.no_sync_func = config.no_sync_func[0]
    config.finalize_model_grads_func = None if case.get("finalizes") else finalize_model_grads
    return wrapped, bare


def batches(m: int, lengths: bool) -> Any:
    """Tokens and labels (BATCH, SEQUENCE) of every microbatch of this data-parallel rank.

    With ``lengths``, each microbatch has another sequence length.
    """
    for microbatch in range(m):
        seed = 1000 * parallel_state.get_data_parallel_rank() + microbatch
        length = SEQUENCE - 2 * (microbatch % 4) if lengths else SEQUENCE
        tokens = torch.randint(
            VOCAB, (BATCH, length + 1), generator=torch.Generator().manual_seed(seed)
        )
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def forward_step(iterator: Any, model: Any) -> Any:
    """As pretraining scripts do it."""
    tokens, labels = next(iterator)
    length = tokens.shape[1]
    positions = torch.arange(length).expand(BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, length, length), diagonal=1).bool()
    losses = model(tokens, positions, mask, labels=labels)

    def loss_func(output: torch.Tensor) -> Any:
        if model.config.calculate_per_token_loss:
            loss, count = output.float().sum(), torch.tensor(output.numel(), dtype=torch.int)
            return loss, count, {"lm loss": loss.detach().clone()}
        loss = output.float().mean()
        return loss, {"lm loss": loss.detach().clone()}

    return losses, loss_func


def to_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's exact content."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Two iterations; the second one's gradients, so that state left over would show."""
    m, chunks, schedule = case.get("m", 8), case.get("chunks", 1), case.get("schedule")
    forward_only = case.get("forward_only", False)
    installation, door, dropped_in = None, case.get("door"), None
    if door is not None:
        opened = getattr(megatron_ext, door)(schedule, **case.get("options", {}))
        dropped_in = opened if door == "forward_backward_func" else None
    elif schedule is not None:
        path = folder / "schedule.json"
        if schedule == "FILE":
            if dist.get_rank() == 0:
                save(case["file"], path)
            dist.barrier()
            schedule = str(path)
        installation = Installation()
        args = megatron_args(
            pipeline_model_parallel_size=case["pp"],
            pp_trace=str(folder),
            pp_profile_steps=case.get("profile"),
            micro_batch_size=1,
            data_parallel_size=1,
            global_batch_size=case.get("file_m", m),
            distributed_timeout_minutes=1,
            rank=dist.get_rank(),
        )
        full = case.get("full_m", case.get("file_m", m))
        request = ScheduleRequest.of(
            schedule, memory_cap=case.get("cap"), offloading=case.get("offload")
        )
        if schedule == AUTO:
            request = request.decide(case["pp"], full)
        choice = request.resolve(case["pp"], chunks, full)
        version = installation.hooks.version
        installation.start(Run(args, version, training=False, schedule=choice, chunks=chunks))
    try:
        initialize(case["pp"], chunks, **case.get("parallel", {}))
        models, bare = build(case, config_of(case))
        step = dropped_in or schedules.get_forward_backward_func()

        def run(forward_only: bool) -> Any:
            data = [batches(m, case.get("lengths", False)) for _ in models]
            return step(
                forward_step_func=forward_step,
                data_iterator=data if chunks > 1 else data[0],
                model=models if chunks > 1 else models[0],
                num_microbatches=m,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
                forward_only=forward_only,
            )

        for _ in range(case.get("iterations", 2)):
            if case.get("evaluate"):
                for model in models:
                    model.eval()
                with torch.no_grad():
                    run(forward_only=True)
            for model in models:
                model.train()
                model.zero_grad_buffer()
            store = run(forward_only)
            if case.get("finalizes"):
                finalize_model_grads(models)
        gradients, tp = {}, parallel_state.get_tensor_model_parallel_rank()
        part = f" of {tp}" if tp else ""
        if not forward_only:
            for chunk in bare:
                for name, parameter in global_names(chunk).items():
                    gradients[name + part] = to_bytes(parameter.main_grad)
        last = parallel_state.get_pipeline_model_parallel_rank() == case["pp"] - 1
        losses = b"".join(to_bytes(x["lm loss"]) for x in store) if last else b""
        return {
            "losses": losses,
            "gradients": gradients,
            "embedding_ranks": parallel_state._EMBEDDING_GLOBAL_RANKS,
        }
    finally:
        parallel_state.destroy_model_parallel()
        megatron_ext.disable()
        if installation is not None:
            installation.revert()


def rank_main(folder: Path, name: str, case: dict[str, Any], rank: int) -> None:
    """One case on one rank; rank 0 gathers and writes."""
    own = folder / name
    own.mkdir(exist_ok=True, parents=True)
    dist.init_process_group("gloo", init_method=f"file://{own}/store", rank=rank, world_size=WORLD)
    mine = run_case(case, own)
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, mine)
    gradients: dict[str, bytes] = {}
    for part in every:
        gradients.update(part["gradients"])
    result = {
        "losses": [part["losses"] for part in every if part["losses"]],
        "gradients": gradients,
        "data_parallel": WORLD // case["pp"],
        "embedding_ranks": [part["embedding_ranks"] for part in every],
        "extra": [part.get("extra") for part in every],
        "traces": {p.stem: p.read_text() for p in own.glob("rank*.jsonl")},
    }
    if rank == 0:
        (folder / "result.pickle").write_bytes(pickle.dumps(result))
    dist.barrier()
