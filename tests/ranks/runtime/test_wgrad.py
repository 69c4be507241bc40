"""The weight-gradient store, alone: it needs no ranks."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from megatron_ext.runtime.wgrad import WeightGradStore


class Weight:
    """Stands for a parameter, or for the memory that a task holds."""

    grad = None


@pytest.fixture
def store():
    return WeightGradStore()


def owe(store, key, *numbers, log):
    with store.collect(key):
        for number in numbers:
            store.put(Weight(), lambda number=number: log.append((key, number)))


def test_runs_in_the_order_of_the_backward_pass_and_by_key(store):
    log = []
    for key in ((0, 0), (1, 0), (0, 1)):
        owe(store, key, 1, 2, 3, log=log)
    assert len(store) == 3 and log == []
    store.run((1, 0))
    store.run((0, 0))
    assert log == [((1, 0), 1), ((1, 0), 2), ((1, 0), 3), ((0, 0), 1), ((0, 0), 2), ((0, 0), 3)]
    assert len(store) == 1


def test_a_pass_without_split_layers_still_owes_its_w(store):
    with store.collect("k"):
        pass
    assert len(store) == 1
    store.run("k")
    assert len(store) == 0


def test_run_needs_a_backward_pass_and_happens_once(store):
    with pytest.raises(RuntimeError, match=r"no postponed weight gradients for \(0, 3\)"):
        store.run((0, 3))
    owe(store, (0, 3), 1, log=[])
    store.run((0, 3))
    with pytest.raises(RuntimeError, match=r"no postponed weight gradients for \(0, 3\)"):
        store.run((0, 3))


def test_put_outside_of_a_backward_pass(store):
    with pytest.raises(RuntimeError, match="only inside a B pass"):
        store.put(Weight(), lambda: None)


def test_backward_passes_do_not_nest_or_repeat(store):
    with store.collect("a"), pytest.raises(RuntimeError, match="already being collected"):
        with store.collect("b"):
            pass
    with pytest.raises(RuntimeError, match="weight gradients of a are already"):
        with store.collect("a"):
            pass
    assert len(store) == 1 and not store.collecting


def test_collecting_and_holds(store):
    first, second = Weight(), Weight()
    assert not store.collecting and not store.holds(first)
    with store.collect("k"):
        assert store.collecting and not store.holds(first)
        store.put(first, lambda: None)
        store.put(first, lambda: None)
        assert store.holds(first) and not store.holds(second)
    # Once the pass is over its parameters' gradients may come from elsewhere: owed, not held.
    assert not store.collecting and not store.holds(first)
    with store.collect("l"):
        assert not store.holds(first)


def test_a_failed_backward_pass_owes_nothing(store):
    with pytest.raises(ZeroDivisionError):
        with store.collect("k"):
            store.put(Weight(), lambda: None)
            raise ZeroDivisionError
    assert len(store) == 0 and not store.collecting
    owe(store, "k", 1, log=[])
    assert len(store) == 1


def test_clear_forgets_everything(store):
    log, parameter = [], Weight()
    owe(store, "k", 1, log=log)
    with store.collect("l"):
        store.put(parameter, lambda: None)
        store.clear()
        assert not store.collecting and not store.holds(parameter)
    store.clear()
    assert len(store) == 0
    with pytest.raises(RuntimeError, match="no postponed"):
        store.run("k")
    owe(store, "k", 2, log=log)
    store.run("k")
    assert log == [("k", 2)]


def test_memory_goes_task_by_task(store):
    """While task i runs, what tasks before it held is gone, and what later ones hold is not."""
    held, alive = [], []

    def task(memory):
        return lambda: (memory, alive.append([r() is not None for r in held]))

    with store.collect("k"):
        for _ in range(3):
            memory = Weight()
            held.append(weakref.ref(memory))
            store.put(Weight(), task(memory))
            del memory
    gc.disable()
    try:
        store.run("k")
    finally:
        gc.enable()
    assert alive == [[True, True, True], [False, True, True], [False, False, True]]
    assert [r() for r in held] == [None] * 3


def test_a_failing_task_leaves_nothing_behind(store):
    memory = Weight()
    reference = weakref.ref(memory)

    def fail():
        raise ZeroDivisionError

    with store.collect("k"):
        store.put(Weight(), fail)
        store.put(Weight(), lambda memory=memory: memory)
    del memory
    with pytest.raises(ZeroDivisionError):
        store.run("k")
    assert len(store) == 0
    gc.collect()
    assert reference() is None


def test_a_failing_task_leaves_a_trainers_gradient(store):
    """It may lie in a buffer of the trainer's, who tries again."""
    weight, buffer = Weight(), object()
    weight.grad = buffer

    def fail():
        raise ZeroDivisionError

    with store.collect("k"):
        store.put(weight, lambda: setattr(weight, "grad", object()))
        store.put(weight, fail)
    with pytest.raises(ZeroDivisionError):
        store.run("k")
    assert weight.grad is buffer


