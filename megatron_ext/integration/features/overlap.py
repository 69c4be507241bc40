"""``--overlap-moe-expert-parallel-comm``, an option of Megatron's, with our schedules.

A forward and a backward pass that the schedule has as a pair run layer by layer in one another, so
that the all-to-all of one is hidden behind the computation of the other.

Megatron (``core/pipeline_parallel/combined_1f1b.py``) cuts a layer into attention, dispatch,
experts and combine. A plan holds these parts of all layers of a chunk for one microbatch: F makes
it and leaves it on its output, B uses it up. With two plans, a forward and a backward one, parts of
both take turns, and dispatch and combine run on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...runtime.executor import BackwardPass, ForwardPass
from ..arguments import MegatronArgs
from ..callbacks import Callback, Step
from ..feature import Feature, Run
from ..hooks import hooked
from ..runner import MegatronRunner
from ..support import DELAYED, require
from ..targets import CONFIG_POST_INIT

DELAY = "--delay-wgrad-compute"


class Overlap(Feature):
    """On with Megatron's flag: makes the runner of every training iteration whose configuration
    asks for pairs."""

    def check(self, run: Run) -> None:
        if run.request is not None:
            _check(run)
            run.request = replace(run.request, overlap=wanted(run.args))

    def start(self, run: Run) -> Sequence[Callback]:
        on = run.request is not None and (run.library or wanted(run.args))
        return (self,) if on else ()

    @hooked(CONFIG_POST_INIT, "pairs would be refused for one chunk a rank")
    def _any_chunks(self, original: Callable[..., None], config: Any) -> None:
        # Megatron's own schedule has pairs with several chunks only, and asserts that. All else
        # that it asserts of pairs holds for one chunk, too.
        alone = config.virtual_pipeline_model_parallel_size is None and wanted(config)
        if alone:
            config.virtual_pipeline_model_parallel_size = 1
        original(config)
        if alone:
            config.virtual_pipeline_model_parallel_size = None

    def begin(self, step: Step) -> None:
        if wanted(step.call.iteration.config):
            step.runner_type = PairRunner


def wanted(args: MegatronArgs) -> bool:
    """True if Megatron's flag is given."""
    return bool(getattr(args, "overlap_moe_expert_parallel_comm", False))


def _check(run: Run) -> None:
    args = run.args
    if getattr(args, "delay_wgrad_compute", False):
        require(DELAYED, not run.library)
        args.delay_wgrad_compute = False
        run.notices.append(f"{DELAY}: the schedule's W passes do it")


class PairRunner(MegatronRunner):
    """Runs the two passes of a pair interleaved, and single passes by the same plans."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        from megatron.core.pipeline_parallel import combined_1f1b, utils

        self._combined = combined_1f1b.combined_forward_backward_step
        high = getattr(self._it.config, "high_priority_a2a_comm_stream", False)
        utils.set_streams(**({"high_priority": True} if high else {}))
        self._communication: Callable[[], Any] = utils.get_comm_stream

    def joint(
        self, forward: ForwardPass, backward: BackwardPass
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if forward.x is not None:
            forward.x.requires_grad_(True)
        with self.backpropagating(backward):
            y, num_tokens, input_grad = self._step(forward, backward)
        return self.forwarded(forward, y, num_tokens), input_grad

    def forward_step(self, chunk: int, microbatch: int, x: torch.Tensor | None) -> tuple[Any, Any]:
        if self._it.forward_only:
            return super().forward_step(chunk, microbatch, x)
        y, num_tokens, _ = self._step(ForwardPass(chunk, microbatch, x), None)
        return y, num_tokens

    def backward_step(self, of: BackwardPass) -> torch.Tensor | None:
        input_grad: torch.Tensor | None = self._step(None, of)[2]
        return input_grad

    def forwarded(self, of: ForwardPass, y: torch.Tensor, num_tokens: Any) -> torch.Tensor | None:
        result = super().forwarded(of, y, num_tokens)
        if result is not None and result.is_cuda:
            # The last combine has allocated it for its own stream, but others read it.
            result.record_stream(torch.cuda.current_stream())
        return result

    def weight(self, chunk: int, microbatch: int) -> None:
        super().weight(chunk, microbatch)
        # It has released tensors that were allocated for the all-to-all's stream, which may not
        # write to their memory before this pass has read it.
        self._communication().wait_stream(torch.cuda.current_stream())

    def _step(self, forward: ForwardPass | None, backward: BackwardPass | None) -> tuple[Any, ...]:
        """Megatron's step: the output, the tokens counted, the gradient of the input."""
        it = self._it
        given: list[Any] = [it.forward_step_func, None, None, it.num_microbatches, None]
        named: dict[str, Any] = {}
        if forward is not None:
            chunk, microbatch, x = forward
            given[1:3], given[4] = (it.data_iterators[chunk], it.models[chunk]), x
            named = {
                "f_model_chunk_id": self.vp_stage(chunk),
                "collect_non_loss_data": it.collect_non_loss_data,
                "is_first_microbatch": self.first_microbatch(microbatch),
                "current_microbatch": microbatch,
            }
        given += [self.losses, None, None, None, None]
        if backward is not None:
            held = self.held(backward)
            given[6:] = it.models[backward.chunk], held.x, held.y, backward.grad
        result: tuple[Any, ...] = self._combined(*given, it.config, **named)
        return result
