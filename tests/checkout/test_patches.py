"""The patch series and the library's door, on real checkouts and on the installed megatron-core."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import cli, patching
from megatron_ext.integration import flags
from megatron_ext.integration.targets import FUNCTIONS, SCHEDULES
from megatron_ext.releases import TAGS
from scripts.make_patches import patch_text
from tests.support import ROOT
from tests.support.checkouts import (
    MAIN_TAG,
    Serve,
    existing,
    result,
    run,
    version,
)

FILE = patching.FILE


def stock(tag: str) -> Path:
    """The checkout of a tag, to read only."""
    found = existing(tag)
    assert patching.status(found).tag == tag, "$MEGATRON_LM is another version"
    return found


def copy(tag: str, target: Path) -> Path:
    """An unmodified copy of what training needs."""
    source = stock(tag)
    # With what Python has compiled, which stays valid and saves every process seconds.
    shutil.copytree(source / "megatron", target / "megatron")
    for script in source.glob("*.py"):
        shutil.copy2(script, target)
    return target


def tree(folder: Path) -> dict[str, tuple[int, str]]:
    """Mode and hash of every file, but what Megatron compiles at its first start."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mode,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }


@pytest.mark.parametrize("tag", [version(tag) for tag in TAGS])
class TestSeries:
    def test_applies_and_reverts_to_the_byte(self, tag: str, tmp_path: Path) -> None:
        folder = copy(tag, tmp_path / tag)
        before = tree(folder)
        assert cli.main(["patch", "status", str(folder)]) == 1
        assert cli.main(["patch", "apply", str(folder)]) == 0
        assert cli.main(["patch", "status", str(folder)]) == 0
        patched = tree(folder)
        assert {path for path in patched if patched[path] != before[path]} == {FILE}
        assert patched[FILE][0] == before[FILE][0]
        compile((folder / FILE).read_bytes(), FILE, "exec")
        assert cli.main(["patch", "apply", str(folder)]) == 0
        assert tree(folder) == patched
        assert cli.main(["patch", "revert", str(folder)]) == 0
        assert tree(folder) == before

        script = str(ROOT / "scripts" / "apply_patches.sh")
        assert subprocess.run([script, str(folder)], check=False).returncode == 0
        assert tree(folder) == patched
        assert subprocess.run([script, str(folder)], check=False).returncode == 0
        assert tree(folder) == patched
        assert subprocess.run([script, "--revert", str(folder)], check=False).returncode == 0
        assert tree(folder) == before

    @pytest.mark.parametrize("how", ["changed", "moved"])
    def test_refuses(self, tag: str, how: str, tmp_path: Path, capsys: Any) -> None:
        for name in (FILE, patching.PACKAGE_INFO):
            (tmp_path / name).parent.mkdir(parents=True)
            shutil.copy2(stock(tag) / name, tmp_path / name)
        file = tmp_path / FILE
        if how == "changed":
            file.write_text(file.read_text().replace("def parse_args(", "def parse("))
        else:
            file.rename(file.with_name("argument_parsing.py"))
        before = tree(tmp_path)
        for action in ("apply", "revert"):
            assert cli.main(["patch", action, str(tmp_path)]) == 2
            assert capsys.readouterr().err.count("\n") == 1
            assert tree(tmp_path) == before

    def test_is_what_the_script_makes(self, tag: str) -> None:
        made = patch_text((stock(tag) / FILE).read_bytes())
        assert made == (ROOT / "patches" / tag / patching.PATCH_NAME).read_text()

    def test_knows_our_flags_and_none_of_megatrons(self, tag: str) -> None:
        """The inserted lines go by prefixes: all of our flags have one, no flag of Megatron's."""
        prefixes = patching.PREFIXES
        assert all(flag.name.startswith(prefixes) for flag in flags.FLAGS)
        for path in (stock(tag) / "megatron").rglob("*.py"):
            for prefix in prefixes:
                assert f"'{prefix}" not in path.read_text().replace('"', "'"), path


def doors(*argv: str) -> dict[str, Any]:
    """What door_cases.py found."""
    return result("megatron.cases.door_cases", *argv, fresh=True)


def check_library(found: dict[str, Any]) -> None:
    """The library's door: hooks, refusals, and every symbol back."""
    assert found["loaded_by_import"] == []
    assert found["stock_knows_flag"] is False
    assert found["unasked_loaded"] is False
    assert "ConfigError: 'pp_shedule' is no option" in found["unknown"]
    assert found["same_after_refusal"] is True
    assert list(found["hooks"]) == [
        "megatron.training.arguments:add_megatron_arguments",
        "megatron.training.arguments:validate_args",
        # Of ``apply(config)``: they refuse to run where no arguments were parsed.
        *(f"{SCHEDULES}:{name}" for name in FUNCTIONS),
    ]
    assert f"4 symbols of megatron-core {found['version']} are replaced" in found["report"]
    assert found["from_config"] == ["v-half", 3, None]
    assert found["command_line_wins"] == "zb-h1"
    assert "ConfigError: megatron_ext is applied already, with 4 hooks" in found["twice"]
    assert found["again"] is True
    assert "applied already" in found["again_with_config"]
    assert "pp_schedule" in found["parsed_before"]
    assert found["same_after_revert"] is True
    assert "nothing of megatron-core" in found["report_after_revert"]


