"""What forty command lines print, against a golden file: a rebuild of a command changes no number.

UPDATE_GOLDEN=1 and --all write the file anew; a change of it needs a reason in the commit.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden" / "commands.json"
COST = "--cost 1,1.1,0.8 --hop 0.05"
SMALL = "--pp 4 --microbatches 8 --effort 0.02"
OFFLOAD = "--offload half --offload-time 0.25"
# One of each kind; by default these only.
QUICK = (
    f"simulate --schedule v-half {SMALL}",
    f"simulate --schedule v-half {SMALL} {OFFLOAD} --json",
    f"compare {SMALL} {COST} --json",
    f"compare {SMALL} --memory-cap 0.6 {OFFLOAD}",
    "show 1f1b zb-h1 --pp 4 --microbatches 6",
    "explore --export %/view.html --view options=--pp+4+--microbatches+6+--effort+0.02&"
    "schedule=1f1b&schedule=v-half",
)
SLOW = (
    f"simulate --schedule 1f1b {SMALL}",
    f"simulate --schedule 1f1b {SMALL} --json",
    f"simulate --schedule zb-h1 {SMALL} {COST} --json",
    f"simulate --schedule zb-h1 {SMALL} {COST} --jitter 0.1 --runs 20",
    f"simulate --schedule zb-h1 {SMALL} {COST} --jitter 0.1 --runs 20 --json",
    f"simulate --schedule interleaved {SMALL} --chunks 3 --objective rank-span",
    f"simulate --schedule v-cap {SMALL} --memory-cap 0.7 {COST}",
    f"simulate --schedule auto {SMALL} {COST} --memory-cap 0.6 --json",
    f"simulate --schedule v-min {SMALL} {OFFLOAD}",
    f"simulate --schedule 1f1b {SMALL} --slices 4 --attention-share 0.3",
    f"simulate --schedule 1f1b {SMALL} --slices 4 --attention-share 0.3 --json",
    f"simulate --schedule 1f1b {SMALL} --microbatch-cost 1,2,1,1,1,1,1,3 --json",
    f"simulate --schedule v-half {SMALL} --vocabulary 0.25,0.25,0.1,0.1",
    f"simulate --schedule v-half {SMALL} --vocabulary 0.25,0.25,0.1,0.1 --json",
    f"simulate --schedule dualpipev {SMALL} --cost 2,2,1 --exchange 1,1 --overlap",
    f"simulate --schedule dualpipev {SMALL} --cost 2,2,1 --exchange 1,1 --overlap --json",
    f"simulate --schedule zb-h1 {SMALL} --p2p pair --queue 1 --json",
    f"compare {SMALL} {COST} --p2p edge",
    "simulate --moe --moe-cost exchange=2,experts=3 --moe-pipeline-chunks 4 --json",
    f"compare {SMALL}",
    f"compare {SMALL} --json",
    f"compare {SMALL} {COST} --jitter 0.1 --runs 10",
    f"compare {SMALL} {COST} --objective rank-span",
    f"compare {SMALL} --memory-cap 0.6 {OFFLOAD} --json",
    f"compare {SMALL} --memory-cap 0.4 --group-size 3",
    f"compare {SMALL} --slices 1,2,4",
    f"compare {SMALL} --slices 1,2 --json",
    f"compare {SMALL} --cost 2,2,1 --exchange 1,1",
    "compare --pp 8 --microbatches 5 --effort 0.02",
    f"show v-half {SMALL} --width 80",
    "show --block v-half --pp 4",
    "show --block v-min --pp 4 --json",
    "show --blocks --pp 4",
    "show --blocks --pp 4 --json",
    f"schedule --schedule zb-h1 {SMALL} --output %/one.json",
    f"schedule --schedule zb-h1 {SMALL} --lowered --output %/two.json --json",
    f"schedule --schedule v-half {SMALL} {OFFLOAD} --lowered --output %/three.json --json",
    "check %/one.json",
)
LINES = [*QUICK, *(pytest.param(line, marks=pytest.mark.matrix) for line in SLOW)]


def answer(run, folder: Path, line: str) -> str:
    """What a command prints, without times of this machine."""
    if "check" in line:
        run(*f"schedule --schedule zb-h1 {SMALL} --output {folder}/one.json".split())
    status, out, err = run(*line.replace("%", str(folder)).split())
    assert status == 0, err
    if "--export" in line:
        text = (folder / "view.html").read_text()
        out += text[text.index("<body") :].split("<script", 1)[0]
    out = out.replace(str(folder), "%")
    out = re.sub(r"generated in +[\d.]+ s", "generated in -", out)
    return re.sub(r'"generation_seconds": [\d.e-]+', '"generation_seconds": 0', out)


@pytest.mark.parametrize("line", LINES)
def test_a_command_prints_what_it_did(run, tmp_path, line):
    found = answer(run, tmp_path, line)
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        golden[line] = found.splitlines()
        GOLDEN.write_text(json.dumps(golden, indent=0, sort_keys=True) + "\n")
    assert found.splitlines() == golden[line]


def test_every_command_line_has_its_answer():
    assert set(json.loads(GOLDEN.read_text())) == {*QUICK, *SLOW}
