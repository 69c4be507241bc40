"""What the fork server imports once, in this order, before it forks the first rank."""

from __future__ import annotations

import argparse
import functools
import gc
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("MEGATRON_EXT_OFFLOAD_MIN_BYTES", "1")
os.environ.setdefault("MEGATRON_EXT_EFFORT", "0.02")  # seconds of search for an order
os.environ["LOCAL_WORLD_SIZE"] = "8"  # the CPU device is prepared here for the largest case
from tests.harness.ranks import CHECKOUT

sys.path.insert(0, str(CHECKOUT))

from megatron_ext import cpu

cpu.install()  # before Megatron, which keeps some of torch's functions by name

import gpt_builders  # noqa: E402, F401
import megatron.training  # noqa: E402, F401
import model_provider  # noqa: E402, F401
from megatron.core.datasets import gpt_dataset, utils  # noqa: E402
from megatron.core.models import mimo  # noqa: E402, F401
from megatron.core.tokenizers.text import libraries, models  # noqa: E402, F401
from megatron.training import argument_utils, arguments  # noqa: E402

from megatron_ext import launch  # noqa: E402, F401
from megatron_ext.integration import install  # noqa: E402, F401
from tests.harness import equality, ranks  # noqa: E402, F401

utils.compile_helpers()
utils.compile_helpers = lambda: None  # every rank 0 would call make again
gpt_dataset.MockGPTLowLevelDataset.size = 256  # not 100,000 documents to shuffle a rank


def _mask_unevenly() -> None:
    """Samples have different numbers of tokens that count, of the same numbers in every run."""
    item = gpt_dataset.GPTDataset.__getitem__

    def masked(self, index):
        sample = item(self, index)
        mask = sample["loss_mask"].clone()
        mask[: 5 * (index or 0) % (len(mask) // 2)] = 0
        return {**sample, "loss_mask": mask}

    gpt_dataset.GPTDataset.__getitem__ = masked


_mask_unevenly()


def _read_help_once() -> None:
    """Megatron parses its configurations' sources for their help texts, three times a rank."""
    factory = argument_utils.ArgumentGroupFactory
    read = functools.cache(
        functools.partial(factory._get_field_docstrings, factory.__new__(factory))
    )
    factory._get_field_docstrings = lambda _, config: dict(read(config))
    arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


_read_help_once()
gc.collect()
gc.freeze()
