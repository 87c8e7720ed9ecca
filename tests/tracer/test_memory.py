"""The words in memory that change with whatever is written to an object."""

import functools
import types

import keras
import numpy as np
import pytest

from tracer import memory


def words(addresses):
    return memory.words(memory.places(addresses))


class Plain:
    def __init__(self):
        self.number = 1


def instance_places(holder):
    return [memory.slot_of(holder), *memory.dict_places(holder.__dict__)]


def both(parts):
    return [*parts[0], *parts[1]]


WRITES = {  # an object, where its words are, and a write to it
    "attribute": (Plain, instance_places, lambda o: setattr(o, "number", 2)),
    "attribute past __setattr__": (Plain, instance_places, lambda o: object.__setattr__(o, "number", 2)),
    "attribute in its dict": (Plain, instance_places, lambda o: vars(o).update(number=2)),
    "attribute that ends": (Plain, instance_places, lambda o: delattr(o, "number")),
    "a dict of its own": (Plain, instance_places, lambda o: setattr(o, "__dict__", dict(vars(o)))),
    "item of a dict": (lambda: {"a": 1}, memory.dict_places, lambda o: o.update(a=2)),
    "a dict that is emptied": (lambda: {"a": 1}, memory.dict_places, lambda o: o.clear()),
    "a module's global": (lambda: vars(types.ModuleType("m")), memory.dict_places, lambda o: o.update(a=2)),
    "item of a list": (lambda: [1, 2], lambda o: both(memory.list_places(o, 9)), lambda o: o.__setitem__(0, 3)),
    "one more item": (lambda: [1, 2], lambda o: both(memory.list_places(o, 9)), lambda o: o.append(3)),
    "a list in another order": (lambda: [1, 2], lambda o: both(memory.list_places(o, 9)), lambda o: o.reverse()),
    "the state of a partial": (
        lambda: functools.partial(len), memory.partial_places, lambda o: o.__setstate__((max, (), {}, None)),
    ),
    "one more in a set": (lambda: {1, 2}, lambda o: both(memory.set_places(o, 99)), lambda o: o.add(3)),
    "one more in an empty set": (set, lambda o: both(memory.set_places(o, 99)), lambda o: o.add(3)),
    "one for another in a set": (
        lambda: {1, 2}, lambda o: both(memory.set_places(o, 99)), lambda o: (o.discard(1), o.add(3)),
    ),
    "an array": (lambda: np.zeros(3, np.int8), memory.array_places, lambda o: o.__setitem__(2, 1)),
    "a class": (lambda: keras.layers.Dense, memory.class_places, lambda o: setattr(o, "unheard_of", 1)),
    "a base of a class": (
        lambda: keras.layers.Dense, memory.class_places, lambda o: setattr(keras.layers.Layer, "unheard_of", 1),
    ),
}  # fmt: skip


def test_the_layout_of_objects_is_known_here():
    assert memory.KNOWN


@pytest.mark.parametrize("name", WRITES)
def test_a_write_changes_a_word(name):
    make, places, write = WRITES[name]
    for _ in range(40):  # Python runs what is run often by other instructions
        holder = make()
        where = places(holder)
        before = words(where)
        assert words(where) == before
        write(holder)
        try:
            # What a list or set had its items in is looked at only where its own words are the same.
            assert words(where) != before
        finally:
            for kind in (keras.layers.Dense, keras.layers.Layer):
                if "unheard_of" in vars(kind):
                    del kind.unheard_of


def test_reading_changes_none():
    layer = keras.layers.Dense(3)
    where = [*instance_places(layer), *memory.class_places(type(layer))]
    before = words(where)
    assert layer.units == vars(layer)["units"] == 3
    assert callable(layer.count_params)
    assert words(where) == before


def test_classes_that_cannot_be_written_to_have_no_words():
    assert memory.class_places(int) == []
