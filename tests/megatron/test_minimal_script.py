"""What ``scripts/pretrain_gpt_minimal.py`` does not follow, it refuses."""

from __future__ import annotations

import argparse
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext import cpu
from tests.support import ROOT


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module, not run."""
    cpu.install()
    path = ROOT / "scripts" / "pretrain_gpt_minimal.py"
    spec = importlib.util.spec_from_file_location("pretrain_gpt_minimal", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GIVEN = {
    "context_parallel_size": (2, 4),
    "experimental_attention_variant": ("gated_delta_net",),
    "fim_data": (True,),
    "heterogeneous_layers_config_path": ("layers.json",),
    "mtp_num_layers": (1, 2),
    "reset_attention_mask": (True,),
    "reset_position_ids": (True,),
    "sft": (True,),
    "spec": (["module", "spec"],),
    "yaml_cfg": ("run.yaml",),
}


def test_each_flag_is_refused_unless_it_has_megatrons_default(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.training.arguments import add_megatron_arguments

    defaults = vars(add_megatron_arguments(argparse.ArgumentParser()).parse_args([]))
    assert script._BEYOND.keys() == GIVEN.keys()
    assert {n: defaults.get(n, d) for n, d in script._BEYOND.items()} == script._BEYOND
    monkeypatch.setattr(script, "core_transformer_config_from_args", lambda args: 1 / 0)
    for name, values in GIVEN.items():
        for value in values:
            args = SimpleNamespace(**{**defaults, name: value})
            monkeypatch.setattr(script, "get_args", lambda args=args: args)
            with pytest.raises(SystemExit, match=f"^--{name.replace('_', '-')} needs Megatron's"):
                script.build_model()
    monkeypatch.setattr(script, "get_args", lambda: SimpleNamespace(**defaults))
    with pytest.raises(ZeroDivisionError):  # not refused
        script.build_model()
