"""``MegatronArgs`` names only attributes that every supported Megatron has."""

from __future__ import annotations

import json
import subprocess

import pytest

from megatron_ext.integration.arguments import MegatronArgs
from megatron_ext.releases import TAGS
from tests.support import warm
from tests.support.checkouts import environment, python_path, version
from tests.support.waiting import PATIENCE

# Not from Megatron's parser: Megatron computes them, the training loop or we set them.
DERIVED = {
    "data_parallel_size",
    "params_dtype",
    "rank",
    "virtual_pipeline_model_parallel_size",
    "world_size",
}
NAMES = """
import argparse, json, sys
from megatron_ext import cpu
cpu.install()
from megatron.training.arguments import add_megatron_arguments
from megatron_ext.integration.flags import add_arguments
parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser()))
print(json.dumps([action.dest for action in parser._actions]))
"""


@pytest.mark.parametrize("tag", [version(tag) for tag in TAGS])
def test_every_version_has_them(tag: str) -> None:
    env = {**environment(), "PYTHONPATH": python_path(tag)}
    done = subprocess.run(
        [warm.python(tag), "-c", NAMES], env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    names = set(json.loads(done.stdout.splitlines()[-1]))
    assert set(MegatronArgs.__annotations__) - names == DERIVED
