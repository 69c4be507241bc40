"""Megatron-Bridge's recipes with a pipeline, by the planner; benchmarks/bridge-recipes.md."""

from __future__ import annotations

import pytest

from benchmarks.bridge_recipes import PAGE, page, verdicts

pytestmark = pytest.mark.campaign

# Llama 3.1 405B with more bytes than the device has; the page says why. None has been published.
INFEASIBLE = {
    *(f"llama31_405b_pretrain_128gpu_b200_{kind}" for kind in ("bf16", "fp8cs", "fp8mx")),
    *(f"llama31_405b_pretrain_128gpu_gb200_{kind}" for kind in ("bf16", "fp8cs")),
    "llama31_405b_pretrain_256gpu_gb200_bf16",
}


def test_what_nvidia_published_is_feasible():
    found = verdicts()
    published = [one for one in found if "published" in one.fact and one.worst is not None]
    assert len(published) >= 26
    assert all(one.fits for one in published)
    assert {o.fact["recipe"] for o in found if o.worst and not o.fits} == INFEASIBLE


def test_the_page_is_what_the_script_writes():
    assert PAGE.read_text(encoding="utf-8") == page(verdicts())
