"""``explore``: what the page is answered, who may ask, and a copy of a view."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlencode

import pytest

from megatron_ext.commands.common import InputError, Parser
from megatron_ext.commands.explore.answers import Explorer
from megatron_ext.commands.explore.model import declare_model, model_of
from megatron_ext.commands.explore.server import serve
from megatron_ext.schedule import GENERATORS, generate, simulate
from megatron_ext.schedule.io import save

COSTS = "--pp 3 --microbatches 6 --cost 1,1.1,0.8 --hop 0.05"


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    return Explorer()


def test_rows_are_those_of_compare(explorer, run):
    """Every schedule once, with the numbers that ``compare --json`` has."""
    for options in (COSTS, "--pp 4 --microbatches 8 --memory-cap 0.7"):
        *rows, end = explorer.compare(options)
        data = json.loads(run("compare", *options.split(), "--json")[1])
        known = {one["schedule"]: one for one in data["schedules"]}
        assert sorted(row["schedule"] for row in rows) == sorted(GENERATORS)
        for row in rows:
            if "reason" in row:
                reasons = {one["schedule"]: one["reason"] for one in data["impossible"]}
                assert reasons[row["schedule"]] == row["reason"]
                continue
            one = known[row["schedule"]]
            for field in ("makespan", "bubble", "peak_activation", "above_bound"):
                assert row[field] == one[field]
            assert row["over_cap"] == one.get("over_cap", False)
        assert end == {"end": True, "cap": 2.8 if "cap" in options else None}


def test_slow_schedules_come_last(explorer):
    names = [row["schedule"] for row in explorer.compare(COSTS) if "schedule" in row]
    assert names[-1] == "v-cap" and set(names[-5:-1]) >= {"v-zb", "v-half", "v-min"}
    assert names[0] == "1f1b"


def test_timelines(explorer):
    data = explorer.timelines(COSTS, ["1f1b", "v-half"])
    assert [one["title"] for one in data["runs"]] == ["1f1b", "v-half"]
    assert [one["makespan"] for one in data["runs"]] == [r["makespan"] for r in data["rows"]]
    assert data["command"] == f"megatron-ext show 1f1b v-half {COSTS}"
    assert data["rows"][1]["flags"] == (
        "--pipeline-model-parallel-size 3 --pp-schedule v-half --pp-cost 1,1.1,0.8,0.05"
    )


def test_the_command_draws_the_same(explorer, run, tmp_path):
    options = f"{COSTS} --memory-cap 0.75"
    data = explorer.timelines(options, ["1f1b", "v-cap"])
    path = tmp_path / "both.html"
    command = data["command"].split()[1:]
    assert run(*command, "--output", path)[0] == 0
    text = path.read_text()
    drawn = json.loads(text[text.index("const TIMELINE = ") + 17 :].split(";\n", 1)[0])
    assert drawn["runs"] == data["runs"]


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ("--chunks 4", "interleaved-zb", "--num-virtual-stages-per-pipeline-rank 4"),
        ("--memory-cap 0.8", "v-cap", "--pp-memory-cap 0.8"),
        ("--group-size 3", "gis", "--pp-group-size 3"),
        ("--offload full --offload-time 0.25", "po", "--pp-offload full --pp-offload-time 0.25"),
        ("--offload 1 --offload-time 0.25", "v-half", "--pp-offload-chunks 1"),
        ("--objective span", "v-zb", "--pp-post-validation"),
        ("--hop 0.1", "1f1b", "--pp-cost 1,1,1,0.1"),
    ],
)
def test_training_flags(explorer, options, name, words):
    data = explorer.timelines(f"--pp 4 --microbatches 8 {options}", [name])
    assert words in data["rows"][0]["flags"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--pp 4", "required: --microbatches"),
        ("--pp 1 --microbatches 4", "at least 2 ranks"),
        ("--pp 64 --microbatches 1024", "more than this page takes, 32768"),
        ("--pp 4 --microbatches 8 --cost 1,2", "1,2"),
        ("--pp 4 --microbatches 8 --nonsense 3", "--nonsense"),
        ("--pp 4 '", "No closing quotation"),
    ],
)
def test_bad_options_are_a_sentence(explorer, options, text):
    with pytest.raises((InputError, ValueError), match=text):
        next(explorer.compare(options))


def test_unknown_and_impossible_schedules(explorer):
    with pytest.raises(InputError, match="unknown schedule 'nope'"):
        explorer.timelines(COSTS, ["nope"])
    with pytest.raises(InputError, match="choose one to 4"):
        explorer.timelines(COSTS, [])
    with pytest.raises(InputError, match="^v-cap: "):
        explorer.timelines("--pp 4 --microbatches 8 --memory-cap 0.1", ["v-cap"])


def test_files_and_measured_runs(tmp_path):
    explorer = Explorer()
    path = tmp_path / "mine.json"
    save(generate("v-half", 4, 8), path)
    name = explorer.add_file("mine.json", path)
    assert explorer.add_text("mine.json", path.read_bytes()) == name == "file: mine.json"
    assert name in explorer.names
    rows = {row["schedule"]: row for row in explorer.compare(COSTS) if "schedule" in row}
    assert rows[name]["makespan"] == 26.5  # of its own sizes and costs
    data = explorer.timelines(COSTS, [name, "1f1b"])
    assert data["rows"][0]["flags"] is None and len(data["runs"]) == 2
    for bad, data in (("mine.txt", b"{}"), ("mine.json", b"{"), ("mine.json", b"{}")):
        with pytest.raises(InputError):
            explorer.add_text(bad, data)


def test_a_measured_run_is_drawn_under_its_plan(tmp_path):
    from megatron_ext.schedule import lower
    from megatron_ext.view import recorded

    schedule = generate("1f1b", 2, 3)
    result, print_of = simulate(schedule), lower(schedule).fingerprint()
    save(schedule, tmp_path / recorded.plan_file(print_of))
    for rank, row in enumerate(schedule.ranks):
        times = zip(row, result.start[rank], result.end[rank])
        events = [{"action": str(a), "start_us": 1e3 * s, "end_us": 2e3 * e} for a, s, e in times]
        line = {"plan": print_of, "pipeline_rank": rank, "iteration": 1, "forward_only": False}
        line |= {"zero_unix_us": 1.7e15, "events": events, "microbatches": 3, "schedule": "1f1b"}
        (tmp_path / f"rank{rank}.jsonl").write_text(json.dumps(line) + "\n")
    explorer = Explorer()
    name = explorer.add_measured(str(tmp_path))
    data = explorer.timelines(COSTS, [name])
    assert [one["label"] for one in data["runs"]] == ["planned", "measured"]
    assert {one["unit"] for one in data["runs"]} == {"ms"}


def test_an_exported_view_needs_no_server(run, tmp_path):
    path = tmp_path / "view.html"
    view = urlencode({"options": COSTS, "schedule": ["1f1b", "v-zb"]}, doseq=True)
    assert run("explore", "--export", path, "--view", view)[0] == 0
    text = path.read_text()
    assert "fetch(" not in text and "--pp-schedule v-zb" in text
    assert f"megatron-ext compare {COSTS}" in text
    assert text.count("<tr") == 1 + len(GENERATORS)
    assert run("explore", "--export", path)[0] == 0
    assert "write a name that ends in .html" in run("explore", "--export", "x.txt")[2]
    assert "is for --export" in run("explore", "--view", "x")[2]
    assert "cannot write" in run("explore", "--export", tmp_path / "no" / "x.html")[2]
    assert run("explore", tmp_path / "none.json")[0] == 2
    assert "none" in run("explore", "--measured", tmp_path / "none")[2]


@pytest.fixture(scope="module")
def address(explorer) -> Iterator[str]:
    server = serve(explorer, 0, fallback=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def _get(url: str, data: bytes | None = None, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(url, data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


PAGE = {"X-Explore": "1"}


def test_the_server(address, tmp_path):
    assert "<h1>Pipeline schedules</h1>" in _get(f"{address}/")[1]
    query = urlencode({"options": COSTS})
    status, text = _get(f"{address}/api/compare?{query}", **PAGE)
    assert status == 200 and len(text.splitlines()) == len(GENERATORS) + 1
    assert json.loads(text.splitlines()[-1])["end"]
    one = urlencode({"options": COSTS, "schedule": "v-half"})
    assert json.loads(_get(f"{address}/api/timelines?{one}", **PAGE)[1])["runs"]
    assert "const TIMELINE" in _get(f"{address}/export?{one}")[1]
    bad = urlencode({"options": "--pp 4"})
    assert _get(f"{address}/api/compare?{bad}", **PAGE) == (
        400,
        "the following arguments are required: --microbatches",
    )
    path = tmp_path / "mine.csv"
    path.write_bytes(b"nonsense")
    assert _get(f"{address}/api/load?name=mine.csv", path.read_bytes(), **PAGE)[0] == 400
    assert _get(f"{address}/nothing")[0] == 404


def test_other_pages_and_names_get_nothing(address):
    """A page of another origin cannot set the header; a name that leads here is no name of ours."""
    query = urlencode({"options": COSTS})
    assert _get(f"{address}/api/compare?{query}")[0] == 403
    assert _get(f"{address}/api/compare?{query}", Host="evil.example", **PAGE)[0] == 403
    assert _get(f"{address}/", Host="evil.example:80")[0] == 403
    assert _get(f"{address}/", Host="localhost:80")[0] == 200


def test_a_taken_port(explorer, address):
    port = int(address.rsplit(":", 1)[1])
    with pytest.raises(OSError):
        serve(explorer, port, fallback=False)
    other = serve(explorer, port, fallback=True)
    assert other.server_port != port
    other.server_close()


MODEL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --bf16 --swiglu "
    "--pipeline-model-parallel-size 4 --world-size 4 --global-batch-size 8 --vocab-size 32000"
)


def _model(line):
    parser = Parser()
    declare_model(parser)
    return model_of(parser.parse_args(["--from-args", line]))


@pytest.mark.parametrize("offload", ["off", "half"])
def test_a_model_gives_the_step_and_the_bytes_of_plan(run, offload):
    fixed = "--micro-batch-sizes 1 --no-balance --shard-vocabulary off --cheap-recompute off"
    words = [*fixed.split(), "--schedules", "v-half", "--offload", offload, "--json"]
    chosen = json.loads(run("plan", "--from-args", MODEL, *words)[1])["chosen"]
    explorer = Explorer(_model(MODEL))
    options = "--pp 4 --microbatches 8" + (f" --offload {offload}" if offload != "off" else "")
    rows = {row["schedule"]: row for row in explorer.compare(options) if "schedule" in row}
    row = rows["v-half"]
    assert row["step_ms"] == pytest.approx(chosen["step_ms"])
    assert row["gib"] == chosen["peak_bytes"] / 2**30 and row["gib_rank"] == chosen["peak_rank"]
    assert row["host_gib"] == chosen["host_bytes"] / 2**30 and (offload == "off") == (
        not row["host_gib"]
    )
    drawn = explorer.timelines(options, ["v-half"])
    assert drawn["runs"][0]["unit"] == "ms" and drawn["command"] == ""
    # Sizes that the layers do not divide have their reason in the row; others stay.
    wide = explorer.compare("--pp 8 --microbatches 8")
    rows = {row["schedule"]: row for row in wide if "schedule" in row}
    assert "8 layers do not divide into 16" in rows["v-half"]["reason"] and "gib" in rows["1f1b"]
    for option in ("--cost 1,1,1", "--hop 0.1", "--slices 2"):
        with pytest.raises(InputError, match="leave it out"):
            list(explorer.compare(f"--pp 4 --microbatches 8 {option}"))


def test_a_model_is_exported(run, tmp_path):
    path = tmp_path / "view.html"
    assert run("explore", "--from-args", MODEL, "--gpu", "A100", "--export", path)[0] == 0
    text = path.read_text()
    assert "8 layers, hidden 1024" in text and "<th>GiB of the fullest rank" in text
    status, _, err = run("explore", "--gpu", "H100", "--export", path)
    assert status == 2 and "--gpu H100 is for a model; give --from-args too" in err
    status, _, err = run("explore", "--from-args", "--num-layers 4 --bf16", "--export", path)
    assert status == 2 and "needs --hidden-size" in err
