"""Layouts of a small model compared with one process in the same slices, in float64."""

from __future__ import annotations

from pathlib import Path

from megatron_ext.plan.slices import PACKED
from megatron_ext.prove.compare import Comparison, compare
from megatron_ext.prove.flags import Flags
from megatron_ext.prove.shrink import Shrunk
from tests.support import recorded
from tests.support.server import ScriptServer


class Proofs:
    """The runs of one model, with the weights and references that they share.

    Args:
        server: with the training script, in float64.
        world: ranks of a layout.
        steps: of a run.
        folder: for all files.
        prelude: of every recorded rank.
    """

    def __init__(
        self,
        server: ScriptServer,
        world: int,
        steps: int,
        folder: Path,
        prelude: str = recorded.__file__,
    ) -> None:
        self._server, self._world, self._steps = server, world, steps
        self._folder, self._prelude = folder, Path(prelude)
        self._known: dict[tuple[str, ...], Path] = {}

    def _run(self, name: str, words: list[str], world: int, slices: object = None) -> Path:
        folder = self._folder / f"{len(self._known):02d}-{name}"
        self._known[name, str(len(self._known))] = folder
        outcome = self._server.run(words, world, folder, prelude=self._prelude, value=slices)
        assert outcome.status == "ok", outcome.report
        return folder

    def _start(self, flags: Flags) -> list[str]:
        """Words that load the weights that all runs of this model start from."""
        first = Shrunk(flags, 1, []).reference()
        key = tuple(sorted(first.words))
        if key not in self._known:
            self._known[key] = path = self._folder / f"weights-{len(self._known)}"
            first.append("--train-iters", 1)
            saved = ["--save", str(path), "--save-interval", "1"]
            outcome = self._server.run([*first.words, *saved], 1, path.with_suffix(".run"))
            assert outcome.status == "ok", outcome.report
        return ["--load", str(self._known[key]), "--finetune", "--no-load-optim", "--no-load-rng"]

    def reference(self, flags: Flags) -> Path:
        """One process's run of this model, in the same slices."""
        slices = slices_of(flags)
        alone = Shrunk(flags, 1, []).reference()
        key = (*sorted(alone.words), str(slices))
        if key not in self._known:
            words = [*alone.words, *self._start(flags)]
            self._known[key] = self._run("one-process", words, 1, slices)
        return self._known[key]

    def run(self, name: str, flags: Flags) -> Path:
        """A layout's run; its folder ends in ``name``."""
        return self._run(name, [*flags.words, *self._start(flags)], self._world)

    def check(self, name: str, flags: Flags) -> Comparison:
        """A layout compared with one process."""
        reference = self.reference(flags)
        return compare(self.run(name, flags), self._world, reference, self._steps)


def slices_of(flags: Flags) -> tuple[int, bool] | None:
    """Number of slices, and whether documents are packed; None: whole."""
    count = flags.number("--pp-slices", 1)
    if count == 1:
        return None
    return count, bool(flags.matching(*PACKED))
