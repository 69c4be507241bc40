"""What every fuzzed reader must stand, of hypothesis and of the campaign's own mutations."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.fuzz_inputs import Target, feed
from tests.support.fuzz_mutations import NUMBERS, TEXTS, mutated

hostile = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.recursive(st.none(), lambda inner: st.lists(inner, max_size=3), max_leaves=8),
)
number = st.from_regex(r"-?[0-9]{0,3}[./e]?-?[0-9]{0,3}", fullmatch=True)
flag_values = st.one_of(
    st.lists(number, min_size=1, max_size=4).map(",".join),
    st.tuples(number, st.sampled_from(["GiB", "B", "kib", ""])).map("".join),
    st.tuples(st.sampled_from(["--pp", "--microbatches", "--cost"]), number).map(" ".join),
    st.sampled_from(TEXTS),
    st.text(),
)


# Derandomized: a default run must not fail by chance; tests/campaigns/fuzz.py tries others.
FAST = settings(
    max_examples=100,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def like(value: Any) -> st.SearchStrategy[Any]:
    """Documents of this form, with what is hostile in some places, and parts left out."""
    if isinstance(value, dict):
        whole = st.fixed_dictionaries({key: like(x) for key, x in value.items()})
        fewer = st.fixed_dictionaries({}, optional={key: like(x) for key, x in value.items()})
        return st.one_of(whole, whole, whole, fewer, hostile)
    if isinstance(value, list):
        rows = st.tuples(*map(like, value[:12])).map(list)
        return st.one_of(rows, rows, rows, st.just(value), st.permutations(value), hostile)
    same = st.just(value)
    return st.one_of(same, same, same, same, same, same, same, hostile)


def check_documents(target: Target) -> None:
    """JSON documents like its seeds are used or refused."""

    @FAST
    @given(st.one_of(*(like(json.loads(seed)) for seed in target.seeds)))
    def refused_or_used(document: Any) -> None:
        feed(target, json.dumps(document).encode())

    refused_or_used()


def check_flag_values(target: Target, prefix: str) -> None:
    """Values of a flag, behind what the target needs before one, are used or refused."""

    @FAST
    @given(flag_values)
    def refused_or_used(value: str) -> None:
        feed(target, f"{prefix}{value}".encode("utf-8", "surrogatepass"))

    refused_or_used()


def check_mutations(target: Target) -> None:
    """The long run's own mutations, the first few hundred of them; some get through."""
    rng = random.Random(f"mutations of {target.name}")
    assert all(feed(target, seed) for seed in target.seeds)
    used = sum(feed(target, mutated(rng.choice(target.seeds), rng)) for _ in range(300))
    assert 5 < used < 295


def code_that_leaves(mark: Path) -> Iterable[str]:
    """Texts that are code to Python, YAML or a shell; running one makes the file ``mark``."""
    return (
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"$(touch {mark})",
        f"!!python/object/apply:os.system ['touch {mark}']",
    )
