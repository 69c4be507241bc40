"""Multi-token prediction of slices: tokens behind a slice are those of its microbatch.

Depth d predicts from the embeddings of the tokens d behind. Tokens and positions are rolled over
the whole microbatch, and cut then. Losses of a depth are padded to the microbatch before they are
masked and divided by the tokens that count, which are the microbatch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...hooks import hooked
from ...targets import MTP_ACCEPTANCE, MTP_LOSS, MTP_ROLL
from .state import Sliced


class Whole:
    """The microbatch's tensors of the slices that a model got.

    They are known by the slice itself: each roll of one is another one.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.labels: torch.Tensor | None = None
        self.loss_mask: torch.Tensor | None = None
        self.packed: Any = None

    def add(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """``part`` was cut out of ``whole``. Both are kept, so that no other gets its identity."""
        self._of[id(part)] = part, whole

    def of(self, part: torch.Tensor) -> torch.Tensor:
        """What it was cut out of."""
        return self._of[id(part)][1]

    def clear(self) -> None:
        """After the model's forward pass."""
        self._of.clear()
        self.labels = self.loss_mask = self.packed = None


_WHY = "the tokens behind a slice would be missing"


class Prediction(Sliced):
    """Where multi-token prediction looks at the tokens behind.

    Attributes:
        whole: what the model that runs got.
    """

    def __init__(self) -> None:
        super().__init__()
        self.whole = Whole()
        self._in_loss = False

    @hooked(MTP_ROLL, _WHY)
    def _roll(self, original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if self.slicing.now is None or self._in_loss or tensor is None:
            return original(tensor, *args, **kwargs)
        if kwargs.get("packed_seq_params") is not None:
            kwargs["packed_seq_params"] = self.whole.packed
        whole, *more = original(self.whole.of(tensor), *args, **kwargs)
        begin, end = self.slicing.span
        part = whole[..., begin:end].contiguous()
        self.whole.add(part, whole)
        return (part, *more)

    @hooked(MTP_LOSS, _WHY)
    def _prediction_loss(self, original: Callable[..., Any], **given: Any) -> Any:
        if self.slicing.now is None or given.get("labels") is None:
            return original(**given)
        (begin, end), tokens = self.slicing.span, self.slicing.tokens
        compute = given["compute_language_model_loss"]

        @functools.wraps(compute)
        def padded(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            losses = compute(labels[..., begin:end].contiguous(), logits)
            return torch.nn.functional.pad(losses, (begin, tokens - end))

        given |= {"labels": self.whole.labels, "loss_mask": self.whole.loss_mask}
        if given.get("packed_seq_params") is not None:
            given["packed_seq_params"] = self.whole.packed
        given["compute_language_model_loss"] = padded
        self._in_loss = True
        try:
            return original(**given)
        finally:
            self._in_loss = False

    @hooked(MTP_ACCEPTANCE, _WHY, when=lambda self: MTP_ACCEPTANCE.exists)
    def _accepted(
        self,
        original: Callable[..., Any],
        mtp_logits: Any,
        mtp_labels: Any,
        loss_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Counts of tokens that were predicted right, which add up over slices."""
        if self.slicing.now is not None:
            begin, end = self.slicing.span
            mtp_labels, loss_mask = (t[..., begin:end] for t in (mtp_labels, loss_mask))
        return original(mtp_logits, mtp_labels, loss_mask, *args, **kwargs)
