"""Effects: what counts as a change of an object that a library call can reach."""

import keras
import pytest

from tracer.effects import Effects


def _set_again(held):
    held["rate"] = held.pop("rate")


def _renamed(held):
    held["speed"] = held.pop("rate")


def _swapped(held):
    held["rate"], held["seed"] = held["seed"], held["rate"]


def _swapped_and_set_again(held):
    _swapped(held)
    _set_again(held)


def _set_again_to_another_value(held):
    _set_again(held)
    held["rate"] = 0.25


def _added(held):
    held["more"] = None


def _deleted(held):
    del held["rate"]


@pytest.mark.parametrize(
    ("act", "changed"),
    [
        (_set_again, None),  # Keras 2's layers do so in every call: the dictionary has another order then
        (_renamed, {"rate", "speed"}),
        (_swapped, {"rate", "seed"}),
        (_swapped_and_set_again, {"rate", "seed"}),
        (_set_again_to_another_value, {"rate"}),
        (_added, {"more"}),
        (_deleted, {"rate"}),
    ],
)
def test_attributes_are_compared_by_name(act, changed):
    layer = keras.layers.Dropout(0.5, seed=1)
    with Effects([layer], lightly=True) as effects:  # lightly: this test's own code is not looked at
        act(layer.__dict__)
    if changed is None:
        assert effects.reason is None
    else:
        names, _, holder = (effects.reason or "").removeprefix("it changes ").partition(" of ")
        assert (set(names.split(", ")), holder) == (changed, "a Dropout")


def test_the_order_of_a_container_is_part_of_it():
    layer = keras.layers.Dropout(0.5, seed=1)
    layer.__dict__["notes"] = {"a": 1, "b": 2}
    with Effects([layer], lightly=True) as effects:
        notes = layer.__dict__["notes"]
        notes["a"] = notes.pop("a")
    assert effects.reason == "it changes a dict"
