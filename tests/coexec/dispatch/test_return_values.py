"""Return values: eager tensors, in the very containers that the program returned where it holds these itself."""

import collections

import pytest
import tensorflow as tf

import coexec
from tracer.private import EagerTensor

Pair = collections.namedtuple("Pair", "first second")


class Noted(Pair):
    """A named tuple with attributes of its own."""


KEPT = {}


def _kept(x):
    KEPT["it"] = (x * 2.0, 1)
    return KEPT["it"]


def _kept_in_a_dict(x):
    KEPT["it"] = {"inner": (x * 2.0,)}
    KEPT["inner"] = KEPT["it"]["inner"]
    return KEPT["it"]


def _kept_inside(x):
    inner = (x * 2.0,)
    KEPT["it"] = [inner]
    return inner, (inner, x + 1.0)


def _noted(x):
    it = Noted(x * 2.0, 1)
    it.extra = 5
    return it


def _twice(x):
    it = x * 2.0, x + 1.0
    return it, [it], it


PROGRAMS = {
    "kept": (_kept, lambda r: (r is KEPT["it"], r[0] is KEPT["it"][0])),
    "kept in a dict": (_kept_in_a_dict, lambda r: (r is KEPT["it"], r["inner"] is KEPT["inner"])),
    "kept inside": (_kept_inside, lambda r: (r[0] is KEPT["it"][0], r[1][0] is r[0])),
    "attributes": (_noted, lambda r: (type(r) is Noted, r.extra)),
    "twice": (_twice, lambda r: (r[0] is r[1][0], r[0] is r[2], r[0][0] is r[2][0])),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_returned_is_what_was_made(name):
    function, look = PROGRAMS[name]
    wanted = look(function(tf.ones([2])))
    step = coexec.function(function)
    for number in range(6):
        result = step(tf.fill([2], float(number)))
        assert look(result) == wanted
        assert tf.nest.flatten(result)[0].numpy().tolist() == [2.0 * number] * 2
    assert step.stats().followed >= 5


@pytest.mark.parametrize("form", [lambda y: (y, 1), lambda y: Pair(y, [y]), lambda y: {"a": ((y,),)}])
def test_what_nobody_else_holds_has_ordinary_tensors(form):
    step = coexec.function(lambda x: form(x * 2.0))
    for _ in range(4):
        result = step(tf.ones([2]))
    assert {type(v) for v in tf.nest.flatten(result) if tf.is_tensor(v)} == {EagerTensor}


def test_one_tuple_at_two_places_stays_one_with_ordinary_tensors():
    step = coexec.function(_twice)
    for _ in range(4):
        one, (two,), three = step(tf.ones([2]))
    assert one is two is three
    assert {type(v) for v in one} == {EagerTensor}
