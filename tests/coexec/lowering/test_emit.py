"""What an executable is made of: each operation once, and only what somebody reads is given out."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.compile import executable
from tests.coexec import run_both

both_backends = pytest.mark.parametrize("jit_compile", [True, False])

X = tf.constant([[1.0, -2.0], [0.5, 4.0]])


@pytest.fixture
def compiled(monkeypatch):
    """Every segment is launched; returns plans, and how often each operation is in the definition made of each."""
    found = []
    prepare = executable.Executable.__init__

    def noted(self, plan, backend, *varying):
        prepare(self, plan, backend, *varying)
        definition = self._context.get_function_def(self.name)
        found.append((plan, collections.Counter(node.op for node in definition.node_def)))

    monkeypatch.setattr(executable.Executable, "__init__", noted)
    with testing.compile_everything():
        yield found


@both_backends
def test_an_operation_on_the_same_inputs_is_emitted_once(compiled, jit_compile):
    """Equal operations are one; other attributes, other constants and the sign of zero make others."""

    def step(x):
        twice = [tf.exp(x) for _ in range(4)]
        sums = [tf.reduce_sum(x, axis) for axis in (0, 1, 0, 1)]
        zeros = [1.0 / (x[0, 0] * zero) for zero in (tf.constant(0.0), tf.constant(-0.0))]
        return tf.add_n(twice), sums, zeros, tf.cast(x, tf.float64), tf.cast(x, tf.float16)

    run_both(lambda decorator: decorator(step), [(X,)] * 6, jit_compile=jit_compile)
    _, ops = compiled[-1]
    assert ops["Exp"] == 1
    assert ops["Sum"] == 2


@both_backends
def test_what_draws_is_never_shared(compiled, jit_compile):
    """Two equal draws are two, as eagerly."""

    def step(x):
        return tf.random.uniform([2, 2]) + x, tf.random.uniform([2, 2]) + x

    def make(decorator):
        tf.random.set_seed(1)
        return decorator(step)

    fn = run_both(make, [(X,)] * 5, jit_compile=jit_compile)
    first, second = fn(X)
    assert not np.array_equal(first, second)
    assert fn.stats().launches > 0
    assert compiled


@both_backends
def test_what_is_read_between_two_writes_is_not_shared(compiled, jit_compile):
    """A variable's values before and after an assignment are two."""
    variable = tf.Variable(1.0)

    def step(x):
        before = tf.exp(variable)
        variable.assign_add(0.1)
        return before + tf.exp(variable) + tf.reduce_sum(x)

    fn = coexec.function(step, jit_compile=jit_compile)
    for _ in range(5):
        held = float(variable)
        expected = np.exp(np.float32(held)) + np.exp(np.float32(held) + np.float32(0.1)) + np.sum(X)
        np.testing.assert_allclose(fn(X), expected, rtol=1e-6)
    assert compiled[-1][1]["Exp"] == 2
    assert fn.stats().launches > 0


@both_backends
def test_large_results_are_computed_as_often_as_the_program_does(compiled, jit_compile):
    """`tf.recompute_grad` computes again what it does not want to hold."""
    large = tf.ones([200, 200])

    def step(x):
        return tf.reduce_sum(tf.exp(x) + tf.exp(x))

    run_both(lambda decorator: decorator(step), [(large,)] * 5, jit_compile=jit_compile)
    assert compiled[-1][1]["Exp"] == 2


@both_backends
def test_a_training_step_gives_out_nothing_but_what_it_returns(compiled, jit_compile):
    """Neither gradients, nor what Keras notes on activations, nor anything of the runtime's own counts as read."""
    keras.utils.set_random_seed(0)
    cell, head = keras.layers.LSTMCell(4), keras.layers.Dense(1, activation="sigmoid")
    optimizer = keras.optimizers.Adam()
    objective = keras.losses.BinaryCrossentropy()
    x, y = tf.ones([3, 2, 5]), tf.ones([3, 1])

    @coexec.function(jit_compile=jit_compile)
    def step(x, y):
        with tf.GradientTape() as tape:
            state = [tf.zeros([3, 4]), tf.zeros([3, 4])]
            for time in range(2):
                hidden, state = cell(x[:, time], state)
            loss = objective(y, head(hidden))
        variables = cell.trainable_variables + head.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    for _ in range(12):
        step(x, y)
    assert {len(plan.outputs) for plan, ops in compiled if ops["MatMul"]} == {1}
