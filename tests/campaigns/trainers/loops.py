"""Loops that call Megatron as the frameworks do, for where their checkouts are missing.

Each copies one framework's calls: what it passes to the forward-backward function, how it asks for
roles, what its loss function returns. None of their code is here.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection

from tests.campaigns.trainers.frameworks import Driver
from tests.campaigns.trainers.model import LENGTHS, LONGEST, Tiny, sequences


class Loop(Driver):
    """Trains on a batch; then a forward pass alone, as an RL trainer's log-probabilities."""

    def step(self, number: int) -> Any:
        for model in self.tiny.models:
            model.zero_grad_buffer()
        self.tiny.optimizer.zero_grad()
        trained = self.collected(self.call(number, False))
        self.tiny.optimizer.step()
        with torch.no_grad():
            return trained, self.collected(self.call(number, True))

    def call(self, number: int, forward_only: bool) -> Any:
        """Call the forward-backward function as most do: shapes come with the messages."""
        models = self.tiny.models
        return get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=self.per_chunk(lambda: iter(sequences(number))),
            model=models if len(models) > 1 else models[0],
            num_microbatches=len(LENGTHS),
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def forward_step(self, iterator: Any, model: Any) -> Any:
        """Feed one microbatch; the output, and the loss function."""
        raise NotImplementedError

    def collected(self, returned: Any) -> Any:
        """What the trainer makes of the returned values."""
        return returned


class VerlLoop(Loop):
    """Every rank has all data; nested tensors return, on the last rank alone they are read."""

    def forward_step(self, iterator: Any, model: Any) -> Any:
        tokens = next(iterator)[None]
        output = model(tokens, torch.arange(tokens.shape[1])[None], None)
        return output, functools.partial(self._loss, tokens)

    @staticmethod
    def _loss(tokens: torch.Tensor, logits: torch.Tensor) -> Any:
        logprobs = torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])[0, :, 0]
        nested = torch.nested.as_nested_tensor([logprobs], layout=torch.jagged)
        loss = -logprobs.sum() / sum(LENGTHS)
        output = {"loss": loss.item(), "metrics": {}, "model_output": {"log_probs": nested}}
        return loss * len(LENGTHS), output

    def collected(self, returned: Any) -> Any:
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return None
        rows = [row for r in returned for row in r["model_output"]["log_probs"].unbind()]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return nested, [r["loss"] for r in returned]


class NemoLoop(VerlLoop):
    """The last rank's values are broadcast to all ranks, tensors from the rank that says it is the
    last."""

    def collected(self, returned: Any) -> Any:
        group = parallel_state.get_pipeline_model_parallel_group()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        size = torch.tensor([sum(LENGTHS) - len(LENGTHS)])
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            values = torch.cat([r["model_output"]["log_probs"].values().detach() for r in returned])
            dist.broadcast(values, dist.get_rank(), group=group)
        else:
            values = torch.empty(int(size))
            dist.broadcast(values, last, group=group)
        return values


class SwiftLoop(Loop):
    """bf16; labels only where ``parallel_state`` says that the loss is computed."""

    options: ClassVar[dict[str, Any]] = {
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
    }

    def forward_step(self, iterator: Any, model: Any) -> Any:
        tokens = next(iterator)[None]
        vp_stage = model.module.module.vp_stage
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        labels = torch.roll(tokens, -1, -1) if last else None
        output = model(tokens, torch.arange(tokens.shape[1])[None], None, labels=labels)
        return output, functools.partial(self._loss, labels)

    @staticmethod
    def _loss(labels: torch.Tensor, output: torch.Tensor) -> Any:
        mask = labels != 0
        losses = output.float() * mask
        report = torch.stack([losses.sum().detach(), mask.sum()])
        return losses.sum(), mask.sum().to(torch.int), {"loss": report}


class BridgeLoop(Loop):
    """Process groups say which rank fetches tokens and labels; a communicator comes along."""

    options: ClassVar[dict[str, Any]] = {"variable_seq_lengths": False}

    def __init__(self, tiny: Tiny) -> None:
        super().__init__(tiny)
        self._groups = ProcessGroupCollection.use_mpu_process_groups()
        self._communicator = P2PCommunicator(pp_group=self._groups.pp, config=tiny.config)

    def call(self, number: int, forward_only: bool) -> Any:
        return get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=self.per_chunk(lambda: iter(sequences(number))),
            model=self.tiny.models,
            num_microbatches=len(LENGTHS),
            seq_length=LONGEST,
            micro_batch_size=1,
            decoder_seq_length=LONGEST,
            forward_only=forward_only,
            p2p_communicator=self._communicator,
            pg_collection=self._groups,
        )

    def forward_step(self, iterator: Any, model: Any) -> Any:
        stage, size = model.module.vp_stage, self.tiny.config.virtual_pipeline_model_parallel_size
        group = self._groups.pp
        first = is_pp_first_stage(group) and (
            stage is None or is_vp_first_stage(vp_stage=stage, vp_size=size)
        )
        last = is_pp_last_stage(group) and (
            stage is None or is_vp_last_stage(vp_stage=stage, vp_size=size)
        )
        tokens = labels = None
        if first or last:
            sequence = next(iterator)
            padded = torch.nn.functional.pad(sequence, (0, LONGEST + 1 - len(sequence)))[None]
            tokens, labels = (padded[:, :-1] if first else None), (padded[:, 1:] if last else None)
        output = model(tokens, torch.arange(LONGEST)[None], None, labels=labels)
        return output, functools.partial(SwiftLoop._loss, labels)

    def collected(self, returned: Any) -> Any:
        if not self._communicator.is_pp_last_stage:
            return None
        return torch.stack([r["loss"] for r in returned]).sum(0)


LOOPS: dict[str, type[Driver]] = {
    "loop: verl": VerlLoop,
    "loop: RL": NemoLoop,
    "loop: ms-swift": SwiftLoop,
    "loop: Megatron-Bridge": BridgeLoop,
}
