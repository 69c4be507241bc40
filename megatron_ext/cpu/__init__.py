"""A CUDA stand-in: unmodified Megatron-LM training scripts run on gloo and CPU tensors.

``install()`` changes this process only. It makes ``torch.cuda`` answer as one quiet device whose
memory is the host's, so that scripts which insist on CUDA run as they are. Meant for tests, demos
and laptops: nothing here is fast, and memory statistics read zero.

Works with CPU builds of torch and with CUDA builds on machines without a driver, for every
supported Megatron.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_installed = False


def install() -> None:
    """Route everything that this process asks of CUDA to the CPU. Idempotent.

    Call it before anything imports Megatron: Megatron captures some of torch's functions by name.

    Raises:
        RuntimeError: Megatron was imported before, so some of its modules kept CUDA functions.
    """
    global _installed
    if _installed:
        return
    early = sorted(name for name in sys.modules if name.startswith("megatron.core"))
    if early:
        raise RuntimeError(
            f"megatron_ext.cpu.install() came after {early[0]} was imported; call it first, "
            "or start the script with `python -m megatron_ext.launch --device cpu`."
        )
    # Megatron wraps fusions in torch.compile, which on a CPU means minutes of C++ compilation
    # for nothing. Read by torch._dynamo.config when that module is first imported.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # One computing thread a rank: several ranks share the few cores, and torchrun would set the
    # same. A user's own value stays.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        # gloo looks for the address of the host's name, which a laptop or container often cannot
        # resolve. All ranks are here: the loopback will do.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    from megatron_ext.cpu import collectives, cuda_api, data, devices, megatron_fixes

    _disable_dynamo()
    devices.install()
    cuda_api.install()
    collectives.install()
    data.install()
    megatron_fixes.install()
    _installed = True


def _disable_dynamo() -> None:
    """Switch torch.compile off where torch read its configuration before the variable was set."""
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is not None:
        config.disable = True
