"""Layers of a hybrid model on a CPU: ``--spec tests.support.hybrid_spec SPEC``.

Attention and MLP are Megatron's own; Mamba's layer, which needs its kernels, is stood in for by a
causal mixer with Megatron's linear layers.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid import hybrid_block as block
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

block.TENorm = WrappedTorchNorm  # the final norm is Transformer Engine's otherwise


class Mixer(MegatronModule):
    """Stands for a Mamba layer: every position gets the mean of what lies before it."""

    def __init__(self, config: Any, layer_number: int, pg_collection: Any, **_: Any) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        size, group = config.hidden_size, pg_collection.tp
        self.norm = WrappedTorchNorm(config, size, config.layernorm_epsilon)
        common = {"config": config, "init_method": config.init_method, "bias": False}
        self.in_proj = ColumnParallelLinear(size, size, tp_group=group, **common)
        self.out_proj = RowParallelLinear(
            size, size, input_is_parallel=True, skip_bias_add=True, tp_group=group, **common
        )

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """(sequence, batch, hidden) to the same."""
        mixed, _ = self.in_proj(self.norm(hidden_states))
        count = torch.arange(1, len(mixed) + 1, device=mixed.device, dtype=mixed.dtype)
        out, _ = self.out_proj(mixed.cumsum(0) / count.view(-1, 1, 1))
        return hidden_states + out


def _mlp(module: type, layer: Any) -> ModuleSpec:
    """The MLP of ``layer`` in a layer of its own."""
    submodules = TransformerLayerSubmodules(
        pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=layer.mlp, mlp_bda=get_bias_dropout_add
    )
    return ModuleSpec(module=module, submodules=submodules)


_layer = get_gpt_layer_local_spec().submodules
_experts = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False).submodules
SPEC = ModuleSpec(
    module=block.HybridStack,
    submodules=block.HybridStackSubmodules(
        mamba_layer=ModuleSpec(module=Mixer),
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=_layer.input_layernorm,
                self_attention=_layer.self_attention,
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        mlp_layer=_mlp(MLPLayer, _layer),
        moe_layer=_mlp(TransformerLayer, _experts),
        mtp_block_spec=ModuleSpec(
            module=mtp.MultiTokenPredictionBlock,
            submodules=mtp.MultiTokenPredictionBlockSubmodules(
                layer_specs=[
                    ModuleSpec(
                        module=mtp.MultiTokenPredictionLayer,
                        submodules=mtp.MultiTokenPredictionLayerSubmodules(
                            enorm=WrappedTorchNorm,
                            hnorm=WrappedTorchNorm,
                            eh_proj=ColumnParallelLinear,
                            mtp_model_layer=None,
                            layer_norm=WrappedTorchNorm,
                        ),
                    )
                ]
            ),
        ),
    ),
)
