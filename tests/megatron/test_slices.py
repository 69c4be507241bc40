"""``--pp-slices``: what is refused, where sequences are cut, and what slices hand on."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.integration import ConfigError, saved_parameters
from megatron_ext.integration.feature import Run
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.integration.features.slices import Slices
from megatron_ext.integration.features.slices.carry import (
    KEYS,
    Attention,
    Carry,
    Held,
    attended,
)
from megatron_ext.integration.features.slices.run import (
    Batches,
    SliceRunner,
    _linear,
    _require_attention,
    added,
)
from megatron_ext.integration.features.slices.state import Cuts, Slicing
from megatron_ext.integration.features.slices.wanted import Wanted
from megatron_ext.integration.hooks import declared
from megatron_ext.integration.runner import with_loss_function
from megatron_ext.integration.targets import GPT_FORWARD
from megatron_ext.runtime import merged_attention
from megatron_ext.schedule import Costs, generate, load, save
from megatron_ext.schedule.spec import Cut
from megatron_ext.schedule.units import units_of
from tests.support.stand_ins import started

from .test_flags import arguments

_NOTHING = contextlib.nullcontext()


def checked(schedule: str = "v-half", **changed: Any) -> Run:
    """A run whose flags the feature has checked."""
    sizes = {"seq_length": 64, "hidden_size": 32, "pp_slices": 4}
    args = arguments(**(sizes | changed))
    run = Run(args, "0.19.0", request=ScheduleRequest.of(schedule))
    feature = Slices()
    feature.check_flags(run)
    feature.check(run)
    return run


class TestFlags:
    def test_a_file_says_how_many(self, tmp_path: Path) -> None:
        def file(name: str, **more: Any) -> str:
            path = str(tmp_path / f"{name}.json")
            save(generate("zb-h1", 2, 4, effort=0, **more), path)
            return path

        sliced, whole = file("sliced", slices=3), file("whole")
        for count in (3, None):
            run = checked(sliced, pp_slices=count)
            assert run.request is not None and run.request.cut is not None
            assert len(run.request.cut.ends) == 3 and Slices().start(run)
            made = run.request.resolve(2, None, 4).plan(4)
            assert made.slices == (3,) * 4 and made.ranks == load(sliced).ranks
        joined = checked(file("joined", slices=2, joined=True), pp_slices=None).request
        assert joined is not None and joined.cut is not None and joined.cut.joined
        for path, flags, why in (
            (sliced, {}, "is not what the schedule file has"),
            (sliced, {"pp_slices": "auto"}, "is not what the schedule file has"),
            (sliced, {"pp_slices": 1}, "--pp-slices 1 is not what the schedule file has"),
            (
                sliced,
                {"pp_slices": 3, "pp_slice_weights": "joined"},
                "joined is not what the schedule file has",
            ),
            (whole, {}, "is not what the schedule file has"),
            (whole, {"pp_slices": None, "pp_slice_tokens": 8}, "--pp-slice-tokens 8 is not what"),
        ):
            with pytest.raises(ConfigError, match=why):
                checked(path, **flags)

    def test_off_without_it(self) -> None:
        for count in (None, 1):
            run = checked(pp_slices=count)
            assert run.request is not None and run.request.cut is None
            assert Slices().start(run) == ()

    def test_what_it_asks_for(self) -> None:
        cut = checked().request.cut
        assert cut is not None and cut.lengths == sorted(cut.lengths, reverse=True) != [16] * 4
        tensor = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
        assert all(n % 4 == 0 for n in checked(pp_slices=3, **tensor).request.cut.lengths)

    @pytest.mark.parametrize(("tokens", "count"), [(16, 4), (17, 4), (30, 3), (64, 1), (100, 1)])
    def test_tokens_of_a_slice_say_how_many(self, tokens: int, count: int) -> None:
        run = checked(pp_slices=None, pp_slice_tokens=tokens)
        cut = run.request.cut
        assert (1 if cut is None else len(cut.ends)) == count
        assert bool(Slices().start(run)) == (count > 1)

    def test_each_length_has_its_number_of_slices(self) -> None:
        split = SimpleNamespace(sequence_parallel=True, tensor_model_parallel_size=4)
        one = SimpleNamespace(sequence_parallel=False)
        by_tokens, three = Wanted(1, tokens=8), Wanted(3)
        lengths = (1, 8, 9, 40)
        assert [by_tokens.count_of(n, one) for n in lengths] == [1, 1, 2, 5]
        assert [three.count_of(n, one) for n in lengths] == [1, 3, 3, 3]
        assert [three.count_of(n, split) for n in lengths] == [1, 2, 2, 3]

    def test_trainers_need_the_lengths_for_tokens_of_a_slice(self) -> None:
        changed = {"pp_slices": None, "pp_slice_tokens": 8, "seq_length": 1, "hidden_size": 32}
        for costs, fits in ((None, False), ("equal", False), ("lengths", True)):
            args = arguments(variable_seq_lengths=True, pp_microbatch_costs=costs, **changed)
            run = Run(args, "0.19.0", library=True, request=ScheduleRequest.of("v-half"))
            refused = pytest.raises(ConfigError, match="--pp-slice-tokens 8 needs --pp-microbatch")
            with contextlib.nullcontext() if fits else refused:
                Slices().check(run)
            if fits:
                assert run.request.cut is None and run.slices_of(17) == 3

    @pytest.mark.parametrize(
        ("changed", "words"),
        [
            ({"pp_slices": 65}, "a sequence of 64 tokens does not make 65 slices"),
            ({"seq_length": 62, "tensor_model_parallel_size": 4, "sequence_parallel": True},
             "does not make 4 slices of multiples of 4"),
        ],
    )  # fmt: skip
    def test_bad_values(self, changed: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            checked(**changed)

    def test_one_weight_pass_for_all_slices(self) -> None:
        for name, joined in (("v-half", True), ("1f1b", True), ("1f1b", False)):
            request = checked(name, pp_slice_weights="joined" if joined else "each").request
            assert request is not None and request.cut is not None
            assert request.cut.joined == joined
            refused = pytest.raises(ConfigError, match="1f1b has no W passes of their own to join")
            with refused if name == "1f1b" and joined else contextlib.nullcontext():
                made = request.resolve(2, None, 4).plan(4)
                assert made.joined == joined

    def test_pairs_have_no_slices(self) -> None:
        request = checked("dualpipev").request
        assert request is not None
        with pytest.raises(ConfigError, match="dualpipev runs passes in pairs"):
            request.resolve(2, 2, 4)


def test_cuts_cover_the_sequence_and_balance_it() -> None:
    for tokens, count, multiple in ((64, 4, 1), (96, 5, 4), (7, 7, 1), (4096, 16, 8)):
        for attention in (Fraction(0), Fraction(1, 2), Fraction(1)):
            cut = Cut.of(tokens, count, attention, multiple)
            assert cut.ends[-1] == tokens and len(cut.ends) == count
            assert min(cut.lengths) > 0 and all(n % multiple == 0 for n in cut.lengths)
            costs = cut.costs(Costs(), 2)
            assert costs.units is not None and len(costs.units) == 2 * count
            assert [sum(column) for column in zip(*costs.units)] == [2] * 4
    units = Cut.of(4096, 8, Fraction(1, 2), 1).costs(Costs(), 1).units
    assert units is not None
    times = [forward for forward, *_ in units]
    assert max(times) / min(times) < 1.01


class TestCarry:
    def test_gradients_of_whole_attention(self) -> None:
        """Of any function of a slice and all keys before it, in float64 to the last digits."""
        torch.manual_seed(0)
        n, cuts = 10, [0, 3, 4, 10]
        weights = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        x = torch.randn(n, 1, 1, 4, dtype=torch.float64)

        def attend(q: Any, k: Any, v: Any, begin: int) -> Any:
            scores = torch.einsum("qbhd,kbhd->qk", q, k)
            mask = torch.ones_like(scores, dtype=torch.bool).triu(begin + 1)
            return torch.einsum("qk,kbhd->qbhd", scores.masked_fill(mask, -9e9).softmax(-1), v)

        whole = attend(*(x @ w for w in weights), 0)
        whole.square().sum().backward()
        expected = [w.grad.clone() for w in weights]
        for weight in weights:
            weight.grad = None
        held, outs = None, []
        for begin, end in pairwise(cuts):
            q, k, v = (x[begin:end] @ w for w in weights)
            held = held or Held(k, v, n)
            k, v = Carry.apply(k, v, held, begin, end)
            outs.append(attend(q, k, v, begin))
        assert torch.allclose(torch.cat(outs), whole, rtol=1e-14)
        for out in reversed(outs):
            out.square().sum().backward()
        for weight, one in zip(weights, expected):
            assert torch.allclose(weight.grad, one, rtol=1e-12)

    def test_what_is_held_goes_with_the_first_slice(self) -> None:
        slicing, module = Slicing(), object()
        cuts = Cuts([lambda tokens: Cut((2, 4), Fraction(0))], 4)
        first, second = units_of([2])
        keys = torch.zeros(2, 1, 1, 4)
        for unit in (first, second):
            with slicing.at(cuts, 0, unit, first=True):
                keys_so_far, _ = attended(slicing, module, keys, keys)
                assert slicing.calls(KEYS) == 1
            assert len(keys_so_far) == 2 * (unit.slice + 1)
        assert slicing.left == 1 and slicing.now is None
        slicing.ended(1, 0)
        assert slicing.left == 1
        slicing.ended(0, 0)
        assert slicing.left == 0

    def test_transformer_engine_gets_its_own_mask(self) -> None:
        """With the name that its kernels know; outside of slices what it got before."""
        from megatron.core.transformer.enums import AttnMaskType

        sliced, seen = Attention(), []
        sliced.implementations, slicing = ["transformer_engine"], sliced.slicing
        cuts = Cuts([lambda tokens: Cut((2, 4), Fraction(0))], 4)

        def original(self: Any, q: Any, k: Any, v: Any, mask: Any, kind: Any) -> Any:
            seen.append((len(k), mask, kind))

        (attention, *_) = declared(sliced)
        forward = attention.make(original)
        x = torch.zeros(2, 1, 1, 4)
        forward("module", x, x, x, "mask", AttnMaskType.causal)
        with slicing.at(cuts, 0, units_of([2])[0], first=True):
            forward("module", x, x, x, "mask", AttnMaskType.causal)
        with slicing.at(cuts, 0, units_of([2])[1], first=True):
            forward("module", x, x, x, "mask", AttnMaskType.causal)
        right = AttnMaskType.causal_bottom_right
        assert seen == [(2, "mask", AttnMaskType.causal), (2, None, right), (4, None, right)]


class TestMerged:
    """Megatron's local attention of slices by kernels for whole sequences."""

    def module(self, **changed: Any) -> Any:
        from megatron.core.transformer.enums import AttnMaskType

        softmax = {"attn_mask_type": AttnMaskType.causal, "window_size": None, "scale": 2}
        own = {"softmax_scale": 0.1, "softmax_offset": None, "training": True, "dropout": 0.0}
        own |= {name: changed.pop(name) for name in own.keys() & changed.keys()}
        dropout = SimpleNamespace(p=own.pop("dropout"))
        return SimpleNamespace(
            scale_mask_softmax=SimpleNamespace(**(softmax | changed)),
            attention_dropout=dropout,
            **own,
        )

    @pytest.mark.parametrize("ends", [(12,), (6, 12), (5, 6, 11, 12)])
    @pytest.mark.parametrize("masked", [False, True])
    def test_equals_whole_attention(
        self, ends: tuple[int, ...], masked: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Output and all gradients, through what is held for later slices, in float64."""
        monkeypatch.setattr(merged_attention, "kernel_for", lambda *_: merged_attention.PLAIN)
        sliced, module = Attention(), self.module()
        sliced.implementations, sliced.one_mask = ["local"], True
        cuts, count = Cuts([lambda tokens: Cut(ends, Fraction(0))], 12), len(ends)
        forward = declared(sliced)[0].make(None)  # nothing falls back
        mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1) if masked else None
        q, k, v, grad = (
            torch.randn(12, 2, heads, 8, dtype=torch.float64, requires_grad=True)
            for heads in (4, 2, 2, 4)
        )
        whole = merged_attention.attend(q, k, v, 0.2, merged_attention.PLAIN)
        stock = torch.nn.functional.scaled_dot_product_attention(
            *(t.permute(1, 2, 0, 3) for t in (q, k, v)), is_causal=True, scale=0.2, enable_gqa=True
        )
        stock = stock.permute(2, 0, 1, 3).flatten(2)
        wanted = torch.autograd.grad(stock, (q, k, v), grad.flatten(2))
        parts, inputs = [], [t.detach().split(_lengths(ends)) for t in (q, k, v)]
        units = units_of([count])
        leaves = [[t.requires_grad_() for t in each] for each in zip(*inputs, strict=True)]
        for unit, given in zip(units, leaves, strict=True):
            with sliced.slicing.at(cuts, 0, unit, first=True):
                parts.append(forward(module, *given, mask, None))
        torch.testing.assert_close(torch.cat(parts), stock, rtol=0, atol=1e-13)
        torch.testing.assert_close(whole, stock, rtol=0, atol=1e-13)
        found = []
        for part, given, part_grad in reversed(
            list(zip(parts, leaves, grad.flatten(2).split(_lengths(ends)), strict=True))
        ):
            found.insert(0, torch.autograd.grad(part, given, part_grad))
        for gradients, want in zip(zip(*found, strict=True), wanted, strict=True):
            torch.testing.assert_close(torch.cat(gradients), want, rtol=0, atol=1e-13)

    def test_anything_else_stays_as_it_is(self) -> None:
        from megatron.core.transformer.enums import AttnMaskType

        plain = torch.ones(1, 1, 4, 4, dtype=torch.bool).triu(1)
        reset = plain.clone()
        reset[..., 2:, :2] = True  # a document ends there
        cuts, unit = Cuts([lambda tokens: Cut((3, 4), Fraction(0))], 4), units_of([2])[0]
        for one_mask, mask, changed, causal in (
            (True, None, {}, True),
            (True, plain, {}, True),
            (True, reset, {}, False),
            (False, plain, {}, False),
            (True, None, {"dropout": 0.1}, False),
            (True, None, {"dropout": 0.1, "training": False}, True),
            (True, None, {"window_size": (2, 0)}, False),
            (True, None, {"softmax_offset": torch.zeros(1)}, False),
            (True, None, {"attn_mask_type": AttnMaskType.padding}, False),
        ):
            sliced = Attention()
            sliced.one_mask = one_mask
            with sliced.slicing.at(cuts, 0, unit, first=True):
                assert sliced._is_causal(self.module(**changed), mask) is causal, changed
        x = torch.zeros(4, 1, 1, 8)
        assert merged_attention.attend(x, x, x, 1.0, None) is None  # no GPU


def _lengths(ends: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in pairwise([0, *ends])]


class TestCausal:
    """Attention to later tokens is refused; of a slice that is all it sees, a part of it."""

    def attend(self, name: str, unit: Any, kind: Any, mask: Any = None) -> tuple[Any, ...]:
        from megatron.core.transformer.enums import AttnMaskType

        sliced, seen = Attention(), []
        sliced.implementations = [name]
        cuts = Cuts([lambda tokens: Cut((2, 4), Fraction(0))] * 2, 4)
        softmax = SimpleNamespace(attn_mask_type=AttnMaskType[kind], window_size=(1, 0))

        def original(self: Any, q: Any, k: Any, v: Any, *given: Any) -> None:
            seen.append((*given, softmax.attn_mask_type))

        (hook, *_) = declared(sliced)
        x, module = torch.zeros(2, 1, 1, 4), SimpleNamespace(scale_mask_softmax=softmax)
        with sliced.slicing.at(cuts, 0, unit, first=True):
            hook.make(original)(module, x, x, x, mask, AttnMaskType[kind])
        assert softmax.attn_mask_type is AttnMaskType[kind]
        (found,) = seen
        return found

    def test_kinds_of_masks(self) -> None:
        first = units_of([2])[0]
        for kind in ("causal", "padding_causal", "causal_bottom_right"):
            self.attend("transformer_engine", first, kind)
        for name, kinds in (
            ("transformer_engine", ("no_mask", "padding", "arbitrary")),
            ("local", ("no_mask", "padding")),
        ):
            for kind in kinds:
                with pytest.raises(ConfigError, match=f"causal core attention .* is {kind}; drop"):
                    self.attend(name, first, kind)

    def test_masks(self) -> None:
        """The fused kernel reads a mask as if it had no strides."""
        units, causal = units_of([2, 2]), torch.ones(4, 4, dtype=torch.bool).triu(1)
        ahead = causal.clone()
        ahead[1, 3] = False
        mask, _, kind = self.attend("local", units[0], "padding", causal[None, None])
        assert mask.is_contiguous() and mask.tolist() == [[[[False, True], [False, False]]]]
        assert kind.name == "padding"
        mask, *_ = self.attend("local", units[1], "causal", causal[None, None])
        assert mask.shape == (1, 1, 2, 4)
        with pytest.raises(ConfigError, match="a mask shows later tokens"):
            self.attend("local", units[0], "causal", ahead[None, None])
        # The host waits in the first microbatch only.
        self.attend("local", units[2], "causal", ahead[None, None])


def test_every_slice_gets_the_batch_of_its_microbatch() -> None:
    source = iter([{"tokens": 1}, {"mask": 2}, {"tokens": 3}, {"mask": 4}])
    batches, seen = Batches(source), []
    for unit in units_of([3, 1]):
        batches.begin(unit)
        first = next(batches)
        seen.append((first.pop("tokens"), next(batches)["mask"]))
    assert seen == [(1, 2)] * 3 + [(3, 4)]


def test_losses_of_slices_are_added() -> None:
    pair = added({"lm loss": torch.tensor([3.0, 8.0])}, {"lm loss": torch.tensor([4.0, 8.0])})
    assert pair["lm loss"].tolist() == [7, 8]
    mean = added({"lm loss": torch.tensor(0.25)}, {"lm loss": torch.tensor(0.5)})
    assert mean["lm loss"] == 0.75
    with pytest.raises(ConfigError, match="the loss reported tuple"):
        added((1, 2), (3, 4))


def test_losses_that_are_not_linear_are_refused() -> None:
    """A mean over the microbatch's tokens is; a ratio of probabilities is not."""
    mask, drawn = torch.tensor([[0.0, 1.0, 1.0]]), []

    def step(iterator: Any, model: Any, of: Any) -> Any:
        drawn.append(model)
        return torch.ones(1, 3), lambda losses: (of(losses), {"loss": of(losses)})

    def mean(losses: torch.Tensor) -> torch.Tensor:
        return (losses * mask).sum() / mask.sum()

    def ratio(losses: torch.Tensor) -> torch.Tensor:
        return mean((-losses - 0.5).exp())

    output, loss = with_loss_function(step, _linear)(None, "model", of=mean)
    assert loss(output)[0] == 1 and drawn == ["model"]
    for wrong, said in (
        (ratio, "of 0 it gives 0.606531"),
        (torch.max, "of two halves it gives 1 and 1, of both 1"),
        (lambda losses: mean(losses) ** 2, "of two halves it gives 0.25 and 0.25, of both 1"),
    ):
        with pytest.raises(ConfigError, match=f"is linear in .*{said}"):
            with_loss_function(step, _linear)(None, "model", of=wrong)


@pytest.mark.parametrize(
    ("report", "fault"),
    [
        (lambda x: {"lm loss": torch.stack([x.sum(), torch.tensor(4.0)]), "mean": x.mean()}, None),
        (lambda x: {"loss": x.sum(), "tokens": 4}, "tokens is not"),
        (lambda x: {"of samples": x.sum(1)}, "of samples is not"),
    ],
)
def test_reports_that_slices_would_not_add_right_are_refused(report: Any, fault: Any) -> None:
    """A number of tokens would come out once for every slice, a sample's loss for one of them."""
    losses = torch.ones(2, 2)
    with pytest.raises(ConfigError, match=fault) if fault else contextlib.nullcontext():
        _linear(losses, lambda x: (x.sum(), torch.tensor(4), report(x)))


@pytest.mark.parametrize(
    "draw", [int, lambda: torch.rand(1), random.random, lambda: np.random.rand(1)]
)
def test_forward_steps_that_draw_are_refused(draw: Any) -> None:
    """Each slice of a microbatch would get other numbers. For the first the data set draws, and
    what the model draws is every slice's own."""
    passes: Any = started(Slices, args=arguments(pp_slices=2, transformer_impl="local"))
    (hook,) = [one for one in passes.hooks() if one.target is GPT_FORWARD]
    cuts = Cuts([lambda tokens: Cut((2, 4), Fraction(0))], 4)

    def model(self: Any, input_ids: Any, position_ids: Any, attention_mask: Any) -> torch.Tensor:
        return torch.rand(1)

    def step(iterator: Any, chunk: Any) -> Any:
        draw()
        return hook.make(model)(chunk, torch.zeros(1, 4), None, None)

    runner: Any = object.__new__(SliceRunner)
    chunk = SimpleNamespace(post_process=False, config=None)
    vars(runner).update(
        _slicing=passes.slicing,
        _unknown=True,
        _rank=0,
        _it=SimpleNamespace(forward_step_func=step, models=[torch.nn.Linear(1, 1)]),
        placement=SimpleNamespace(stages=[[0]], num_stages=2),
    )
    for unit in units_of([2]):
        wrong = unit.slice and draw is not int
        why = pytest.raises(ConfigError, match="it draws random numbers")
        with passes.slicing.at(cuts, 0, unit, first=True), why if wrong else _NOTHING:
            runner.forward_step_func(0, unit)(None, chunk)


def test_layers_that_are_not_cut_are_refused() -> None:
    """Their slices would attend to themselves only; a stage without layers has none to cut."""
    layer = SimpleNamespace(self_attention=object())
    model = SimpleNamespace(decoder=SimpleNamespace(layers=[layer, layer]))
    _require_attention(model, 2)
    _require_attention(SimpleNamespace(decoder=SimpleNamespace(layers=[])), 0)
    with pytest.raises(ConfigError, match="but 1 of 2 layers have it"):
        _require_attention(model, 1)
    with pytest.raises(ConfigError, match="0 of 0 layers have it .none."):
        _require_attention(SimpleNamespace(encoder=1), 0)


def test_every_call_is_cut_for_its_own_length() -> None:
    """Sequences of one call are alike; those of the next one may be longer."""
    passes: Any = started(Slices, args=arguments(pp_slices=2))
    config = SimpleNamespace(hidden_size=1 << 40, sequence_parallel=False)
    iteration = SimpleNamespace(config=config)
    step = SimpleNamespace(training=True, plan=SimpleNamespace(slices=(2, 2)))
    for tokens, shape in ((8, (4, 1, 32)), (12, (6, 1, 32)), (7, None)):
        step.call = SimpleNamespace(batch=(tokens, 1), shape=(tokens, 1, 32), iteration=iteration)
        step.shape = step.call.shape
        passes.begin(step)
        assert step.shape == shape and step.call.shape == (tokens, 1, 32)
    step.shape, step.training = (1, 2, 3), False
    passes.begin(step)
    assert step.shape == (1, 2, 3)


@pytest.mark.parametrize("library", [False, True])
def test_loss_functions_are_looked_at(library: bool) -> None:
    """A script's in the first training step, a trainer's in every one."""
    args = arguments(pp_slices=2)
    passes: Any = started(Slices, args=args, library=library)
    looks = []
    config = SimpleNamespace(hidden_size=32, sequence_parallel=False)
    call = SimpleNamespace(
        batch=(8, 1), shape=None, iteration=SimpleNamespace(config=config), group=None
    )
    for training in (False, True, True):
        step: Any = SimpleNamespace(
            training=training, plan=SimpleNamespace(slices=(2, 2)), call=call, rank=0
        )
        passes.begin(step)
        passes.passes_done(step, None)
        if training:
            looks.append(step.runner_type.keywords["unknown"])
    assert looks == [True, library]


def test_every_microbatch_is_cut_for_its_own_length() -> None:
    slicing, cuts = Slicing(), Cuts([lambda n: Cut((n // 2, n), Fraction(0))] * 2, 4)
    first, second, *_, other = units_of([2, 2])
    spans = []
    for unit in (first, second, other):
        with slicing.at(cuts, 0, unit, first=True):
            slicing.sequence(10 if unit.microbatch else 6)
            spans.append(slicing.span)
    with slicing.at(cuts, 0, second, first=False):
        spans.append(slicing.span)  # its B is not told
    assert spans == [(0, 3), (3, 6), (5, 10), (3, 6)]
    with slicing.at(cuts, 1, first, first=True):
        assert slicing.span == (0, 2)  # of a stage that gets no tokens
        keys = torch.zeros(3, 1, 1, 4)
        with pytest.raises(ConfigError, match="slice 0/0 has tokens 0 to 2 and a layer"):
            attended(slicing, object(), keys, keys)


def test_no_slice_is_lost_where_the_first_call_overwrites(monkeypatch: Any) -> None:
    """Of Transformer Engine's layers; in backward the first slice is the last."""
    target = SimpleNamespace(loaded=True, exists=True)
    monkeypatch.setattr(saved_parameters, "TE_FUNCTIONS", (target,))
    slices = started(Slices, args=arguments(pp_slices=2))
    (hook,) = [one for one in slices.hooks() if one.target is target]
    assert hook.make is saved_parameters.with_parameters
