"""``prove`` names errors that are put into a copy of Megatron."""

from __future__ import annotations

import pytest

from tests.campaigns import prove_mutations
from tests.support.checkouts import existing, version


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    prove_mutations.copy(existing(prove_mutations.TAG), folder)
    return folder


@pytest.mark.parametrize("name", [one.name for one in prove_mutations.MUTATIONS])
@pytest.mark.parametrize("tag", [version(prove_mutations.TAG)])
def test_is_named(tag, name, tree, tmp_path):
    (mutation,) = (one for one in prove_mutations.MUTATIONS if one.name == name)
    before = prove_mutations.inject(tree, mutation)
    try:
        verdict, text = prove_mutations.judge(tree, mutation, tmp_path)
    finally:
        (tree / "megatron" / mutation.file).write_text(before)
    assert verdict == "named", text
