"""Runs a configuration in several ways on CPU ranks, and compares what they compute."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._megatron_flags import KEPT, NEEDS
from .compare import Comparison, compare, lost_states
from .flags import Flags, is_layout
from .server import Outcome, ScriptServer
from .shrink import CP, PP, TP, Shrunk

RECORDER = Path(__file__).with_name("recorder.py")
Progress = Callable[[str], None]


@dataclasses.dataclass
class Check:
    """One comparison of a report.

    Attributes:
        name: what was run.
        status: ``equal``, ``different``, ``failed``, ``hung``.
        detail: why it failed.
        comparison: what was compared.
        seconds: of the run.
        flags: of the run.
    """

    name: str
    status: str
    detail: str = ""
    comparison: Comparison | None = None
    seconds: float = 0.0
    flags: tuple[str, ...] = ()

    @property
    def json(self) -> dict[str, Any]:
        """For the report's file."""
        found: dict[str, Any] = {"name": self.name, "status": self.status}
        if self.detail:
            found["detail"] = self.detail
        if (made := self.comparison) is not None:
            found |= {
                "tensors": made.tensors,
                "largest": {k: float(f"{v:.3g}") for k, v in made.largest.items()},
                "differences": [one.json for one in made.differences],
                "not_compared": made.skipped,
                "only_in_reference": made.absent,
            }
        return found | {"seconds": round(self.seconds, 2), "flags": list(self.flags)}


