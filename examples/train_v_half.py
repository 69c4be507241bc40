"""Train a GPT on two pipeline ranks under V-Half, in a loop of your own.

    torchrun --nproc-per-node 2 examples/train_v_half.py

V-Half cuts the model into 2p stages and folds them like a V: rank 0 holds the first and the last
one. Losses, gradients and weights of three steps equal those of one process, bit for bit.
"""

import tiny  # before Megatron: it prepares the CPU
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

import megatron_ext
from megatron_ext.schedule import generate, simulate

PP, CHUNKS = 2, 2


def train(pp: int, chunks: int, initial: tiny.Tensors) -> tiny.Trained:
    """Train for three steps from the weights ``initial``, with ``chunks`` model chunks a rank."""
    tiny.start(pp, virtual=chunks if chunks > 1 else None)
    config = tiny.config(pp, chunks)
    models = []
    for stage in range(chunks) if chunks > 1 else [None]:
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        models.append(tiny.gpt(config, first, last, stage))
    tiny.load(models, initial)
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=tiny.RATE)
    forward_backward = get_forward_backward_func()
    losses = []
    for step in range(tiny.STEPS):
        optimizer.zero_grad()
        losses += forward_backward(
            forward_step_func=tiny.forward_step,
            data_iterator=[tiny.batch(step) for _ in models],
            model=models,
            num_microbatches=tiny.MICROBATCHES,
            seq_length=tiny.SEQUENCE,
            micro_batch_size=tiny.BATCH,
            forward_only=False,
        )
        optimizer.step()
    return tiny.Trained(models, losses)


def main() -> None:
    """Train under the schedule, and compare."""
    plain = tiny.Plain()
    traces = tiny.folder()

    megatron_ext.enable(schedule="v-half", trace=str(traces))  # before the model is built
    train(PP, CHUNKS, plain.initial).require_equal(plain)

    held = [line["peak_sets"] / CHUNKS for line in tiny.traced(traces)]
    tiny.require(f"activations held, in microbatches: {held}, at most 2", max(held) <= 2)
    for pp, m in ((PP, tiny.MICROBATCHES), (8, 16)):
        one, v = (simulate(generate(name, pp, m)) for name in ("1f1b", "v-half"))
        tiny.say(
            f"simulated, p = {pp}, m = {m}: bubble {float(one.bubble):.1%} under 1F1B, "
            f"{float(v.bubble):.1%} under V-Half; activations {float(max(one.peak_activation)):g} "
            f"and {float(max(v.peak_activation)):g} microbatches"
        )
    tiny.finish()


if __name__ == "__main__":
    main()
