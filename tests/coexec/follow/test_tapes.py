"""Gradients stay regions beside operations that take TensorFlow's slow path, or run on their own."""

import numpy as np
import pytest
import tensorflow as tf

from tests.coexec import run_both

X = tf.constant(np.random.default_rng(7).normal(size=[6, 3]).astype(np.float32))
IMAGES = tf.constant(np.random.default_rng(8).normal(size=[4, 5, 5, 3]).astype(np.float32))


def step_of(loss_of, shape=(3,), persistent=False, **options):
    """A training step on two variables: `loss_of(x, scale, offset)`."""

    def make(decorate):
        scale, offset = tf.Variable(tf.ones(shape)), tf.Variable(tf.zeros(shape))

        @decorate
        def step(x):
            with tf.GradientTape(persistent=persistent) as tape:
                loss = loss_of(x, scale, offset)
            gradients = tape.gradient(loss, [scale, offset])
            for variable, gradient in zip((scale, offset), gradients, strict=True):
                if gradient is not None:
                    variable.assign_sub(0.01 * gradient)
            return loss, gradients, scale.read_value(), offset.read_value()

        return step

    return make


SLOW = {  # a NumPy scalar among the operands: the fast path refuses it, and TensorFlow comes again, by name
    "comparison": lambda x, s, o: tf.reduce_sum((x * s + o) * tf.cast(x * s > np.float32(0.5), tf.float32)),
    "product": lambda x, s, o: tf.reduce_sum((x * s + o) * np.float32(2.0)),
    "on the left": lambda x, s, o: tf.reduce_sum(np.float32(2.0) * (x * s + o)),
    "maximum": lambda x, s, o: tf.reduce_sum(tf.maximum(x * s + o, np.float32(0.1))),
    "several": lambda x, s, o: tf.reduce_sum(tf.abs(x * s) ** np.float32(1.5) / np.float32(3.0) - np.float32(1) * o),
    "list": lambda x, s, o: tf.reduce_sum(tf.concat([x * s, np.ones([2, 3], np.float32) * o], np.int64(0))),
}


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("persistent", [False, True])
def test_slow_path_operations_are_recorded_in_order(name, persistent):
    fn = run_both(step_of(SLOW[name], persistent=persistent), [(X * (n % 3 + 1.0),) for n in range(14)])
    stats = fn.stats()
    assert (stats.diverged, stats.recorded) == (0, 1)
    assert stats.launches <= stats.followed
    assert stats.regions >= 10, fn.explain()
    assert fn._controller.account.pace().steady is not None, "what takes TensorFlow's slow path is known, all the same"


def test_a_slow_path_number_may_change():
    def make(decorate):
        weight = tf.Variable([1.0, 2.0, 3.0])

        @decorate
        def step(x, number):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.maximum(x * weight, number) * number)
            return loss, tape.gradient(loss, weight)

        return step

    run_both(make, [(X, np.float32(n % 4)) for n in range(16)])


ALONE = {  # an operation that runs on its own, between differentiable ones
    "boolean mask": lambda x, s, o: tf.reduce_sum(tf.boolean_mask(x * s + o, x[:, 0] > 0.0) ** 2),
    "unique": lambda x, s, o: tf.reduce_sum(tf.gather(x * s + o, tf.unique(tf.constant([1, 1, 3, 0]))[0]) ** 2),
    "partition": lambda x, s, o: sum(
        tf.reduce_sum(part * (n + 1.0))
        for n, part in enumerate(tf.dynamic_partition(x * s + o, tf.cast(x[:, 0] > 0.0, tf.int32), 2))
    ),
    "string": lambda x, s, o: tf.reduce_sum(
        tf.strings.to_number(tf.strings.as_string(x * s)) * o + x * s * tf.strings.to_number("3.5")
    ),
    "python": lambda x, s, o: tf.reduce_sum(tf.py_function(lambda t: t * t, [x * s], tf.float32) + o),
    "numpy": lambda x, s, o: tf.reduce_sum(tf.numpy_function(np.sin, [x], tf.float32) * s + o),
}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("steady", [True, False])
def test_operations_on_their_own_are_recorded_in_order(name, steady):
    calls = [(X if steady else tf.roll(X * (-1.0) ** n, n, axis=0),) for n in range(14)]
    fn = run_both(step_of(ALONE[name]), calls)
    assert fn.stats().followed >= 10, fn.explain()


def test_a_gradient_beside_an_operation_on_its_own_is_a_region():
    fn = run_both(step_of(ALONE["unique"]), [(X * (n + 1.0),) for n in range(14)])
    assert fn.stats().regions >= 8, fn.explain()


def test_a_gradient_beside_an_operation_on_its_own_that_is_given_arrays():
    """Other places in each call are no other gradient."""

    def make(decorate):
        weight = tf.Variable([[1.0], [2.0], [3.0]])

        @decorate
        def step(x, given):
            with tf.GradientTape() as tape:
                sums = tf.math.segment_sum(x[:4] @ weight, np.array(given, np.int32))
                loss = tf.reduce_sum(sums**2)
            return sums, tape.gradient(loss, weight)

        return step

    given = [[0, 0, 1, 1], [0, 1, 2, 2], [0, 1, 1, 2], [0, 0, 0, 1]]
    fn = run_both(make, [(X * (n + 1.0), given[n * n % 4]) for n in range(16)])
    assert fn.stats().regions >= 8, fn.explain()


