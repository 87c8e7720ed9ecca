"""What is replaced on a class, or on a base of it, is noticed by the next call that was memoized with its objects."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.coexec import run_both

X = tf.constant(np.random.default_rng(3).normal(size=[4, 6]).astype(np.float32))
Y = tf.constant([0, 1, 2, 1])


def halved(original):
    return lambda self, *args, **kwargs: original(self, *args, **kwargs) * 0.5


def doubled_rate(original):
    def update_step(self, gradient, variable, learning_rate):
        return original(self, gradient, variable, learning_rate * 2.0)

    return update_step


CHANGES = {  # the class, what is replaced on it, and by what, given the original
    "a method of the layer": (keras.layers.Dense, "call", halved),
    "a method of a base": (keras.losses.SparseCategoricalCrossentropy.__bases__[0], "call", halved),
    "a property of the layer": (
        keras.layers.Dense, "kernel", lambda original: property(lambda self: original.fget(self) * 2.0),
    ),
    "a method that the loss has from its base": (keras.losses.SparseCategoricalCrossentropy, "call", halved),
    "a method of the optimizer": (keras.optimizers.SGD, "update_step", doubled_rate),
    "an attribute that nothing reads": (keras.layers.Dense, "unheard_of", lambda original: 1),
}  # fmt: skip
MISSING = object()


@pytest.mark.parametrize("name", CHANGES)
def test_the_next_call_sees_it(name):
    kind, attribute, change = CHANGES[name]
    mine = vars(kind).get(attribute, MISSING)
    original = getattr(kind, attribute, None) if mine is MISSING else mine

    def put_back():
        if mine is MISSING:
            if attribute in vars(kind):
                delattr(kind, attribute)
        else:
            setattr(kind, attribute, mine)

    def make(decorate):
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
        model.build((None, 6))
        objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.SGD(0.1)

        @decorate
        def step(x, changed):
            with tf.GradientTape() as tape:
                loss = objective(Y, model(x))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        def changing(x, changed):
            if changed:
                setattr(kind, attribute, change(original))
            else:
                put_back()
            return step(x, changed)

        made.append(step)
        return changing

    made = []
    calls = [(X, n in (9, 10, 11)) for n in range(18)]
    try:
        run_both(make, calls)
    finally:
        put_back()
    stats = made[1].stats()
    assert stats.regions > 20, made[1].explain()  # before the change, and behind it again
    assert stats.followed > 12
