"""The one list of supported Megatron releases, and what must agree with it."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from megatron_ext.releases import LIST, NEWEST, RELEASES, TAGS, line
from tests.support import ROOT


def test_oldest_first_one_of_a_line() -> None:
    lines = [release.line for release in RELEASES]
    assert lines == sorted(set(lines))
    for release in RELEASES:
        assert line(release.tag.removeprefix("core_v")) == release.line
    assert (NEWEST, TAGS[-1]) == (RELEASES[-1], NEWEST.tag)


def test_the_extra_installs_a_supported_release() -> None:
    found = re.search(r'"megatron-core>=(\S+),<(\S+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    assert found[1] == RELEASES[0].wheel
    assert line(found[2]) == (NEWEST.line[0], NEWEST.line[1] + 1)


@pytest.mark.parametrize("page", ["README.md", "docs/17-support.md"])
def test_pages_name_every_release(page: str) -> None:
    text = (ROOT / page).read_text()
    for release in RELEASES:
        assert release.tag.removeprefix("core_v") in text, release.tag
    assert NEWEST.wheel in text


@pytest.mark.skipif(shutil.which("awk") is None, reason="needs awk")
def test_scripts_read_it() -> None:
    for python in [(3, minor) for minor in range(10, 15)]:
        version = ".".join(map(str, python))
        code = f"source scripts/lib.sh; requirements {version} | head -n 2"
        done = subprocess.run(["bash", "-c", code], cwd=ROOT, capture_output=True, text=True)
        release = [r for r in RELEASES if r.python <= python][-1]
        wanted = [f"megatron-core=={release.wheel}", f"torch=={release.torch}"]
        assert done.stdout.splitlines() == wanted, done.stderr


def test_no_other_list() -> None:
    """Code spells no release but where one behaves differently from the others."""
    others = [release.wheel for release in RELEASES[1:]]
    paths = [*(ROOT / "megatron_ext").rglob("*.py"), *(ROOT / "scripts").rglob("*.*")]
    paths += [ROOT / "setup.py", *(ROOT / "tests" / "support").rglob("*.py")]
    found = [
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.is_file() and path.suffix in (".py", ".sh", ".sbatch")
        if sum(version in path.read_text() for version in others) > 1
    ]
    assert found == []
    assert LIST.read_text().count("core_v") >= len(RELEASES)
