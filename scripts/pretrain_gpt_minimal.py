#!/usr/bin/env python3
"""A short GPT pretraining script on the installed megatron-core: stock flags, stock training loop.

For machines that have megatron-core's wheel but no Megatron-LM checkout. It trains exactly what
``pretrain_gpt.py`` trains with the same flags: dense and mixture-of-experts GPT with tensor,
pipeline, expert and data parallelism, real or mock data. What lies beyond (``_BEYOND``) is refused.

    torchrun --nproc-per-node 4 -m megatron_ext.launch --device cpu pretrain_gpt <Megatron's flags>
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if os.environ.get("RANK", "0") != "0":
    warnings.filterwarnings("ignore")

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers, get_tokenizer, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import (
    core_transformer_config_from_args,
    parse_and_validate_args,
)
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

# Flags (argparse names) that change the data or the model in ways this script does not follow, and
# Megatron's defaults of them.
_BEYOND = {
    "context_parallel_size": 1,
    "experimental_attention_variant": None,
    "fim_data": False,
    "heterogeneous_layers_config_path": None,
    "mtp_num_layers": None,
    "reset_attention_mask": False,
    "reset_position_ids": False,
    "sft": False,
    "spec": None,
    "yaml_cfg": None,
}


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build this rank's part of the GPT, or the part of virtual stage ``vp_stage``.

    With ``pre_process`` it holds the embedding, with ``post_process`` the output layer and loss.
    ``config`` and ``pg_collection`` (process groups) default to Megatron's global ones.
    """
    args = get_args()
    beyond = [name for name, default in _BEYOND.items() if getattr(args, name, default) != default]
    if beyond:
        flag = f"--{beyond[0].replace('_', '-')}"
        sys.exit(f"{flag} needs Megatron's own pretrain_gpt.py; see scripts/get_megatron.sh")
    config = config or core_transformer_config_from_args(args)
    layers = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=args.transformer_impl == "transformer_engine",
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def build_datasets(samples: list[int], vp_stage: int | None = None) -> Any:
    """Return the training, validation and test sets with at least ``samples`` samples each."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,  # attention is causal without being told
    )

    def here() -> bool:
        is_reader = mpu.get_tensor_model_parallel_rank() == 0
        return is_reader and is_first_or_last_pipeline_stage(vp_stage)

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, samples, here, config).build()


# Every rank with an end of the pipeline reads data, not only global rank 0.
build_datasets.is_distributed = True  # type: ignore[attr-defined]


def next_batch(iterator: Iterator[Any] | None, vp_stage: int | None) -> list[Any]:
    """Return tokens, labels, loss mask, position ids, each [microbatch, sequence].

    All are None on stages in the middle of the model. The first rank of each tensor-parallel group
    reads and sends to the others.
    """
    if not is_first_or_last_pipeline_stage(vp_stage):
        return [None] * 4
    args = get_args()
    keys = ("tokens", "labels", "loss_mask", "position_ids")
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert iterator is not None
        read = next(iterator)
        batch = torch.stack([read[key].to(torch.int64) for key in keys]).cuda(non_blocking=True)
    else:
        shape = (len(keys), args.micro_batch_size, args.seq_length)
        batch = torch.empty(shape, dtype=torch.int64, device=torch.cuda.current_device())
    if mpu.get_tensor_model_parallel_world_size() > 1:
        source = mpu.get_tensor_model_parallel_src_rank()
        torch.distributed.broadcast(batch, source, group=mpu.get_tensor_model_parallel_group())
    tokens, labels, loss_mask, position_ids = batch
    return [tokens, labels, loss_mask.float(), position_ids]


def loss_of(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
    """Return the summed loss, the number of tokens in it, and both together for the log.

    ``output`` holds every token's loss in nats and ``loss_mask`` 1.0 where it counts, else 0.0;
    both [microbatch, sequence].
    """
    mask = loss_mask.reshape(-1)
    loss = (output.reshape(-1).float() * mask).sum()
    tokens = mask.sum().to(torch.int).detach()
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=lambda value: not torch.isfinite(value),
            message="the loss of a microbatch is not finite",
            tolerance=0.0,
            fatal=True,
        )
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def forward_step(iterator: Iterator[Any] | None, model: torch.nn.Module) -> tuple[Any, Any]:
    """Run one microbatch through ``model``: its output, and the function from output to loss."""
    get_timers()("batch-generator", log_level=2).start()
    batch = next_batch(iterator, get_attr_wrapped_model(model, "vp_stage"))
    get_timers()("batch-generator").stop()
    tokens, labels, loss_mask, position_ids = batch
    output = model(tokens, position_ids, None, labels=labels, loss_mask=loss_mask)
    return output, functools.partial(loss_of, loss_mask)


def use_shipped_helpers() -> None:
    """Keep Megatron from running make where its dataset helpers came compiled, in a wheel."""
    from megatron.core.datasets import utils

    if not Path(utils.__file__).with_name("Makefile").is_file():
        import megatron.core.datasets.helpers_cpp  # noqa: F401 (it is what the wheel must hold)

        utils.compile_helpers = lambda: None


def main() -> None:
    """Train as the command line says."""
    use_shipped_helpers()
    pretrain(
        pretrain_cfg_container_from_args(parse_and_validate_args()),
        build_datasets,
        model_provider=build_model,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
    )


if __name__ == "__main__":
    main()
