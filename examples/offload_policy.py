"""Offload activations by a policy of your own: which tensors stay on the device.

    torchrun --nproc-per-node 2 examples/offload_policy.py

The schedule decides which activation sets are in the host's memory between their forward and
backward pass; a policy decides about each tensor in them. Gradients stay the same bit for bit.
"""

from typing import Any

import tiny  # before Megatron: it prepares the CPU
from megatron.core import parallel_state

import megatron_ext
from train_v_half import CHUNKS, PP, train


def keep_everything(saved: Any) -> bool:
    """Offload nothing: the memory to compare with."""
    return True


def keep_last_layer(saved: Any) -> bool:
    """Keep the last of a chunk's two layers, which backward needs first; offload the other.

    Args:
        saved: ``saved.tensor`` is what autograd saves, ``saved.module`` the name of the module that
            is running, such as ``decoder.layers.1.self_attention.linear_qkv``.
    """
    return ".layers.1." in f".{saved.module}."


def run(policy: str, plain: tiny.Plain) -> list[dict[str, Any]]:
    """Train under V-Half and ``policy``, compare; what each rank's trace says about offload."""
    traces = tiny.folder()
    megatron_ext.enable(
        schedule="v-half",
        offload="full",
        offload_policy=policy,
        # Given, not measured, so that all runs have one plan: a copy takes a quarter of its passes.
        offload_time="0.25",
        offload_transfer="dual",
        trace=str(traces),
    )
    tiny.say(f"policy {policy}:")
    train(PP, CHUNKS, plain.initial).require_equal(plain)
    megatron_ext.disable()
    parallel_state.destroy_model_parallel()
    return [line["offload"] for line in tiny.traced(traces)]


def main() -> None:
    """Keep everything, nothing, and the last layer."""
    plain = tiny.Plain()
    module = "offload_policy"  # this file; of a package, package.module
    kept = run(f"{module}:keep_everything", plain)
    offloaded = run("all", plain)
    own = run(f"{module}:keep_last_layer", plain)
    for rank, (most, least, ours) in enumerate(zip(kept, offloaded, own)):
        device = [line["peak_device_bytes"] / 2**20 for line in (most, ours, least)]
        moved = [line["bytes_to_host"] / 2**20 for line in (ours, least)]
        tiny.require(
            f"rank {rank}: activations on the device at most {device[0]:.1f} MiB if all stay, "
            f"{device[1]:.1f} by the own policy, {device[2]:.1f} if all that can go goes; "
            f"{moved[0]:.0f} of {moved[1]:.0f} MiB were copied to the host",
            device[2] < device[1] < device[0] and moved[0] < moved[1],
        )
    counted = [(line["peak_device_bytes"], line["planned_device_bytes"]) for line in own]
    tiny.require("device bytes are those of the plan", all(a == b for a, b in counted))
    tiny.finish()


if __name__ == "__main__":
    main()
