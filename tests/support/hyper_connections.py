"""Layers with manifold-constrained hyper-connections from Megatron's local modules, for ``--spec``.

Megatron 0.20 has the layer, but no flag builds a GPT model of it.
"""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.transformer import HyperConnectionTransformerLayer, ModuleSpec
from megatron.core.transformer.hyper_connection import HyperConnectionModule

_submodules = get_gpt_layer_local_submodules()
_submodules.self_attention_hyper_connection = HyperConnectionModule
_submodules.mlp_hyper_connection = HyperConnectionModule
layer = ModuleSpec(module=HyperConnectionTransformerLayer, submodules=_submodules)
