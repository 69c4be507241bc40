"""The code of docs/develop/extending.md, run as it stands there."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.integration import entry_point, flags
from megatron_ext.integration.feature import Feature, Run
from megatron_ext.integration.features.offload.policy import SavedTensor, policy_of
from megatron_ext.integration.install import Installation
from megatron_ext.schedule import check, lower, simulate
from megatron_ext.schedule.generators import GENERATORS, generate
from megatron_ext.schedule.generators.registry import Generator
from tests.support import ROOT
from tests.support.stand_ins import megatron_args

PAGE = (ROOT / "docs" / "develop/extending.md").read_text()


@pytest.fixture
def code(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the only Python block below the heading ``request.param`` defines."""
    section = PAGE.split(f"## {request.param}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"^( *)```python\n(.*?)^ *```", section, re.DOTALL | re.MULTILINE)
    text = re.sub(f"^{block[0]}", "", block[1], flags=re.MULTILINE)
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(text, request.param, "exec"), names)
    return names


@pytest.mark.parametrize("code", ["Add a schedule"], indirect=True)
def test_schedule(code: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Generator(code["one_after_the_other"], "loop", 1, False, False, "GPipe")
    monkeypatch.setitem(GENERATORS, "gpipe", entry)
    schedule = generate("gpipe", 4, 8)
    check(lower(schedule))
    assert simulate(schedule).peak_sets == [8] * 4


@pytest.mark.parametrize("code", ["Add a feature: a flag, a hook, an event"], indirect=True)
def test_feature(code: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The class alone, in the list: no other file knows of it."""
    from megatron.core.optimizer import clip_grads

    kind: type[Feature] = code["CountClipping"]
    monkeypatch.setattr(flags, "FLAGS", (*flags.FLAGS, *kind.flags))
    assert flags.wanted(["--pp-count-clipping"])
    assert flags.defaults({"pp_count_clipping": True}) == {"pp_count_clipping": "True"}
    monkeypatch.setattr(entry_point, "FEATURES", (kind,))
    original = clip_grads.clip_grad_by_total_norm_fp32
    installation = Installation()
    (clipping,) = installation.features
    assert clipping.start(Run(megatron_args(), "0.0.0")) == ()
    args = megatron_args(pp_count_clipping=True, rank=0)
    try:
        installation.start(Run(args, "0.0.0"))
        assert clip_grads.clip_grad_by_total_norm_fp32 is not original
        counted = clipping.hooks()[0].make(lambda *unused: None)
        for norm in (0.5, 2.0):
            counted([], 1.0, norm)
        step: Any = SimpleNamespace(training=True)
        clipping.end(step)
        assert (clipping.clipped, clipping.iterations) == (1, 1)  # type: ignore[attr-defined]
    finally:
        installation.revert()
    assert clip_grads.clip_grad_by_total_norm_fp32 is original


@pytest.mark.parametrize("code", ["Add an offload policy"], indirect=True)
def test_offload_policy(code: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_policies")
    module.keep_first_layer = code["keep_first_layer"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_policies", module)
    policy = policy_of("my_policies:keep_first_layer")
    tensor = torch.ones(1)
    assert policy(SavedTensor(tensor, "decoder.layers.0.mlp.linear_fc1"))
    assert not policy(SavedTensor(tensor, "decoder.layers.10.mlp"))
