"""Every command in README and docs: run, or listed with a reason and its flags checked."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_ext import cli
from megatron_ext.integration.flags import FLAGS
from megatron_ext.schedule import generate, simulate
from tests.campaigns import agent
from tests.support import ROOT, pages
from tests.support.checkouts import MAIN_TAG, existing, missing
from tests.support.pages import PAGES, Command, name_of
from tests.support.waiting import PATIENCE

HOSTED = "https://github.com/NVIDIA/Megatron-LM.git"
NAMES = {flag.name for flag in FLAGS}
USER_FLAGS = """--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048
--micro-batch-size 1 --global-batch-size 8 --pipeline-model-parallel-size 2 --vocab-size 32000
--untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer"""

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 32000,
}


def run_commands(page: Path) -> list[Command]:
    """What of a page is run."""
    return [command for command in pages.commands(page) if pages.reason(command) is None]


def _needs_checkout(page: Path) -> bool:
    return any(re.search(r"torchrun|Megatron-LM", c.text) for c in run_commands(page))


def _environment(folder: Path) -> dict[str, str]:
    """A person's shell in a fresh clone, where GitHub is the cached checkout."""
    clean = re.compile(r"MEGATRON|PYTHON|SLURM|DATA_PATH|CHECKPOINT_DIR")
    env = {name: value for name, value in os.environ.items() if not clean.match(name)}
    env |= {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{folder / 'hosted.git'}.insteadOf",
        "GIT_CONFIG_VALUE_0": HOSTED,
        "YOUR_FLAGS": USER_FLAGS,
    }
    return env


def _fresh_clone(folder: Path) -> None:
    """What the commands see of this repository, without its own virtual environments."""
    for name in ("megatron_ext", "patches", "scripts", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "docs" / "images").mkdir(parents=True)
    (folder / "my_flags.txt").write_text(USER_FLAGS)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    (folder / "bin").mkdir()
    tool = f'#!/bin/sh\nexec "{sys.executable}" -m megatron_ext "$@"\n'
    (folder / "bin" / "megatron-ext").write_text(tool)
    (folder / "bin" / "megatron-ext").chmod(0o755)
    for name in ("python3", "python"):
        (folder / "bin" / name).symlink_to(sys.executable)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Path]]:
    """The program that forks CPU ranks, started when the first page needs it."""
    with contextlib.ExitStack() as stack:
        started: list[Path] = []

        def start() -> Path:
            if not started:
                folder = tmp_path_factory.mktemp("agent")
                started.append(stack.enter_context(agent.ranks_for(folder)))
            return started[0]

        yield start


def _hosted(folder: Path) -> None:
    """The cached checkout with its tag, which the cache may lack, in GitHub's place."""
    hosted = str(folder / "hosted.git")
    clone = ["git", "clone", "--quiet", "--bare", f"file://{existing(MAIN_TAG)}", hosted]
    for command in (clone, ["git", "-C", hosted, "tag", "--force", MAIN_TAG, "HEAD"]):
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)


def _run(lines: list[str], folder: Path, env: dict[str, str]) -> None:
    script = "set -euo pipefail\n" + "\n".join(lines) + "\n"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("page", [p for p in PAGES if run_commands(p)], ids=name_of)
def test_a_page_from_top_to_bottom(page: Path, tmp_path: Path, ranks: Callable[[], Path]) -> None:
    env = _environment(tmp_path)
    # Some pages expect an installed command only; PYTHONPATH is set by those that teach it.
    env["PYTHONPATH"] = str(tmp_path)
    _fresh_clone(tmp_path)
    lines = [command.text for command in run_commands(page)]
    if _needs_checkout(page):
        if reason := missing(MAIN_TAG):
            pytest.skip(reason)
        if any(HOSTED in line for line in lines):
            _hosted(tmp_path)
        if any("path/to/Megatron-LM" in line for line in lines):
            command = ["git", "clone", "--quiet", "--shared", str(existing(MAIN_TAG))]
            target = tmp_path / "path" / "to" / "Megatron-LM"
            subprocess.run([*command, str(target)], check=True, timeout=PATIENCE)
    if any("torchrun" in line for line in lines):
        (tmp_path / "bin" / "torchrun").symlink_to(ranks())
    _run(lines, tmp_path, env)


@pytest.mark.version(MAIN_TAG)
def test_readme_from_a_clone_to_a_run(tmp_path: Path) -> None:
    """The README's run on CPU ranks by torchrun itself, on a checkout that it has patched."""
    found = [command.text for command in pages.commands(ROOT / "README.md")]
    wanted = ("git clone", "python3 -m megatron_ext patch apply", "export PYTHONPATH", "FLAGS=(")
    lines = [line for line in found if line.startswith(wanted)]
    (run,) = [line for line in found if "${FLAGS" in line and "--device cpu" in line]
    assert len(lines) == len(wanted) and "--pp-schedule v-half" in "".join(lines)
    _fresh_clone(tmp_path)
    _hosted(tmp_path)
    text = f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n'
    (tmp_path / "bin" / "torchrun").write_text(text)
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    _run(
        [*lines, f"{run} >log 2>&1 || {{ tail log; exit 1; }}"],
        tmp_path,
        _environment(tmp_path),
    )
    log = (tmp_path / "log").read_text()
    assert "--pp-schedule v-half on megatron-core 0.19" in log
    assert re.search(r"iteration +5/ +5 .* lm loss: \d", log.replace("\n", " "))


