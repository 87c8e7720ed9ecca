"""Errors of the program's pass through every hook: none is taken for the runtime's, and nothing runs twice."""

import keras
import pytest
import tensorflow as tf

import coexec
from tracer import hooks
from tracer.faults import is_passing

# Hooks that call what they displace through a function that is marked.
THROUGH_OTHERS = {"_fast_path", "_execute_hook", "_execute_cancelable_hook", "_constant_hook", "noting_operation_seed"}

X = tf.constant([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]])


def a_gradient_of_the_program(fails):
    """A backward function, called by TensorFlow's C++ behind the hook on tapes."""
    w = tf.Variable(tf.ones([3, 3]))

    @tf.custom_gradient
    def scaled(x):
        def backward(dy):
            fails()
            return dy

        return x * 1.5, backward

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(scaled(X @ w))
        return tape.gradient(loss, w)

    return step


def a_property_of_a_layer(fails):
    """A setter, called behind the hook on attributes of what memoized calls have read."""

    class Scaled(keras.layers.Layer):
        factor = 1.0

        @property
        def scale(self):
            return self.factor

        @scale.setter
        def scale(self, value):
            fails()
            self.factor = value

        def call(self, x):
            self.scale = self.factor + 1.0
            return x * self.scale

    layer = Scaled()
    return lambda: tf.reduce_sum(layer(X))


def a_weight_of_a_layer(fails):
    """An initializer, called behind the hook on methods that add weights."""

    class Growing(keras.layers.Layer):
        def build(self, shape):
            def initializer(shape, dtype=None):
                fails()
                return tf.ones(shape, dtype)

            self.scale = self.add_weight(shape=(3,), initializer=initializer, trainable=False)

        def call(self, x):
            return x * self.scale

    class Stack(keras.layers.Layer):
        def call(self, x):
            return Growing()(x)

    stack = Stack()
    return lambda: tf.reduce_sum(stack(X))


def an_opaque_function(fails):
    """A function that is not to be followed, inside of a layer."""

    @coexec.opaque
    def doubled(x):
        fails()
        return x * 2.0

    class Doubled(keras.layers.Layer):
        def call(self, x):
            return doubled(x)

    layer = Doubled()
    return lambda: tf.reduce_sum(layer(X))


def a_function_with_a_signature(fails):
    """A co-executed function with a signature, inside of a layer."""

    @coexec.function(input_signature=[tf.TensorSpec([None, 3])])
    def doubled(x):
        fails()
        return x * 2.0

    class Doubled(keras.layers.Layer):
        def call(self, x):
            return doubled(x)

    layer = Doubled()
    return lambda: tf.reduce_sum(layer(X))


def a_padded_function(fails):
    """A function whose arguments are padded, inside of a layer."""

    @coexec.dynamic(axis=0, buckets=[2, 4])
    def doubled(x):
        fails()
        return x * 2.0

    class Doubled(keras.layers.Layer):
        def call(self, x):
            return doubled(x)

    layer = Doubled()
    return lambda: tf.reduce_sum(layer(X))


PROGRAMS = [
    a_gradient_of_the_program,
    a_property_of_a_layer,
    a_weight_of_a_layer,
    an_opaque_function,
    a_function_with_a_signature,
    a_padded_function,
]


@pytest.mark.parametrize("decorate", [lambda step: step, coexec.function], ids=["eagerly", "co-executed"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_an_error_of_the_program_reaches_it_once(program, decorate, monkeypatch):
    """Also in functions that are not decorated: the hooks are there for the whole process."""
    monkeypatch.setenv("COEXEC_DEBUG", "0")  # as users have it: errors of the runtime reach nobody
    coexec.function(lambda x: x + 1.0)(X)  # hooks are in place
    reached = []

    def fails():
        reached.append(len(reached))
        if reached[-1] in (2, 6):
            raise ValueError(f"at {reached[-1]}")

    step, outcomes = decorate(program(fails)), []
    for _ in range(9):
        before = len(reached)
        try:
            step()
            outcomes.append(None)
        except ValueError as error:
            outcomes.append(str(error))
        assert len(reached) == before + 1
    assert [n for n, outcome in enumerate(outcomes) if outcome is not None] == [2, 6], outcomes
    assert all(f"at {n}" in outcomes[n] for n in (2, 6)), outcomes


def test_hooks_pass_on_what_the_displaced_function_raises():
    """A hook that is not marked would have the program's error absorbed, and what raised it run again."""
    model = keras.Sequential([keras.layers.Dense(3)])
    unmarked = set()

    @coexec.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        for each in hooks.registry:
            for target, name in getattr(each, "entries", list)():
                hook = vars(target)[name]
                hook = vars(type(hook)).get("__instancecheck__", hook)  # of what stands for a class
                code = getattr(getattr(hook, "fget", hook), "__code__", None)
                if code is None or not is_passing(code):
                    unmarked.add(code.co_name if code else f"{target}.{name}")
        return tape.gradient(loss, model.trainable_variables)

    for _ in range(4):
        step(X)
    assert unmarked == THROUGH_OTHERS