class Session:
    """The runs of one shrunk configuration, with the weights and references that they share.

    Args:
        server: with the training script.
        shrunk: the configuration.
        folder: for all files.
        precision: of ``compare.EPSILON``.
        uneven: samples have different numbers of tokens that count.
    """

    def __init__(
        self,
        server: ScriptServer,
        shrunk: Shrunk,
        folder: Path,
        precision: str = "double",
        uneven: bool = False,
    ) -> None:
        self._server, self._shrunk, self._folder = server, shrunk, folder
        self._precision, self._uneven = precision, uneven
        self._weights: dict[tuple[str, ...], tuple[Path, Outcome]] = {}
        self._references: dict[tuple[str, ...], tuple[Path, Outcome]] = {}
        self._number = 0

    def _next(self, name: str) -> Path:
        self._number += 1
        return self._folder / f"{self._number:02d}-{name}"

    def _run(
        self,
        name: str,
        words: list[str],
        world: int,
        seed: int | None = None,
        alone: Flags | None = None,
    ) -> tuple[Path, Outcome]:
        """``alone``: one process runs the slices that these flags ask for."""
        folder = self._next(name)
        slices = (alone or Flags(words)).slices
        value = {"late": seed, "uneven": self._uneven, "slices": slices}
        value["alone"] = alone is not None
        outcome = self._server.run(words, world, folder, prelude=RECORDER, value=value)
        return folder, outcome

    def weights(self, flags: Flags) -> tuple[Path, Outcome]:
        """The checkpoint that all runs of this model start from, saved by one process."""
        reference = self._shrunk.reference(flags)
        key = tuple(sorted(reference.words))
        if key not in self._weights:
            folder = self._next("weights")
            reference.set("--train-iters", 1)
            reference.set("--save", folder / "checkpoint")
            reference.set("--save-interval", 1)
            outcome = self._server.run(reference.words, 1, folder / "run")
            self._weights[key] = folder / "checkpoint", outcome
        return self._weights[key]

    def reference(self, flags: Flags) -> tuple[Path, Outcome]:
        """One process's run of this model, in the same slices."""
        reference = self._shrunk.reference(flags)
        key = *sorted(reference.words), str(flags.slices)
        if key not in self._references:
            words = [*reference.words, *self._start(flags)]
            self._references[key] = self._run("one-process", words, 1, alone=flags)
        return self._references[key]

    def _start(self, flags: Flags) -> list[str]:
        checkpoint, _ = self.weights(flags)
        return ["--load", str(checkpoint), "--finetune", "--no-load-optim", "--no-load-rng"]

    def _loading(self, flags: Flags) -> list[str]:
        return [*flags.words, *self._start(flags)]

    def world(self, flags: Flags) -> int:
        """Ranks of a layout: the data-parallel size stays the shrunk configuration's."""
        given = self._shrunk.flags
        model = given.number(TP, 1) * given.number(PP, 1) * given.number(CP, 1)
        data = self._shrunk.world // model
        return data * flags.number(TP, 1) * flags.number(PP, 1) * flags.number(CP, 1)

    def check(self, name: str, flags: Flags) -> Check:
        """Run a layout and compare it with one process."""
        world = self.world(flags)
        _, made = self.weights(flags)
        if made.status != "ok":
            return Check(name, "failed", "one process: " + reason(made, 1))
        path, alone = self.reference(flags)
        if alone.status != "ok":
            return Check(name, "failed", "one process: " + reason(alone, 1))
        folder, outcome = self._run(name, self._loading(flags), world)
        check = self._judge(name, outcome, folder, world, path, 1)
        check.flags = tuple(flags.words)
        return check

    def _judge(
        self,
        name: str,
        outcome: Outcome,
        folder: Path,
        world: int,
        reference: Path,
        alone: int,
        exact: bool = False,
        first: int = 1,
    ) -> Check:
        if outcome.status != "ok":
            why = reason(outcome, world) if outcome.status == "failed" else "no rank ended"
            return Check(name, outcome.status, why, seconds=outcome.seconds)
        precision = "exact" if exact else self._precision
        made = compare(folder, world, reference, self._shrunk.steps, precision, alone, first)
        status = "equal" if made.equal else "different"
        return Check(name, status, "", made, outcome.seconds)

    def races(self, flags: Flags, number: int, progress: Progress) -> list[Check]:
        """Run a layout ``number`` times with late messages; each must give the same bits."""
        world = self.world(flags)
        words = self._loading(flags)
        folder, outcome = self._run("punctual", words, world)
        if outcome.status != "ok":
            return [Check("late messages", outcome.status, reason(outcome, world))]
        checks = []
        for seed in range(number):
            progress(f"late messages, {seed + 1} of {number}")
            late, ended = self._run(f"late-{seed}", words, world, seed)
            name = f"late messages, seed {seed}"
            checks.append(self._judge(name, ended, late, world, folder, world, exact=True))
        return checks

    def resume(self, flags: Flags) -> Check:
        """Save before the last step, load, and take that step again: with the same bits, the same
        place in a schedule of the learning rate, and the same random states."""
        world, steps = self.world(flags), self._shrunk.steps
        start, flags = self._start(flags), flags.copy()
        flags.set("--lr-decay-style", "linear")
        flags.set("--lr-warmup-iters", 1)
        flags.set("--lr-decay-iters", 4 * steps)
        saved = self._next("checkpoint")
        saving = ["--save", str(saved), "--save-interval", str(steps - 1)]
        folder, outcome = self._run("saving", [*flags.words, *start, *saving], world)
        name = "checkpoint"
        if outcome.status != "ok":
            return Check(name, outcome.status, "saving: " + reason(outcome, world))
        # The last step may have been saved, too; the one before it is wanted.
        (saved / "latest_checkpointed_iteration.txt").write_text(str(steps - 1))
        again, ended = self._run("resumed", [*flags.words, "--load", str(saved)], world)
        check = self._judge(name, ended, again, world, folder, world, exact=True, first=steps)
        if check.comparison is not None:
            check.comparison.differences += lost_states(folder, again, world, steps)
            check.status = "equal" if check.comparison.equal else "different"
        return check

    def smallest(self, flags: Flags, progress: Progress) -> list[str]:
        """The flags that a difference needs, with their values.

        Halves of the flags are dropped in turn, each flag with those that are of no use without
        it; what is dropped without the difference going stays dropped, what is not is halved.
        """
        needed: list[str] = []
        model = [name for name in flags.names if not is_layout(name) and name not in KEPT]
        blocks = [[name for name in flags.names if is_layout(name)], model]
        while blocks:
            names = [name for name in blocks.pop(0) if name in flags]
            if not names:
                continue
            fewer = flags.copy()
            for name in names:
                fewer.drop(name, *(n for n, uses in NEEDS.items() if name in uses))
                if name == PP:
                    fewer.drop(*fewer.matching(("--pp-",)))
                if name == "--num-experts":
                    fewer.drop(*fewer.matching(("--moe-", "--expert-")))
            progress("without " + " ".join(names))
            if self.check("without", fewer).status == "different":
                flags = fewer
            elif len(names) > 1:
                middle = len(names) // 2
                blocks[:0] = [names[:middle], names[middle:]]
            else:
                needed.append(flags.text(names[0]))
        return needed


def reason(outcome: Outcome, world: int) -> str:
    """Why a run failed: our sentence, or the last error of the first rank that has one."""
    errors: list[str] = []
    for rank in range(world):
        text = outcome.log(rank)
        ours: list[str] = re.findall(r"^\[megatron_ext\] error: (.*)", text, re.M)
        if ours:
            return ours[-1]
        found = re.findall(r"^(?:\w+\.)*(\w*(?:Error|Exception)\b.*|\S+: error: .*)", text, re.M)
        errors += [f"rank {rank}: {one}" for one in found]
    # A rank whose neighbour died says only that.
    own = [one for one in errors if "Connection " not in one]
    if errors:
        return (own or errors)[0]
    return f"rank 0 ended after {outcome.log(0).strip().splitlines()[-1:]}"
