"""Records: tapes catch up with memoized calls whose operations were given Python values, of every kind."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import run_both


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


class Of(keras.layers.Layer):
    """A layer of one expression."""

    def __init__(self, expression):
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.expression = expression

    def call(self, x):
        return self.expression(x * self.scale)


EXPRESSIONS = {
    "arange of floats": lambda x: x + keras.ops.arange(0, 4, dtype="float32"),
    "arange of integers": lambda x: x * keras.ops.cast(keras.ops.arange(4), "float32"),
    "range": lambda x: x + tf.range(0.0, 4.0, 1.0),
    "range of float64": lambda x: tf.cast(x, tf.float64) + tf.range(0, 4, dtype=tf.float64),
    "range of int64": lambda x: x + tf.cast(tf.range(4, dtype=tf.int64), tf.float32),
    "linspace": lambda x: x + keras.ops.linspace(0.0, 1.0, 4),
    "linspace, raw": lambda x: x + tf.raw_ops.LinSpace(start=0.0, stop=1.0, num=4),
    "linspace of float64": lambda x: tf.cast(x, tf.float64) * tf.linspace(np.float64(0.0), np.float64(1.0), 4),
    "fill": lambda x: x + tf.fill([4], 2.0),
    "fill with a NumPy scalar": lambda x: x + tf.cast(tf.raw_ops.Fill(dims=[4], value=np.float32(2.0)), tf.float32),
    "fill by int64": lambda x: x + tf.fill(tf.constant([4], tf.int64), 2.0),
    "power": lambda x: tf.pow(x, 2.0) + x**3,
    "power of a number": lambda x: tf.pow(2.0, x),
    "numbers on the left": lambda x: 1.0 / (2.0 + x),
    "NumPy scalars": lambda x: x * np.float32(2.0) + np.float32(1.0),
    "arrays": lambda x: x * np.arange(4, dtype=np.float32),
    "raw numbers": lambda x: tf.raw_ops.Mul(x=x, y=3.0) + tf.raw_ops.AddV2(x=1.0, y=x),
    "select": lambda x: tf.where(x > 1.0, x, 0.0),
    "clip": lambda x: tf.clip_by_value(x, 0.5, 2),
    "reshape by int64": lambda x: tf.reshape(x, np.array([2, 4], np.int64)),
    "stack with numbers": lambda x: tf.stack([x[0, 0], 1.0, 2.0]),
    "concat with an array": lambda x: tf.concat([x, np.ones([1, 4], np.float32)], 0),
    "identity of several": lambda x: tf.raw_ops.IdentityN(input=[x, tf.constant(2.0), tf.constant(3)])[0] * x,
    "one hot": lambda x: x @ tf.one_hot([0, 1, 2, 3], 4, on_value=2.0, off_value=-1.0),
    "pad": lambda x: tf.pad(x, [[0, 0], [1, 1]], constant_values=1.0),
    "gather": lambda x: tf.gather(x, [1, 0], axis=1),
    "complex": lambda x: tf.abs(tf.complex(x, 1.0) * 2j),
    "half": lambda x: tf.cast(x, tf.float16) * 2.0 + np.float16(1.0),
}


@pytest.mark.sample(*list(EXPRESSIONS)[::4])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_records_of_memoized_calls(name):
    """A jacobian, and a tape that outlives the call, ask for all that was recorded: gradients are eager's."""
    expression, kept = EXPRESSIONS[name], []

    def make(decorate):
        layer, x, tapes = Of(expression), tf.constant([[1.0, 2.0, 0.5, 3.0], [0.1, 0.2, 0.3, 0.4]]), []
        layer(x)

        @decorate
        def step(x, how):
            with tf.GradientTape(persistent=how == "kept") as tape:
                tape.watch(x)
                y = layer(x)
                z = tf.reduce_sum(tf.cast(y, tf.float32) ** 2)
            if how == "kept":
                tapes.append((tape, y, z))
                return z
            if how == "jacobian":
                return tape.jacobian(z, [x, layer.scale])
            return tape.gradient(z, [x, layer.scale]), float(z)

        def call(how):
            result = step(x, how)
            while tapes:
                tape, _, z = tapes.pop()
                result = result, tape.gradient(z, x)
            return result

        kept.append(step)
        return call

    run_both(make, [(how,) for how in ("plain", "jacobian", "kept") for _ in range(5)])
    stats = kept[1].stats()
    assert stats.followed >= 9
    assert stats.regions > 0


def test_positions_in_a_training_step():
    """A layer that makes positions, under a tape that outlives its gradient's call, as most transformers have one."""

    def make(decorate):
        keras.utils.set_random_seed(1)

        class Positions(keras.layers.Layer):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(3)

            def call(self, x):
                return self.dense(x + keras.ops.arange(0, 4, dtype="float32")[:, None])

        layer, optimizer = Positions(), keras.optimizers.SGD(0.001)
        layer(tf.ones([2, 4, 3]))

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(x) ** 2)
            gradients = tape.gradient(loss, layer.trainable_variables)
            optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
            return float(loss)

        return step

    fn = run_both(make, [(tf.ones([2, 4, 3]),)] * 8)
    assert isinstance(fn, coexec.Function)
    assert fn.stats().followed == 7
    assert fn.stats().regions > 0
