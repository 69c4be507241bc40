"""Every script of ``examples`` proves what it says, and fails where a number differs."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support import ROOT
from tests.support.case_server import Cases, case_results
from tests.support.checkouts import nightly, run
from tests.support.grids import sampled

EXAMPLES = ROOT / "examples"
README = EXAMPLES / "README.md"
results = case_results("megatron.cases.example_cases")

_TRAINED = ["equal bit for bit: losses", "equal bit for bit: gradients, 101", "bit: weights, 101"]
# script -> what it must print, as patterns in order.
PROOFS = {
    "train_v_half": [
        *_TRAINED,
        r"activations held, in microbatches: \[2.0, 2.0\], at most 2",
        r"simulated, p = 2, m = 8: bubble 11.1% under 1F1B, 2.0% under V-Half; .* 2 and 2 micro",
        r"simulated, p = 8, m = 16: bubble 30.4% under 1F1B, 15.0% under V-Half; .* 8 and 5 micro",
    ],
    "custom_schedule": [
        "refused: the order cannot progress: .* wait for each other in a circle",
        "simulated: 25 units, bubble 4.0%; 1F1B 27, 11.1%; the same peak",
        *_TRAINED,
        "the passes ran in the order that was written",
    ],
    "offload_policy": [
        *_TRAINED,
        *_TRAINED,
        *_TRAINED,
        r"rank 0: activations on the device at most 10\.\d MiB if all stay, 7\.\d .*, 5\.\d if all",
        "rank 1: activations on the device at most",
        "device bytes are those of the plan",
    ],
    "moe_chunks": [
        "equal bit for bit: one chunk, restored for backward, 22",
        r"4 chunks, memory reuse none: output and 21 gradients within \d.\de-1\d",
        r"4 chunks, memory reuse s4: output and 21 gradients within \d.\de-1\d",
        r"rank 0 keeps \d.\d MiB for backward; run at once, 1\d.\d",
        r"rank 1 keeps \d.\d MiB for backward; run at once, 1\d.\d",
    ],
    "any_trainer": [
        "equal bit for bit: losses and log-probabilities, 96",
        "equal bit for bit: weights, 101",
        "simulated bubble: 11.1% under 1F1B, 4.0% under ZB-H1",
    ],
}
# The same comparisons as in the first, with a schedule or a policy of one's own.
NIGHTLY = ("custom_schedule", "offload_policy")


@pytest.mark.parametrize("script", sampled(PROOFS, [s for s in PROOFS if s not in NIGHTLY]))
def test_an_example_proves_what_it_says(results: Cases, script: str) -> None:
    found = results[script]
    assert found["status"] == [0, 0], found["output"]
    assert re.search(".*".join(PROOFS[script]), found["output"], re.S), found["output"]
    assert "FAILED" not in found["output"]


@pytest.mark.parametrize(
    "script",
    [
        "moe_chunks",
        "any_trainer",
        # They compare with the same functions.
        *(nightly(script) for script in ("train_v_half", "custom_schedule", "offload_policy")),
    ],
)
def test_an_example_fails_where_a_number_differs(results: Cases, script: str) -> None:
    found = results[f"{script}-wrong"]
    assert found["status"] == [1, 1], found["output"]
    assert re.search("^FAILED: .* differ", found["output"], re.M), found["output"]


def test_the_page_names_every_example() -> None:
    text = README.read_text()
    scripts = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert scripts - {"tiny.py"} == {f"{name}.py" for name in PROOFS} | {"schedules.ipynb"}
    assert [name for name in scripts if f"({name})" not in text] == []
    assert sorted(PROOFS) == sorted(re.findall(r"torchrun .* examples/(\w+)\.py", text))


def test_examples_are_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 250, path.name


@pytest.mark.campaign
@pytest.mark.parametrize("script", PROOFS)
def test_the_command_on_the_page_runs(script: str) -> None:
    """With torchrun itself; on a port of its own, as other tests run beside it."""
    (line,) = re.findall(rf"^torchrun (.*) examples/{script}\.py$", README.read_text(), re.M)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = run([*torchrun, *line.split(), str(EXAMPLES / f"{script}.py")])
    assert done.returncode == 0, done.stdout
    assert re.search(".*".join(PROOFS[script]), done.stdout, re.S), done.stdout
