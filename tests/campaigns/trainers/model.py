"""A tiny GPT as a trainer on megatron-core builds it: chunks, wrapper, optimizer."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

LAYERS, HIDDEN, HEADS, VOCAB, LONGEST = 8, 32, 4, 64, 64
LENGTHS = (24, 40, 16, 64, 32, 48, 8, 56)
"""Tokens of each microbatch: a trainer's sequences differ in length."""


class PackedAttention(DotProductAttention):
    """Megatron's attention on CPU tensors for packed sequences ("thd"), one after the other."""

    def forward(self, *qkv: torch.Tensor, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        """Attention of each sequence of ``packed_seq_params`` by itself.

        Args:
            qkv: query, key, value (tokens, heads, head size), and whatever else stock passes.
        """
        if packed_seq_params is None:
            return super().forward(*qkv, **kwargs)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        parts = []
        for begin, end in itertools.pairwise(bounds):
            own = [t[begin:end].unsqueeze(1) for t in qkv[:3]]
            parts.append(super().forward(*own, None, **kwargs).squeeze(1))
        return torch.cat(parts).flatten(1)


class Tiny:
    """This rank's part of the model.

    Args:
        chunks: model chunks on a rank.
        kind: of the configuration.
        options: of the configuration.

    Attributes:
        config: Megatron's.
        bare: the chunks.
        models: the chunks under Megatron's data parallelism.
        optimizer: Megatron's Adam.
    """

    def __init__(self, chunks: int, kind: Any = TransformerConfig, **options: Any) -> None:
        pp = parallel_state.get_pipeline_model_parallel_world_size()
        self.config = config = kind(
            **{
                "num_layers": LAYERS,
                "hidden_size": HIDDEN,
                "num_attention_heads": HEADS,
                "pipeline_model_parallel_size": pp,
                "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
                "microbatch_group_size_per_vp_stage": pp,
                "pipeline_dtype": torch.float32,
                "variable_seq_lengths": True,
                "moe_token_dispatcher_type": "alltoall",
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "masked_softmax_fusion": False,
                "bias_dropout_fusion": False,
                "gradient_accumulation_fusion": False,
                "apply_rope_fusion": False,
                "use_cpu_initialization": True,
                "overlap_p2p_comm": chunks > 1,
                "batch_p2p_comm": False,
                **options,
            }
        )
        self.bare = [self._chunk(c if chunks > 1 else None) for c in range(chunks)]
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        inner = [Float16Module(config, m) if config.bf16 else m for m in self.bare]
        self.models = [DistributedDataParallel(config, ddp, model) for model in inner]
        config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, bf16=config.bf16),
            self.models,
        )
        config.grad_scale_func = self.optimizer.scale_loss

    def _chunk(self, vp_stage: int | None) -> GPTModel:
        # As verl and ms-swift ask; the Bridge asks its process groups.
        stage: dict[str, Any] = {"ignore_virtual": vp_stage is None}
        if vp_stage is not None:
            stage["vp_stage"] = vp_stage
        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
        model = GPTModel(
            config=self.config,
            transformer_layer_spec=spec,
            vocab_size=VOCAB,
            max_sequence_length=LONGEST,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        for name, parameter in _global_names(model).items():
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.data.copy_(values / 10 + (1.0 if "norm" in name and values.ndim == 1 else 0))
        return model

    def weights(self) -> dict[str, bytes]:
        """This rank's parameters, bit for bit, by names that do not depend on the placement."""
        return {
            name: parameter.detach().float().numpy().tobytes()
            for model in self.bare
            for name, parameter in _global_names(model).items()
        }


def _global_names(model: GPTModel) -> dict[str, torch.nn.Parameter]:
    named = {}
    for name, parameter in model.named_parameters():
        words = name.split(".")
        if words[:2] == ["decoder", "layers"]:
            words[2] = str(model.decoder.layers[int(words[2])].layer_number)
        named[".".join(words)] = parameter
    return named


def sequences(step: int) -> list[torch.Tensor]:
    """Tokens of every microbatch of a step, each of another length."""
    draw = torch.Generator().manual_seed(step)
    return [torch.randint(1, VOCAB, (length,), generator=draw) for length in LENGTHS]
