"""Give a trainer that has never heard of megatron_ext another schedule: three lines.

    torchrun --nproc-per-node 2 examples/any_trainer.py

``Trainer`` is written as Megatron-Bridge, verl and their like are: Megatron's data parallelism and
optimizer, sequences of varying length, per-token log-probabilities for a policy. ``main`` runs it
twice, as it is and with the three lines, and compares everything it returns.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import tiny  # before Megatron: it prepares the CPU
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ext.schedule import generate, simulate

LENGTHS = (24, 40, 16, 64, 32, 48, 8, 56)  # tokens of each microbatch's one sequence


class Trainer:
    """Somebody else's: nothing of megatron_ext in here."""

    def __init__(self) -> None:
        tiny.start(pp=2)
        torch.manual_seed(7 + parallel_state.get_pipeline_model_parallel_rank())
        first = parallel_state.is_pipeline_first_stage()
        last = parallel_state.is_pipeline_last_stage()
        config = tiny.config(pp=2)
        config.variable_seq_lengths = True
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config, ddp, tiny.gpt(config, first, last))
        config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0), [self.model]
        )

    def sequences(self, step: int) -> Iterator[torch.Tensor]:
        """Tokens (1, length) of every microbatch."""
        draw = torch.Generator().manual_seed(step)
        for length in LENGTHS:
            yield torch.randint(tiny.VOCAB, (1, length), generator=draw)

    def forward_step(self, data: Iterator[torch.Tensor], model: Any) -> tuple[Any, Any]:
        """One sequence through this rank's stage."""
        tokens = next(data)
        length = tokens.shape[1]
        mask = torch.ones(1, 1, length, length).triu(1).bool()
        return model(tokens, torch.arange(length)[None], mask), partial(self.loss, tokens)

    def loss(self, tokens: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Of one sequence; its log-probabilities go back to the trainer."""
        chosen = tokens[:, 1:, None]
        log_probs = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, chosen)[0, :, 0]
        loss = -log_probs.mean()
        return loss, {"loss": loss.detach(), "log_probs": log_probs.detach()}

    def run(self, step: int, train: bool) -> list[dict[str, torch.Tensor]]:
        """Send a batch through the pipeline; what ``loss`` returned, on the last rank."""
        return get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=self.sequences(step),
            model=self.model,
            num_microbatches=len(LENGTHS),
            seq_length=max(LENGTHS),
            micro_batch_size=1,
            forward_only=not train,
        )

    def fit(self) -> tuple[tiny.Tensors, tiny.Tensors]:
        """Three steps; all that was returned on this rank, and its weights at the end."""
        returned = {}
        for step in range(tiny.STEPS):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            results = {"train": self.run(step, train=True)}
            self.optimizer.step()
            with torch.no_grad():
                results["evaluate"] = self.run(step, train=False)
            for kind, rows in results.items():
                for number, row in enumerate(rows):
                    for name, value in row.items():
                        returned[f"{kind} {name} of {number} in step {step}"] = value
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        parallel_state.destroy_model_parallel()
        return returned, weights


def main() -> None:
    """Train under Megatron's own schedule, then with the three lines."""
    returned, weights = Trainer().fit()

    import megatron_ext  # 1

    megatron_ext.enable(schedule="zb-h1")  # 2
    ours = Trainer().fit()
    megatron_ext.disable()  # 3

    rank = torch.distributed.get_rank()
    for what, new, old in zip(
        ("losses and log-probabilities", "weights"), ours, (returned, weights)
    ):
        mine = {f"rank {rank}: {name}": value for name, value in new.items()}
        stock = tiny.everywhere({f"rank {rank}: {name}": value for name, value in old.items()})
        tiny.require_equal(what, mine, {name: v for part in stock for name, v in part.items()})
    plans = [simulate(generate(name, 2, len(LENGTHS))) for name in ("1f1b", "zb-h1")]
    bubbles = [float(plan.bubble) for plan in plans]
    tiny.say("simulated bubble: {:.1%} under 1F1B, {:.1%} under ZB-H1".format(*bubbles))
    tiny.finish()


if __name__ == "__main__":
    main()
