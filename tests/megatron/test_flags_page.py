"""docs/reference/flags.md and refused.md are made of the flags; it needs torch, as they do."""

from __future__ import annotations

import pytest

from megatron_ext.integration.features import FEATURES
from megatron_ext.integration.flags import FLAGS
from scripts import reference_pages


@pytest.mark.parametrize("name", ["flags", "refused"])
def test_the_pages_of_flags_are_up_to_date(name: str) -> None:
    page = (reference_pages.FOLDER / f"{name}.md").read_text()
    assert page == reference_pages.PAGES[name](), f"python -m scripts.reference_pages {name}"


def test_they_have_every_flag_and_every_conflict() -> None:
    flags, refused = (
        (reference_pages.FOLDER / f"{name}.md").read_text() for name in ("flags", "refused")
    )
    for flag in FLAGS:
        assert f"| `{flag.name}" in flags, flag.name
    for feature in FEATURES:
        for rule in feature.conflicts:
            assert f"| `{rule.flag}" in refused and rule.reason in refused, rule
