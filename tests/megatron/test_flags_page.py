"""docs/reference/flags.md is made of the flags; it needs torch, as they do."""

from __future__ import annotations

from megatron_ext.integration.flags import FLAGS
from scripts import reference_pages


def test_the_page_of_flags_is_up_to_date() -> None:
    page = (reference_pages.FOLDER / "flags.md").read_text()
    assert page == reference_pages.flags(), "python -m scripts.reference_pages flags"
    for flag in FLAGS:
        assert f"| `{flag.name}" in page, flag.name
