"""Ranks that the tests here share; see tests/support/rank_pool.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.rank_pool import Pool, Ranks, Zygote


@pytest.fixture(scope="package")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """The process that has loaded torch."""
    zygote = Zygote(tmp_path_factory.mktemp("ranks"), "tests.ranks.runtime.rank_cases")
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def pool(zygote: Zygote) -> Iterator[Pool]:
    """Ranks that the tests of a file share. No longer: each of a thousand threads of gloo wakes a
    hundred times a second."""
    pool = Pool(zygote)
    yield pool
    pool.close()


@pytest.fixture
def launch(zygote: Zygote) -> Iterator[Callable[..., Ranks]]:
    """``launch(case, world, **kwargs)``: fresh ranks, killed when the test ends."""
    started: list[Ranks] = []

    def start(case: str, world: int, **kwargs: Any) -> Ranks:
        started.append(zygote.fork(case, world, **kwargs))
        return started[-1]

    yield start
    for ranks in started:
        ranks.end()
