"""What ``scripts/pretrain_gpt_minimal.py`` does not follow, it refuses."""

from __future__ import annotations

from tests.support.checkouts import result


def test_each_flag_is_refused_unless_it_has_megatrons_default() -> None:
    found = result("megatron.cases.minimal_script_cases", tag="installed")
    assert found["own"] == found["megatrons"]
    assert found["said"].keys() == found["own"].keys()
    for name, texts in found["said"].items():
        flag = f"--{name.replace('_', '-')}"
        assert texts and all(text.startswith(f"{flag} needs Megatron's own") for text in texts)
    assert found["without"] == ""
