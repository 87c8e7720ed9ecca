"""Reference counts: calibrated in one module, exact to the holder. These tests fail first where CPython counts anew."""

import ast
import gc
import itertools
import weakref
from pathlib import Path

import pytest
import tensorflow as tf

import coexec
from coexec.dispatch import return_values
from coexec.follow import liveness
from coexec.follow.tapes import Tapes
from tracer.lazy import LazyTensor, Output, new_lazy
from tracer.spec import spec_of

ROOT = Path(__file__).resolve().parent.parent.parent


class Thing:
    """Something that can be held in every way."""


class Run:
    """What computes the lazy tensors below."""

    def force(self, lazy):
        lazy._value = tf.constant(1.0)


def lazy_tensor(key=-1):
    return new_lazy(Output(spec_of(tf.constant(1.0))), key, Run())


def in_a_list(value):
    return [value]


def in_a_dict(value):
    return {"value": value}


def in_an_object(value):
    holder = Thing()
    holder.value = value
    return holder


def in_a_closure(value):
    return lambda: value


def in_a_generator(value):
    def generate():
        mine = value
        yield
        yield mine

    generator = generate()
    next(generator)
    return generator


HOLDERS = [in_a_list, in_a_dict, in_an_object, in_a_closure, in_a_generator]


@pytest.fixture(autouse=True)
def no_collection():
    """No collection comes in between, which could hold things for a moment."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_only_a_list_holds_is_found(count):
    values = [*(Thing() for _ in range(count)), None]
    assert liveness.referenced(values) == []
    assert liveness.let_go(values, [*range(count)]) == []
    assert values == [None] * (count + 1)


@pytest.mark.parametrize("hold", HOLDERS)
def test_one_more_holder_is_noticed(hold):
    values = [Thing(), Thing(), None, Thing()]
    kept = hold(values[1])
    assert liveness.referenced(values) == [1]
    assert liveness.let_go(values, [0, 1, 3]) == [1]
    assert [value is None for value in values] == [True, False, True, True]
    del kept
    assert liveness.referenced(values) == []


def test_a_chain_is_let_go_to_its_end():
    values = [Thing() for _ in range(4)]
    for one, other in itertools.pairwise(values):
        one.other = other
    del one, other
    assert liveness.referenced(values) == [1, 2, 3]
    assert liveness.let_go(values, [0, 1, 2, 3]) == []


def one_variable(watched=False, touch=lambda lazy: None, places=0, kept=None):
    lazy = lazy_tensor()
    touch(lazy)
    if kept is not None:
        kept.append(lazy)
    return liveness.is_known(lazy, places, watched)


def test_an_argument_is_known_to_nobody_else():
    assert not one_variable()
    assert not one_variable(watched=True)
    assert not one_variable(touch=lambda lazy: lazy._id)
    assert one_variable(watched=True, touch=lambda lazy: lazy._id)
    kept = []
    assert one_variable(kept=kept)
    assert not one_variable(places=1, kept=kept)
    assert one_variable(touch=lambda lazy: kept.append(weakref.ref(lazy)))


@pytest.mark.parametrize("hold", HOLDERS)
def test_one_more_holder_of_an_argument_is_noticed(hold):
    kept = []
    assert one_variable(touch=lambda lazy: kept.append(hold(lazy)))


FORMS = [
    lambda t: t,
    lambda t: [t],
    lambda t: (t,),
    lambda t: {"a": t},
    lambda t: [t, (t, {"b": t})],
    lambda t: [[t], t],
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hold", [None, *HOLDERS])
def test_results_are_handed_out_but_where_somebody_else_holds_them(form, hold):
    lazy = lazy_tensor()
    given, kept = [form(lazy)], hold and hold(lazy)
    del lazy
    return_values.hand_out(given, False)
    found = {type(leaf) for leaf in tf.nest.flatten(given)}
    assert (LazyTensor in found) == (hold is not None)
    assert len(found) == 1
    del kept


@pytest.mark.parametrize("hold", [None, *HOLDERS])
def test_tapes_are_alive_as_long_as_somebody_holds_one(hold, monkeypatch):
    for name in ("_tape_set_add", "_tape_set_remove"):  # TensorFlow's C++ code would take the stand-in for a tape
        monkeypatch.setattr(f"coexec.follow.tapes.{name}", lambda tape: None)
    tapes = Tapes(None)
    assert not tapes.alive()
    tape = Thing()
    tapes.opened(tape)
    tapes.popped(tape)
    kept = hold and hold(tape)
    del tape
    assert tapes.alive() == (hold is not None)
    tapes.entries = [Entry()]
    tapes.end()
    assert tapes._finished == (set() if hold else {0})
    assert Entry.recorded == (hold is not None)
    Entry.recorded = False
    del kept


class Entry:
    """A record that waits."""

    tapes = (0,)
    recorded = False

    def record(self, constant):
        type(self).recorded = True


def test_a_call_agrees():
    """A result of a followed call is an eager tensor, and the same tensor here and there where the program keeps it."""
    kept = []

    @coexec.function
    def step(x, keep):
        y = tf.square(x) + 1.0
        if keep:
            kept.append(y)
        return y

    for _ in range(4):
        assert type(step(tf.constant(2.0), False)) is not LazyTensor
    for _ in range(4):
        assert step(tf.constant(2.0), True) is kept[-1]
    assert step.stats().followed >= 6


def test_nobody_else_counts_references():
    found = []
    for package in ("coexec", "tracer"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                name = getattr(node, "attr", None) or getattr(node, "id", None)
                if name in ("getrefcount", "getweakrefcount") and path.name != "liveness.py":
                    found.append(f"{path}:{node.lineno}")
    assert not found


def test_calibration_says_so_where_counts_tell_nothing():
    before = liveness._ARGUMENT
    try:
        with pytest.raises(RuntimeError, match="reference counts"):
            liveness._calibrate("_ARGUMENT", lambda: True)
    finally:
        liveness._ARGUMENT = before
