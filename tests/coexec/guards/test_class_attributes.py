"""Attributes of the program's classes that code which only computes asks for: by the class, and not by an object."""

import abc
import enum

import keras
import pytest
import tensorflow as tf

from tests.coexec.guards.test_purity import CALLS, Layer, compare


class Kind(enum.Enum):
    PLAIN = "plain"
    OTHER = "other"


def classes(base=object):
    class Inner:
        rate = 1.0

    class Config(base):
        rate, table, inner = 2.0, {"a": 1.0}, Inner

        @staticmethod
        def twice(x):
            return x * 2.0

        @classmethod
        def scaled(cls, x):
            return x * cls.rate

    class Derived(Config):
        pass

    return Derived, Config, Inner


CHANGES = {
    "a number": lambda derived, config, inner: setattr(config, "rate", 3.0),
    "one that goes before": lambda derived, config, inner: setattr(derived, "rate", 3.0),
    "an item": lambda derived, config, inner: config.table.update(a=4.0),
    "a class in it": lambda derived, config, inner: setattr(inner, "rate", 5.0),
    "a static method": lambda derived, config, inner: setattr(config, "twice", staticmethod(lambda x: x * 6.0)),
    "a class method": lambda derived, config, inner: setattr(config, "scaled", classmethod(lambda cls, x: x * 7.0)),
    "bases": lambda derived, config, inner: setattr(derived, "__bases__", (type("New", (config,), {"rate": 8.0}),)),
}


@pytest.mark.parametrize("base", [object, abc.ABC, tf.Module])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_class_says_is_looked_at_again(change, base):
    def make():
        derived, config, inner = classes(base)

        def work(x):
            x = tf.tanh(x) * derived.rate * derived.table["a"] * derived.inner.rate
            return derived.twice(x) + derived.scaled(x)

        layer = Layer(work)
        return lambda x: layer(x), (derived, config, inner)

    compare(make, lambda changed, i: change(*changed) if i == 8 else None)


def test_members_of_an_enumeration_never_change():
    class Chooses(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.kind = Kind.PLAIN

        def call(self, x):
            return tf.tanh(x) * (2.0 if self.kind == Kind.OTHER or self.kind.value == "x" else 3.0)

    def make():
        layer = Chooses()
        return lambda x: layer(x), layer

    def change(layer, i):
        if i == 8:
            layer.kind = Kind.OTHER

    compare(make, change)


def test_a_class_that_computes_its_attributes():
    asked = []

    class Meta(type):
        def __getattr__(cls, name):
            asked.append(name)
            return float(len(asked))

    class Computes(metaclass=Meta):
        pass

    def make():
        asked.clear()
        layer = Layer(lambda x: tf.tanh(x) * Computes.rate)
        return lambda x: layer(x), None

    compare(make, regions=0)
    assert len(asked) == CALLS


def test_what_a_metaclass_says_is_looked_at_again():
    def make():
        class Meta(type):
            rate = 2.0

            @property
            def twice(cls):
                return 2.0 * cls.rate

            def scaled(cls, x):
                return x * cls.rate

        class Config(metaclass=Meta):
            pass

        layer = Layer(lambda x: Config.scaled(tf.tanh(x)) * Config.twice + Config.rate)
        return lambda x: layer(x), (Meta, Config)

    def change(changed, i):
        meta, config = changed
        if i == 7:
            meta.rate = 5.0
        if i == 11:
            meta.twice = property(lambda cls: -cls.rate)
        if i == 13:
            del meta.twice
            config.twice = 4.0

    compare(make, change, calls=20)


def test_classes_that_cannot_be_hashed():
    class Meta(type):
        def __eq__(cls, other):
            raise RuntimeError("nobody may ask")

        __hash__ = None

    def make():
        class Config(metaclass=Meta):
            rate = 2.0

        config = Config()
        layer = Layer(lambda x: tf.tanh(x) * config.rate)
        return lambda x: layer(x), Config

    def change(config, i):
        if i == 8:
            config.rate = 3.0

    compare(make, change, regions=0)