@pytest.mark.matrix
def test_library_on_the_installed_wheel() -> None:
    """By default the patched checkout opens this door too."""
    check_library(doors())


@pytest.mark.parametrize("tag", [version(tag) for tag in TAGS])
def test_doors_of_a_patched_checkout(tag: str, tmp_path: Path) -> None:
    """Both doors, and what the inserted lines do where megatron_ext cannot be imported."""
    folder = copy(tag, tmp_path / tag)
    patching.apply(folder)
    found = doors(str(folder))
    check_library(found)
    assert found["patched_parses"] == ["v-half", "v-half"]
    assert list(found["patched_hooks"]) == list(found["hooks"])[:2]
    assert found["patched_same_after_revert"] is True
    assert (found["patched_under_launcher"], found["hooks_under_launcher"]) == ("v-half", 2)
    assert "SystemExit: --pp-schedule needs megatron_ext" in found["missing"]
    assert found["missing_unasked"] == ""
    assert found["missing_same"] is True


# Training: what a person types, on a machine without a GPU. The launcher's --device cpu is not
# there, so its flags are given, and the CPU stands in for CUDA from the start of Python on.

MODEL = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3
--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 127
--eval-iters 1 --eval-interval 2 --split 90,5,5 --log-interval 1 --attention-dropout 0
--hidden-dropout 0 --untie-embeddings-and-output-weights --ckpt-format torch_dist --bf16
--distributed-backend gloo --transformer-impl local --num-workers 0 --use-cpu-initialization
--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion"""
VEE = ["--pipeline-model-parallel-size", "2", "--pp-schedule", "v-half"]
NUMBERS = re.compile(r"iteration +(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+)")
EVALUATION = re.compile(r"validation loss at iteration (\d+).*?lm loss value: (\S+)")

SITECUSTOMIZE = """
import os, sys
if "RANK" in os.environ:
    import atexit
    import megatron_ext.cpu

    megatron_ext.cpu.install()

    @atexit.register
    def leave():
        # As the launcher does after a CPU run: gloo's threads may abort a process that is done.
        if not hasattr(sys, "last_type"):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
"""


def train(*command: str, ranks: int, **env: str) -> tuple[list[Any], str]:
    """Losses and gradient norms as printed, and the whole log."""
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    else:
        launcher = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        env.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    done = run([sys.executable, *launcher, *command], **env)
    assert done.returncode == 0, done.stdout[-6000:]
    return read(done.stdout)


def read(text: str) -> tuple[list[Any], str]:
    """Losses and gradient norms in a log, and the log."""
    log = text.replace("\n", " ")
    found = NUMBERS.findall(log) + EVALUATION.findall(log)
    assert len(found) >= 3, text[-6000:]
    return found, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout to patch; no other test changes it."""
    return copy(MAIN_TAG, tmp_path_factory.mktemp("training") / "Megatron-LM")


@pytest.fixture
def patched(folder: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[list[Any], str]]]:
    """``patched(*flags, ranks=N)`` trains with the patched script, started by Python alone."""
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    # A checkout compiles its dataset helpers at first start, with this Python's tools.
    own = (os.path.dirname(sys.executable), os.path.join(sys.base_prefix, "bin"))
    tools = os.pathsep.join([*own, os.environ["PATH"]])
    plain = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PATH": tools}
    before = tree(folder)
    patching.apply(folder)
    yield functools.partial(train, str(folder / "pretrain_gpt.py"), *MODEL.split(), **plain)
    patching.revert(folder)
    assert tree(folder) == before


def served(serve: Serve, folder: Path, *flags: str, ranks: int) -> tuple[list[Any], str]:
    """The same by the launcher, on the unmodified checkout."""
    outcome = serve(MAIN_TAG).run([*MODEL.split(), *flags], ranks, folder)
    assert outcome.status == "ok", outcome.report
    return read("".join(map(outcome.log, range(ranks))))


@pytest.mark.timeout(700)
class TestTraining:
    # By default the patched parser installs the same hooks (test_doors_of_a_patched_checkout).
    @pytest.mark.matrix
    def test_patched_script_is_the_launchers_run(
        self, serve: Serve, patched: Any, tmp_path: Path
    ) -> None:
        ours = patched(*VEE, ranks=2)
        launchers = served(serve, tmp_path / "launcher", *VEE, ranks=2)
        assert ours[0] == launchers[0]
        for _, log in (ours, launchers):
            assert "--pp-schedule v-half on megatron-core 0.19" in log

    @pytest.mark.matrix
    def test_patched_without_flags_is_stock(
        self, serve: Serve, patched: Any, tmp_path: Path
    ) -> None:
        off = patched(ranks=1)
        assert off[0] == served(serve, tmp_path / "stock", ranks=1)[0]
        assert "megatron_ext:" not in off[1]
