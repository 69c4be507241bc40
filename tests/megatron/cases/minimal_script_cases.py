"""Gives ``scripts/pretrain_gpt_minimal.py`` each flag that it refuses; prints one JSON object."""

from __future__ import annotations

import argparse
import importlib.util
import json
from types import SimpleNamespace
from typing import Any

from megatron_ext import cpu
from tests.support import ROOT

cpu.install()

# Values that are not Megatron's default.
GIVEN: dict[str, tuple[Any, ...]] = {
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


def main() -> None:
    """See the module's text."""
    from megatron.training.arguments import add_megatron_arguments

    path = ROOT / "scripts" / "pretrain_gpt_minimal.py"
    spec = importlib.util.spec_from_file_location("pretrain_gpt_minimal", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    defaults = vars(add_megatron_arguments(argparse.ArgumentParser()).parse_args([]))

    def said(**given: Any) -> str:
        """How the script refuses these arguments; empty if it goes on."""
        script.get_args = lambda: SimpleNamespace(**{**defaults, **given})
        script.core_transformer_config_from_args = lambda args: 1 / 0
        try:
            script.build_model()
        except SystemExit as end:
            return str(end.code)
        except ZeroDivisionError:
            return ""
        raise AssertionError

    out = {
        "own": script._BEYOND,
        "megatrons": {name: defaults.get(name, own) for name, own in script._BEYOND.items()},
        "said": {
            name: [said(**{name: value}) for value in values] for name, values in GIVEN.items()
        },
        "without": said(),
    }
    print("RESULT " + json.dumps(out))


if __name__ == "__main__":
    main()