def test_done_is_called_once_after_the_last_task_of_a_parameter(store):
    log, shared, own = [], Weight(), Weight()
    names = {id(shared): "shared", id(own): "own"}

    def done(parameter):
        log.append(f"done {names[id(parameter)]}")

    with store.collect("k"):
        store.put(shared, lambda: log.append("first"), others=(own,), done=done)
        store.put(shared, lambda: log.append("second"), done=done)
    store.run("k")
    assert log == ["first", "done own", "second", "done shared"]


def test_owes_until_the_work_runs(store):
    first, second = Weight(), Weight()
    with store.collect("a"):
        store.put(first, lambda: None, others=(second,))
        assert store.holds(second) and not store.owes(first)
    assert store.owes(first) and store.owes(second)
    with store.collect("b"):
        assert store.owes(first) and not store.holds(first)
    store.run("a")
    assert not store.owes(first)
    store.clear()
    assert not store.owes(second)


def test_placeholders_and_at_end_belong_to_one_pass(store):
    log, weight = [], Weight()
    with store.collect("a"):
        store.put(weight, lambda: None, placeholders=(weight,))
        store.at_end(lambda: log.append("end"))
        assert store.placeholder(weight) and log == []
    assert log == ["end"] and not store.placeholder(weight)
    with pytest.raises(ZeroDivisionError):
        with store.collect("b"):
            assert not store.placeholder(weight)
            store.at_end(lambda: log.append("failed"))
            raise ZeroDivisionError
    assert log == ["end", "failed"]


class Parts:
    """Stands for a tensor that is gathered; what happens to it goes to ``log``."""

    def __init__(self, name, log):
        self.name, self.log, self.started = name, log, False

    def start(self):
        if not self.started:
            self.started = True
            self.log.append(f"gather {self.name}")


def owe_gathered(store, names, log, weights=None):
    """Tasks as of fused layers, whose tensors are gathered."""
    for name in names:
        weight = Weight() if weights is None else weights[name[0]]
        store.put(
            weight,
            lambda name=name: log.append(f"run {name}"),
            done=lambda _, name=name: log.append(f"done {name}"),
            sharded=[Parts(name, log)],
        )


def test_w_gathers_one_task_ahead(store):
    log = []
    with store.collect("k"):
        owe_gathered(store, "abc", log)
    assert log == []
    store.run("k")
    runs = [word for word in log if "done" not in word]
    assert runs == ["gather a", "gather b", "run a", "gather c", "run b", "run c"]
    assert log.index("done a") == log.index("run a") + 1


def test_work_of_several_passes_joins(store):
    """Rows of later keys stand behind those of earlier ones, in one task; what cannot be joined
    stays apart, the last key's first."""
    weight, other, log = torch.nn.Parameter(torch.zeros(2)), Weight(), []

    def multiplied(x):
        log.append(x.flatten().tolist())

    for key in ("b", "a"):  # as B passes run
        with store.collect(key):
            rows = torch.full((1 + (key == "b"), 2), float(ord(key)))
            store.put(weight, multiplied, rows=[rows])
            store.put(other, lambda key=key: log.append(key))
    store.join(["a", "b"])
    assert len(store) == 1 and store.owes(weight) and store.owes(other)
    store.run("a")
    assert log == [[97.0] * 2 + [98.0] * 4, "b", "a"] and not len(store)
    with pytest.raises(RuntimeError, match="no postponed weight gradients for b"):
        store.run("b")
