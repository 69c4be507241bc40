"""What a model gets of a microbatch: its tokens are cut inside, and its losses come out whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import ConfigError
from ...hooks import Hook, bound, declared, hooked
from ...saved_parameters import transformer_engine_hooks
from ...support import DRAWS, ONE_ROW, require
from ...targets import GPT_FORWARD
from . import documents
from .carry import Attention
from .documents import Documents
from .prediction import Prediction
from .routers import Routers
from .state import Slicing

_CUT = ("input_ids", "position_ids", "labels", "loss_mask", "padding_mask")


class SlicedModel(Routers, Prediction, Attention, Documents):
    """All hooks of a run in slices."""

    def hooks(self) -> Sequence[Hook]:
        return (*declared(self), *transformer_engine_hooks())

    @hooked(GPT_FORWARD, "whole sequences would run in place of slices")
    def _forward(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Whole microbatch in, the slice through, losses of the whole out: 0 but in the slice."""
        slicing, whole = self.slicing, self.whole
        if slicing.now is None:
            return original(model, *args, **kwargs)
        draws, slicing.draws = slicing.draws, None
        require(DRAWS, draws is None or not draws.found())
        call = bound(original, model, *args, **kwargs)
        given = call.arguments
        if given.get("input_ids") is not None:
            slicing.sequence(given["input_ids"].shape[-1])
        if model.post_process and given.get("labels") is None:
            raise ConfigError(
                "slices add the losses of labels, but the model was called without; drop slices"
            )
        if (packed := given.get("packed_seq_params")) is not None:
            _pack(slicing, packed, model.config)
            whole.packed = packed
            given["packed_seq_params"] = documents.of_slice(slicing, packed)
        begin, end = slicing.span
        whole.labels, whole.loss_mask = given.get("labels"), given.get("loss_mask")
        for name in _CUT:
            if given.get(name) is not None:
                part = given[name][..., begin:end]
                whole.add(part, given[name])
                given[name] = part
        try:
            output = original(*call.args, **call.kwargs)
        finally:
            whole.clear()
        if model.post_process and output.dim() == 2:  # not hidden states, of a sharded vocabulary
            output = torch.nn.functional.pad(output, (begin, slicing.tokens - end))
        return output


def _pack(slicing: Slicing, packed: Any, config: Any) -> None:
    """The microbatch of the pass that runs has these documents.

    Raises:
        ConfigError: there are tokens in no document, or losses of samples that slices are not.
    """
    edges, length = documents.edges_of(packed), getattr(packed, "tokens_per_sample", None)
    balanced = getattr(config, "moe_router_load_balancing_type", None) or ()
    several = length and edges[-1] > length and "seq_aux_loss" in balanced
    require(ONE_ROW, not several)
    slicing.sequence(edges[-1])
    slicing.pack(edges)