def test_what_an_operation_on_its_own_gives_decides_the_gradient():
    """The same operations in the same order: only which result went where differs from call to call."""

    def make(decorate):
        weight = tf.Variable([1.0, 2.0, 3.0])

        @decorate
        def step(x, first):
            with tf.GradientTape() as tape:
                a, _ = tf.unique(tf.constant([0, 0, 1]))
                b, _ = tf.unique(tf.constant([4, 4, 2]))
                picked = tf.gather(x * weight, a if first else b)
                loss = tf.reduce_sum(picked**2)
            return loss, tape.gradient(loss, weight)

        return step

    ways = [True] * 8 + [False] * 8 + [True, False] * 4
    run_both(make, [(X * (1.0 + n), way) for n, way in enumerate(ways)])


def fused(training, version):
    def loss_of(x, scale, offset):
        given = {} if training else {"mean": tf.constant([0.1, 0.2, 0.3]), "variance": tf.constant([1.0, 2.0, 3.0])}
        if version == 3:
            y, mean, variance = tf.compat.v1.nn.fused_batch_norm(x, scale, offset, is_training=training, **given)
        else:
            empty = tf.zeros([0])
            y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV2(
                x=x, scale=tf.identity(scale), offset=tf.identity(offset), mean=given.get("mean", empty),
                variance=given.get("variance", empty), is_training=training,
            )  # fmt: skip
        return tf.reduce_sum(tf.nn.relu(y) * x) + tf.reduce_sum(mean) + tf.reduce_sum(variance)

    return loss_of


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("version", [2, 3])
def test_fused_batch_normalisation_is_part_of_the_segment(training, version):
    """Its reserved outputs have shapes that TensorFlow's shape functions do not know, or get wrong."""
    calls = [(IMAGES * (n % 3 + 1.0),) for n in range(12)] + [(IMAGES[:3] + float(n),) for n in range(6)]
    fn = run_both(step_of(fused(training, version)), calls)
    stats = fn.stats()
    assert stats.launches <= stats.followed, fn.explain()
    assert stats.regions >= 8, fn.explain()


@pytest.mark.parametrize("jit_compile", [False, True])
def test_reserved_outputs_are_what_eager_gives(jit_compile):
    def make(decorate):
        @decorate
        def step(x):
            ones, empty = tf.ones([3]), tf.zeros([0])
            forward = tf.raw_ops.FusedBatchNormV3(x=x, scale=ones, offset=ones, mean=empty, variance=empty)
            back = tf.raw_ops.FusedBatchNormGradV3(
                y_backprop=x, x=x, scale=ones, reserve_space_1=forward[3], reserve_space_2=forward[4],
                reserve_space_3=forward[5],
            )  # fmt: skip
            return [*forward], [*back], [tuple(t.shape) for t in (*forward, *back)]

        return step

    fn = run_both(make, [(IMAGES + float(n),) for n in range(8)], jit_compile=jit_compile)
    assert fn.stats().followed >= 6


REDUCED = {  # gradients whose Python reads the constants that operations took, in memoized calls and beside them
    "mean": lambda x, s, o: tf.reduce_mean(tf.reduce_sum(tf.clip_by_norm(x * s + o, 2.0), axis=[0, 1])),
    "pad": lambda x, s, o: tf.reduce_mean(tf.reduce_sum(tf.pad(x * s, [[0, 0], [1, 1]]) + 1.0, axis=(0,)) ** 2) + o[0],
    "concat": lambda x, s, o: tf.reduce_mean(tf.concat([tf.pad(x * s, [[1, 0], [0, 0]]), x * o], 0) ** 2, axis=[1, 0]),
    "moments": lambda x, s, o: tf.add_n([tf.reduce_mean(v**2) for v in tf.nn.moments(x * s + o, [0])]),
    "norm": lambda x, s, o: tf.norm(x * s, axis=None) + tf.reduce_mean(tf.norm(x * o + s, axis=-1)),
}


@pytest.mark.parametrize("name", REDUCED)
def test_constants_that_a_gradient_reads_are_known(name):
    fn = run_both(step_of(REDUCED[name]), [(X * (n % 3 + 1.0),) for n in range(12)])
    assert "reads the value" not in fn.explain()
    assert fn.stats().regions >= 8, fn.explain()


def test_constants_that_a_gradient_reads_may_change():
    """Which axis is summed decides the gradient's operations."""

    def make(decorate):
        weight = tf.Variable([[1.0, 2.0, 3.0]] * 3)

        @decorate
        def step(x, axes, by):
            with tf.GradientTape() as tape:
                y = tf.clip_by_norm(x @ weight, by)
                loss = tf.reduce_mean(tf.reduce_sum(tf.nn.moments(y, axes)[0] * y, axis=axes) ** 2)
            return loss, tape.gradient(loss, weight)

        return step

    x = tf.ones([3, 3]) * [[1.0, 2.0, 4.0]] + [[1.0], [0.5], [3.0]]
    turns = [[0]] * 6 + [[1]] * 6 + [[0], [1], [0, 1]] * 3
    run_both(make, [(x * (1.0 + n), axes, 2.0 if n % 7 else 3.0) for n, axes in enumerate(turns)])
