"""Hooks: applied everywhere, reverted to identity, all or nothing; untouched without our flags."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.integration import ConfigError
from megatron_ext.integration.flags import wanted
from megatron_ext.integration.versions import require_supported
from megatron_ext.releases import NEWEST, RELEASES, TAGS
from tests.support.checkouts import nightly, result, version


@pytest.fixture(scope="module", params=[nightly("installed"), *map(version, TAGS)])
def hooks(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What hook_cases.py found on the installed megatron-core, and on each stock checkout."""
    return result("megatron.cases.hook_cases", tag=request.param, fresh=True)


class TestOnMegatron:
    def test_without_flags_nothing_is_touched_nor_loaded(self, hooks: dict[str, Any]) -> None:
        assert hooks["installed_without_flags"] is None
        assert hooks["megatron_loaded_without_flags"] is False

    def test_every_target_is_replaced_and_then_restored(self, hooks: dict[str, Any]) -> None:
        assert set(hooks["changed"].values()) == {True}
        assert set(hooks["restored"].values()) == {True}

    def test_modules_that_imported_by_name_are_rebound(self, hooks: dict[str, Any]) -> None:
        assert hooks["consumer_rebound"] is True
        assert "a_training_script" in hooks["report"]

    def test_only_declared_symbols_change_and_all_come_back(self, hooks: dict[str, Any]) -> None:
        names = {symbol.split(":")[1] for symbol in hooks["changed_symbols"]}
        assert names == {target.split(":")[1] for target in hooks["changed"]}
        assert hooks["same_after_revert"] is True

    def test_a_newer_version_is_hooked_with_a_warning(self, hooks: dict[str, Any]) -> None:
        (warning,) = hooks["warnings"]
        assert "megatron-core 99.1.0 is newer" in warning
        assert hooks["newer_is_hooked"] is True

    def test_a_missing_hook_binds_nothing_and_says_so(self, hooks: dict[str, Any]) -> None:
        assert "99.1.0 has no megatron.core.parallel_state:no_such" in hooks["missing_error"]
        assert hooks["missing_all_or_nothing"] is True

    def test_a_changed_signature_binds_nothing_and_says_so(self, hooks: dict[str, Any]) -> None:
        assert "expects ['no_such_parameter']" in hooks["signature_error"]
        assert hooks["signature_all_or_nothing"] is True

    def test_a_replacement_that_takes_less_binds_nothing(self, hooks: dict[str, Any]) -> None:
        """A newer Megatron passes what the function has gained since."""
        assert "that its replacement by megatron_ext does not know" in hooks["narrow_error"]
        assert "'pipeline_model_parallel_size'" in hooks["narrow_error"]
        assert hooks["narrow_all_or_nothing"] is True


@pytest.mark.parametrize("version", [*(r.version for r in RELEASES), f"{NEWEST.version}+abc123"])
def test_supported_versions(version: str, caplog: pytest.LogCaptureFixture) -> None:
    require_supported(version)
    assert caplog.text == ""


@pytest.mark.parametrize("version", ["0.15.3", "0.17.1", "unknown"])
def test_older_versions_are_refused_with_the_supported_ones(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"supports 0.18 to .*{NEWEST.tag}|cannot read"):
        require_supported(version)


@pytest.mark.parametrize("version", ["0.21.0", "0.21.0rc0+abc123", "1.0.0"])
def test_newer_versions_are_warned_of_by_one_rank(
    version: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    require_supported(version)
    assert caplog.text == ""
    monkeypatch.setenv("RANK", "0")
    require_supported(version)
    assert f"megatron-core {version} is newer" in caplog.text
    assert TAGS[-1] in caplog.text and "checked before it trains" in caplog.text


@pytest.mark.parametrize(
    ("argv", "on"),
    [
        (["--pp-schedule", "v-half"], True),
        (["--pp-schedule=v-half"], True),
        (["--help"], True),
        (["--num-layers", "8", "--pipeline-model-parallel-size", "4"], False),
        ([], False),
    ],
)
def test_our_flags_are_recognised(argv: list[str], on: bool) -> None:
    assert wanted(argv) is on


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--pp-shedule", "--pp-schedule"),
        ("--pp_schedule", "--pp-schedule"),
        ("--moe-pipelin-chunks", "--moe-pipeline-chunks"),
    ],
)
def test_misspelt_flags_are_refused_before_megatron_sees_them(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"{typed} is not known; did you mean {meant}\?"):
        wanted([typed, "v-half"])


def test_megatrons_own_flags_are_not_taken_for_ours() -> None:
    assert not wanted(["--profile", "--grpo-group-size", "4", "--rl-profile", "--scheduler"])
