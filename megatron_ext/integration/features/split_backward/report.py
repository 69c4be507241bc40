"""Report of the parameters whose weight gradients move to W, and of those that stay in B."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ... import split_te as wgrad_te
from ...split_local import can_split, is_output_weight

_NEARLY_ALL = 0.95


@dataclass
class WgradReport:
    """How a model's parameters divide.

    Attributes:
        split: number of parameters whose gradient is computed in W.
        fused: number of parameters in matrices whose gradient is computed in B although that is
            work which could be postponed: their module does not know how, or what would wait for W
            is too large (the output layer's logits).
        kept: all others (biases, norms, embeddings): too little work to be worth a pass of its own.
        frozen: those in matrices that do not learn: neither B nor W has work for their gradients.
        fused_modules: class name, or "output layer" -> number of its parameters among ``fused``;
            "with hooks" behind the name of modules that are fused for these only.
    """

    split: int = 0
    fused: int = 0
    kept: int = 0
    frozen: int = 0
    fused_modules: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """Fraction of the weight-gradient work that W really does, by number of parameters (every
        parameter of a matrix costs the same work per token; experts see fewer tokens)."""
        total = self.split + self.fused
        return self.split / total if total else 0.0

    @property
    def advises(self) -> bool:
        """True if the order should be made for other costs than equal ones."""
        total = self.split + self.fused + self.frozen
        return self.split < total and self.split <= _NEARLY_ALL * total

    def __add__(self, other: WgradReport) -> WgradReport:
        return WgradReport(
            self.split + other.split,
            self.fused + other.fused,
            self.kept + other.kept,
            self.frozen + other.frozen,
            self.fused_modules + other.fused_modules,
        )

    def costs(self, forward: float, backward_input: float, weight: float) -> tuple[float, ...]:
        """(F, B, W) as they really are, when ``weight`` is the cost of all weight gradients."""
        total = self.split + self.fused + self.frozen
        moved, stays = (
            weight * part / total if total else 0.0 for part in (self.split, self.fused)
        )
        return forward, backward_input + stays, moved

    def as_dict(self) -> dict[str, Any]:
        """For the trace file."""
        return {
            "split_parameters": self.split,
            "fused_parameters": self.fused,
            "other_parameters": self.kept,
            "frozen_parameters": self.frozen,
            "fused_modules": dict(self.fused_modules),
        }

    def text(self, schedule: str) -> str:
        """The log's line, with what to plan with."""
        said = f"{schedule}: W passes compute all weight gradients of matrices"
        if self.fused:
            names = ", ".join(f"{name} ({n})" for name, n in self.fused_modules.most_common())
            said = (
                f"{schedule}: W passes compute {100 * self.share:.3g} % of the weight gradients; "
                f"those of {names} are computed in B (parameters in parentheses)"
            )
        if self.frozen:
            part = self.frozen / (self.split + self.fused + self.frozen)
            said += (
                f"; {100 * part:.3g} % of the matrices are frozen and have none, though the "
                "planned bubble is that of W passes for them too"
            )
        if not self.advises:
            return said
        cost = ",".join(f"{x:.3g}" for x in self.costs(1, 1, 1))
        advice = "--pp-cost " + cost if self.split else "a schedule without W passes"
        return f"{said}, so plan with {advice}"


def wgrad_report(
    chunks: Iterable[torch.nn.Module], fused_experts: bool = False, hooked: Container[int] = ()
) -> WgradReport:
    """How the parameters of these model chunks divide between W and B, with our hooks in force.

    Args:
        fused_experts: the experts of MoE layers do not postpone anything, whatever they could.
        hooked: identities of parameters with hooks of the user.
    """
    report = WgradReport()
    for chunk in chunks:
        report += _of_chunk(chunk, fused_experts, hooked)
    return report


def _of_chunk(chunk: torch.nn.Module, fused_experts: bool, waiting: Container[int]) -> WgradReport:
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    embeddings = (VocabParallelEmbedding, torch.nn.Embedding)
    report = WgradReport()

    def waits(parameter: Any) -> bool:
        return id(parameter) in waiting

    split: set[int] = set()
    hooked: set[int] = set()
    for module in wgrad_te.splittable(chunk):
        postponed = wgrad_te.postponed_parameters(module)
        split.update(map(id, postponed))
        if any(map(waits, (*postponed, *wgrad_te.postponed_biases(module)))):
            hooked.update(map(id, postponed))
    seen, fused = set(), set()
    if fused_experts:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        layers = [module for module in chunk.modules() if isinstance(module, MoELayer)]
        fused = {id(p) for layer in layers for p in layer.experts.parameters()}
    for module in chunk.modules():
        if getattr(module, "has_own_passes", False):
            continue
        if _is_local_linear(module):
            split.add(id(module.weight))
            if waits(module.weight):
                hooked.add(id(module.weight))
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if not parameter.requires_grad:
                matrix = parameter.dim() >= 2 and not isinstance(module, embeddings)
                report.frozen += matrix * parameter.numel()
                continue
            own = id(parameter) in split and id(parameter) not in fused
            if own and id(parameter) not in hooked:
                report.split += parameter.numel()
            elif parameter.dim() >= 2 and not isinstance(module, embeddings):
                name = "output layer" if is_output_weight(parameter) else type(module).__name__
                name += " with hooks" if own else ""
                report.fused += parameter.numel()
                report.fused_modules[name] += parameter.numel()
            else:
                report.kept += parameter.numel()
    return report


def _is_local_linear(module: torch.nn.Module) -> bool:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    local = isinstance(module, (ColumnParallelLinear, RowParallelLinear))
    # Without a weight it has another module's.
    return local and module.weight is not None and can_split(module, module.weight)
