"""Methods that are declared as hooks: what they are bound to, and that they take what they must."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from megatron_ext.integration.callbacks import Callback
from megatron_ext.integration.errors import ConfigError
from megatron_ext.integration.hooks import Hook, Hooks, around, declared, hooked
from megatron_ext.integration.targets import Target

MODULE = "a_module_of_megatron"
ONE, TWO = Target.at(f"{MODULE}:one", "x"), Target.at(f"{MODULE}:two")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = ModuleType(MODULE)
    exec("def one(x, y=1):\n    return x + y\n\ndef two(x):\n    return -x\n", vars(made))
    monkeypatch.setitem(sys.modules, MODULE, made)
    return made


class Doubled(Callback):
    def __init__(self, on: bool = True) -> None:
        self.on, self.calls = on, 0

    @hooked((ONE, TWO), "nothing would be doubled")
    def doubled(self, original: Callable[..., Any], x: int, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return 2 * original(x, *args, **kwargs)

    @hooked(TWO, "nothing would be late", when=lambda self: self.on)
    def late(self, original: Callable[..., Any], x: int) -> Any:
        return original(x) + 0.5


class Tripled(Doubled):
    def doubled(self, original: Callable[..., Any], x: int, *args: Any, **kwargs: Any) -> Any:
        return 3 * original(x, *args, **kwargs)


def test_methods_run_around_their_targets(module: Any) -> None:
    """The later one around the earlier; all is given back."""
    before, hooks, part = (module.one, module.two), Hooks("a test"), Doubled()
    hooks.apply(part.hooks())
    assert (module.one(1, y=2), module.two(1)) == (6, -1.5)
    assert part.calls == 2 and len(hooks.bindings) == 3
    hooks.revert()
    assert (module.one, module.two) == before


def test_a_subclass_may_do_it_in_another_way(module: Any) -> None:
    hooks = Hooks("a test")
    hooks.apply(Tripled(on=False).hooks())
    assert (module.one(1), module.two(1)) == (6, -3)
    hooks.revert()


def test_a_test_may_put_another_method_in_its_place(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Doubled, "doubled", Tripled.doubled)
    hooks = Hooks("a test")
    hooks.apply(Doubled(on=False).hooks())
    assert (module.one(1), module.two(1)) == (6, -3)
    hooks.revert()


def test_only_where_it_is_needed() -> None:
    assert [hook.target for hook in Doubled(on=False).hooks()] == [ONE, TWO]
    assert [hook.target for hook in declared(Doubled())] == [ONE, TWO, TWO]


def test_a_parameter_that_is_not_taken_is_refused(module: Any) -> None:
    """By place or by name; one that a version has got would be lost."""
    hooks = Hooks("9.9")
    hooks.find(Hook(TWO, around(lambda original, x: x), "why"))
    hooks.find(Hook(ONE, around(Doubled().doubled), "why"))
    with pytest.raises(ConfigError, match=r"has parameters \['y'\] that its replacement"):
        hooks.find(Hook(ONE, around(Doubled().late), "why"))
    with pytest.raises(ConfigError, match=r"expects \['y'\] among them"):
        hooks.find(Hook(Target.at(f"{MODULE}:two", "x", "y"), around(print), "why"))
