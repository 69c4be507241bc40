"""The one list of supported Megatron releases, and what must agree with it."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from megatron_ext.releases import NEWEST, RELEASES, closest, line, parse
from tests.support import ROOT


def test_oldest_first_one_release_of_a_line() -> None:
    versions = [parse(release.version) for release in RELEASES]
    assert versions == sorted(set(versions))
    lines = [release.line for release in RELEASES if release.tagged]
    assert len(lines) == len(set(lines)) and lines[-1] == NEWEST.line
    for release in RELEASES:
        name = f"core_v{release.version}-{release.commit[:8]}"
        assert release.tag == name or release.tagged, release
        assert line(release.tag.removeprefix("core_v")) == release.line
        assert release.tagged or re.fullmatch("[0-9a-f]{40}", release.commit)


def test_order_of_versions() -> None:
    """As PEP 440 has it."""
    ordered = (
        *("0.17.3", "0.18.0.dev7", "0.18.0a1", "0.18.0rc0.dev132713", "0.18.0rc0"),
        *("0.18.0rc1", "0.18.0rc10", "0.18.0", "0.18.1", "0.18.10", "0.20.0", "1.0.0"),
    )
    found = [parse(version) for version in ordered]
    assert found == sorted(set(found))
    assert parse("0.20.0+d98e8a64dd") == parse("0.20.0")
    for wrong in ("unknown", "", "0.19"):
        with pytest.raises(ValueError, match="cannot read"):
            parse(wrong)


@pytest.mark.parametrize(
    ("version", "tag"),
    [
        ("0.18.0rc0", "core_v0.18.2"),
        ("0.18.3", "core_v0.18.2"),
        ("0.19.1", "core_v0.19.0"),
        ("0.20.0+d98e8a64dd", "core_v0.20.0-d98e8a64"),
        ("0.17.1", None),
    ],
)
def test_what_stands_for_a_version(version: str, tag: str | None) -> None:
    found = closest(version)
    assert (found and found.tag) == tag


def test_the_extra_installs_a_supported_release() -> None:
    found = re.search(r'"megatron-core>=(\S+),<(\S+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    # From the first release on: a range that begins with a pre-release would let pip install any.
    assert found[1] == next(release.version for release in RELEASES if release.tagged)
    assert line(found[2]) == (RELEASES[-1].line[0], RELEASES[-1].line[1] + 1)


def test_the_readme_names_the_range_of_versions() -> None:
    first, last = (".".join(map(str, one.line)) for one in (RELEASES[0], RELEASES[-1]))
    assert f"stock Megatron {first} to {last}" in (ROOT / "README.md").read_text()


def test_the_support_page_names_every_release() -> None:
    text = (ROOT / "docs" / "reference" / "support.md").read_text()
    for release in RELEASES:
        name = release.tag.removeprefix("core_v").split("-")[0]
        assert name in text and (release.tagged or release.commit[:8] in text), release.tag
    assert NEWEST.version in text


@pytest.mark.skipif(shutil.which("awk") is None, reason="needs awk")
def test_scripts_read_it() -> None:
    code = "source scripts/lib.sh; requirements | head -n 2"
    done = subprocess.run(["bash", "-c", code], cwd=ROOT, capture_output=True, text=True)
    wanted = [f"megatron-core=={NEWEST.version}", f"torch>=2.13,<={NEWEST.torch}"]
    assert done.stdout.splitlines() == wanted, done.stderr
