"""docs/reference/flags.md is made of the flags; it needs torch, as they do."""

from __future__ import annotations

from megatron_ext.integration.flags import FLAGS
from scripts import reference_pages

PAGE = (reference_pages.FOLDER / "flags.md").read_text()


def test_the_page_is_up_to_date() -> None:
    assert reference_pages.flags() == PAGE, "python -m scripts.reference_pages"


def test_it_has_every_flag() -> None:
    for flag in FLAGS:
        assert f"| `{flag.name}" in PAGE, flag.name
