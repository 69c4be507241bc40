"""Wheel and source archive: the same bytes each time, complete, and usable where torch is not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from megatron_ext import __version__, patching
from megatron_ext.releases import NEWEST, TAGS
from tests.support import ROOT
from tests.support.waiting import PATIENCE

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
CONTENTS = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
CONTENTS += ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md")
FOLDERS = ("megatron_ext", "patches", "docs", "examples", "scripts")
# Where a wheel's files that are no modules go.
DATA = f"megatron_ext-{__version__}.data/data/share/megatron-ext"

BUILD = """import sys
from setuptools import build_meta
target = sys.argv[1]  # the builds change sys.argv
for build in (build_meta.build_wheel, build_meta.build_sdist):
    build(target)
"""


def build(folder: Path, umask: int) -> dict[str, Path]:
    """Build from a fresh copy of the sources: ``{"wheel": ..., "sdist": ...}``."""
    pytest.importorskip("setuptools", "77", reason="needs setuptools 77 or later")
    source, target = folder / "source", folder / "dist"
    source.mkdir(parents=True)
    for name in CONTENTS:
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for path in source.rglob("*"):  # as another person's checkout has them
        mode = path.stat().st_mode & 0o777
        path.chmod((mode | 0o666 if path.is_file() else 0o777) & ~umask)
        os.utime(path, (time.time(), 1_000_000_000 + umask))
    target.mkdir()
    env = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(target)],
        cwd=source,
        env=env,
        umask=umask,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = target.glob("*.whl"), target.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the source archive of this checkout."""
    return build(tmp_path_factory.mktemp("first"), 0o022)


def test_what_they_hold(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        inside = {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(built["sdist"]) as archive:
        names = {member.name.partition("/")[2] for member in archive}
    assert set(CONTENTS) <= names
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*")):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        name = str(path.relative_to(ROOT))
        assert name in names
        if name.startswith("megatron_ext/"):
            assert inside[name] == path.read_bytes()
        elif name.startswith("patches/"):
            assert inside[f"{DATA}/{name}"] == path.read_bytes()
    assert not [name for name in names if "__pycache__" in name]
    metadata = next(
        text.decode() for name, text in inside.items() if name.endswith("dist-info/METADATA")
    )
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nRequires-Python: >=3.10\n" in metadata
    extras = set(re.findall(r"Provides-Extra: (\S+)", metadata))
    assert {"megatron", "torch", "transformer-engine", "docs", "dev", "trace"} <= extras
    needed = re.findall(r"Requires-Dist: (.*)", metadata)
    assert needed and all("extra ==" in line for line in needed), "no extra, no dependency"


def test_the_version_stands_in_one_place() -> None:
    assert __version__ not in (ROOT / "pyproject.toml").read_text()
    assert __version__ not in (ROOT / "setup.py").read_text()
    sources = [*(ROOT / "megatron_ext").rglob("*.py"), *(ROOT / "scripts").rglob("*.sh")]
    holders = [path for path in sources if __version__ in path.read_text()]
    assert holders == [ROOT / "megatron_ext" / "__init__.py"]


def interpreter(version: str) -> Path | None:
    """A working Python of ``version``, on PATH or among pyenv's."""
    found = [shutil.which(f"python{version}")]
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found += sorted(map(str, (root / "versions").glob(f"{version}.*/bin/python3")))
    for path in filter(None, found):
        command = [path, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode == 0 and done.stdout.strip() == version:
            return Path(path)
    return None


def test_the_citation_names_the_last_release() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    (cited,) = re.findall(r"^version: (.*)$", text, re.M)
    (day,) = re.findall(r"^date-released: (.*)$", text, re.M)
    releases = re.findall(r"^## \[([\d.]+)\] - (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert releases[0] == (cited, day)


def write_checkout(folder: Path) -> Path:
    """A tree that looks like the newest supported Megatron; the file that is patched."""
    folder.mkdir()
    arguments, info = folder / patching.FILE, folder / patching.PACKAGE_INFO
    for path in (arguments, info):
        path.parent.mkdir(parents=True)
    arguments.write_text(
        "def parse_args(extra_args_provider=None, ignore_unknown_args=False):\n    pass\n"
    )
    major, minor = NEWEST.line
    info.write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = 0\nPRE_RELEASE = ''\n")
    return arguments


@pytest.mark.parametrize("version", VERSIONS)
def test_installs_without_torch(version: str, built: dict[str, Path], tmp_path: Path) -> None:
    """Into an empty environment: no index, no dependency; then its tools work."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"needs Python {version}; install it, or `pyenv install {version}`")
    pytest.importorskip("pip", "22.3", reason="needs pip 22.3 or later")
    venv = tmp_path / "venv"
    subprocess.run([python, "-m", "venv", "--without-pip", venv], check=True, timeout=PATIENCE)
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install"]
    pip += ["--quiet", "--disable-pip-version-check", "--no-index", str(built["wheel"])]
    subprocess.run(pip, check=True, timeout=PATIENCE)

    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MEGATRON"))}

    def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(venv / "bin" / "megatron-ext"), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE
        )

    sizes = ("--schedule", "v-half", "--pp", "4", "--microbatches", "8")
    assert json.loads(tool("simulate", *sizes, "--json").stdout)["makespan"] == 26.5
    assert tool("show", "--schedule", *sizes[1:], "--output", "s.svg").returncode == 0
    assert tool("--version").stdout.strip() == f"megatron-ext {__version__}"
    doctor = tool("doctor")
    assert doctor.returncode == 1  # no torch
    assert f"patches for {', '.join(TAGS)}" in doctor.stdout

    arguments = write_checkout(tmp_path / "Megatron-LM")
    stock = arguments.read_bytes()
    assert tool("patch", "apply", "Megatron-LM").returncode == 0
    assert b"megatron_ext.apply" in arguments.read_bytes()
    assert tool("patch", "status", "Megatron-LM").returncode == 0
    assert tool("patch", "revert", "Megatron-LM").returncode == 0
    assert arguments.read_bytes() == stock
    installed = {
        path.parent.name for path in (venv / "share/megatron-ext/patches").rglob("*.patch")
    }
    assert installed == set(TAGS)