def listed() -> list[Command]:
    """All commands that are not run."""
    everything = [command for page in PAGES for command in pages.commands(page)]
    return [command for command in everything if pages.reason(command) is not None]


@pytest.mark.parametrize("command", listed(), ids=lambda c: f"{c.page}:{c.line}")
def test_what_is_not_run_is_right_as_far_as_can_be_seen(command: Command) -> None:
    text = re.sub(r"<[a-z ]+>", "FLAGS", command.text)
    assert subprocess.run(["bash", "-n", "-c", text], timeout=PATIENCE).returncode == 0
    words = shlex.split(command.bare.replace("…", "FLAGS").replace("<your usual flags>", ""))
    if "--" in words:
        words = words[: words.index("--")]  # what follows is another program's command line
    if words[0] == "megatron-ext":
        helped = io.StringIO()
        with contextlib.redirect_stdout(helped), contextlib.suppress(SystemExit):
            cli.main([words[1], "--help"])
        known = set(re.findall(r"--[a-z0-9-]+", helped.getvalue()))
        if words[1] != "plan":  # which takes all of Megatron's flags
            assert {w for w in words if w.startswith("--")} <= known
    for word in words:
        flag = word.split("=")[0]
        if re.match(r"--(pp|moe-pipeline|moe-memory)-", flag):
            assert flag in NAMES
        if re.match(r"(\./)?scripts/", word):
            assert (ROOT / word).is_file()


def test_reasons_are_used() -> None:
    """A pattern that no command has any more goes."""
    everything = [command.bare for page in PAGES for command in pages.commands(page)]
    for pattern in pages.NOT_RUN:
        assert any(re.match(pattern, text) for text in everything), pattern


def test_most_commands_are_run() -> None:
    """Guards the extraction: fenced and indented commands of many pages are found and run."""
    found = {name_of(page): len(run_commands(page)) for page in PAGES}
    assert sum(found.values()) >= 50
    assert found["README.md"] >= 8 and found["docs/start/quick-start.md"] >= 8
    assert found["docs/guides/planning.md"] >= 1


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_and_links_exist(page: Path) -> None:
    text = page.read_text()
    recipe = set(re.findall(r"Flag\(\s*\"(--[a-z0-9-]+)", text))  # of a feature that is to be added
    for flag in re.findall(r"`(--(?:pp|moe-pipeline|moe-memory)-[a-z0-9-]+)", text):
        assert flag in NAMES | recipe, f"{name_of(page)}: {flag}"
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{name_of(page)}: {target}"
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]*)\)", text):
        if not target.startswith("http"):
            other = page.parent / target if target else page
            heads = re.findall(r"(?m)^#+ (.*)$", other.read_text())
            anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in anchors, f"{name_of(page)}: {target}#{anchor}"


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(index.parent)
        assert page == index or f"({name})" in index.read_text(), name


def test_every_command_of_the_tool_is_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text()
    for name in cli.COMMANDS:
        assert f"megatron-ext {name}" in text, name


def test_numbers_of_the_choosing_page() -> None:
    """Its table, simulated anew: peak at m = 32, and the bubble at each m."""
    text = (ROOT / "docs" / "start/choosing.md").read_text()
    rows = re.findall(
        r"(?m)^\| `([a-z0-9-]+)`(?:, `([a-z0-9-]+)`)? \| ([\d.]+).*?\| (.* %) \|$", text
    )
    assert len(rows) == 6
    for first, second, peak, bubbles in rows:
        for name in filter(None, (first, second)):
            runs = [simulate(generate(name, 8, m)) for m in (8, 16, 32, 64)]
            assert float(max(runs[2].peak_activation)) == float(peak), name
            assert [f"{float(100 * run.bubble):.2f} %" for run in runs] == bubbles.split(" | "), (
                name
            )
    pictures = (ROOT / "docs" / "concepts/schedules.md").read_text()
    said = re.findall(
        r"(?m)^`([a-z-]+)`.*?: ([\d.]+ %)(?: idle)?, peak ([\d.]+)(?: microb.*)?\.$", pictures
    )
    said += re.findall(r"(?m)^`(zb-h1)`, W .*: ([\d.]+ %), peak ([\d.]+)\.$", pictures)
    assert len({name for name, _, _ in said}) == 6
    for name, bubble, peak in said:
        run = simulate(generate(name, 4, 8))
        assert (f"{float(100 * run.bubble):.2f} %", float(max(run.peak_activation))) == (
            bubble,
            float(peak),
        ), name
