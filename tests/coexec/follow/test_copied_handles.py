"""Copies of a variable's handle: what is written through one is read through the others, in order."""

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tracer.spec import describe_handle, first_handle

CALLS = 12
BACKENDS = [False, True]


def read(handle):
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)


def add(handle, value):
    tf.raw_ops.AssignAddVariableOp(resource=handle, value=value)


@tf.function
def passed_on(handle):
    return tf.identity(handle)


def shared(name):
    return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[3], shared_name=name)


COPIES = {
    "identity": lambda v: tf.identity(v.handle),
    "packed": lambda v: tf.unstack(tf.stack([v.handle, v.handle]))[1],
    "gathered": lambda v: tf.gather(tf.stack([v.handle]), 0),
    "a function's result": lambda v: passed_on(v.handle),
    "from Python": lambda v: tf.py_function(lambda: v.handle, [], tf.resource),
}


def compare(make, counted=3, **options):
    """Compares the results of each call with eager's; returns the followed function."""
    with testing.always_follow(), testing.compile_everything():
        plain, followed = make(), coexec.function(make(), **options)
        for n in range(CALLS):
            x = tf.constant([float(n), 1.0, -2.0])
            for one, other in zip(plain(x), followed(x), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-6)
    assert followed.stats().followed >= CALLS - counted, followed.explain()
    return followed


@pytest.mark.parametrize("jit_compile", BACKENDS)
@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_made_in_the_step(copy, jit_compile):
    def make():
        v = tf.Variable([1.0, 2.0, 3.0])

        def step(x):
            handle = COPIES[copy](v)
            v.assign_add(x)
            between = read(handle) * 2.0
            add(handle, x * 2.0)
            return between, v.read_value() * 1.0, tf.gather(v, [2]) + 1.0

        return step

    assert compare(make, jit_compile=jit_compile).stats().launches


@pytest.mark.parametrize("jit_compile", BACKENDS)
@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_that_is_kept(copy, jit_compile):
    def make():
        v = tf.Variable([1.0, 2.0, 3.0])
        handles = [COPIES[copy](v)]

        def step(x):
            v.assign_add(x)
            between = read(handles[0]) * 2.0
            add(handles[0], x * 2.0)
            return between, v.read_value() * 1.0

        return step

    assert compare(make, jit_compile=jit_compile).stats().launches


@pytest.mark.parametrize("options", [{"jit_compile": False}, {"jit_compile": True}, {"batching": True}], ids=str)
def test_another_variable_becomes_the_same_one(options):
    """The path is known with two variables when the second handle turns out to be one of the first."""

    def make():
        v, w = tf.Variable([1.0, 2.0, 3.0]), tf.Variable([5.0, 6.0, 7.0])
        handles, calls = [w.handle, tf.identity(v.handle)], []

        def step(x):
            calls.append(None)
            handle = handles[len(calls) > CALLS // 2]
            v.assign_add(x)
            between = read(handle) * 2.0
            add(handle, x * 2.0)
            return between, v.read_value() * 1.0, w * 1.0

        return step

    compare(make, counted=6, **options)


@pytest.mark.parametrize("jit_compile", BACKENDS)
def test_two_handles_by_one_name(jit_compile):
    made = []

    def make():
        made.append(f"test_two_handles_by_one_name/{jit_compile}/{len(made)}")
        one, other = shared(made[-1]), shared(made[-1])
        tf.raw_ops.AssignVariableOp(resource=one, value=tf.ones([3]))

        def step(x):
            add(one, x)
            between = read(other) * 2.0
            add(other, x * 2.0)
            return between, read(one) * 1.0

        return step

    compare(make, jit_compile=jit_compile)


@pytest.mark.parametrize("jit_compile", BACKENDS)
def test_a_gradient_by_way_of_a_copy(jit_compile):
    def make():
        v = tf.Variable([1.0, 2.0, 3.0])

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(v * v * x + read(tf.identity(v.handle)) * x)
            gradient = tape.gradient(loss, v)
            v.assign_sub(0.01 * gradient)
            return loss, gradient

        return step

    compare(make, jit_compile=jit_compile)


def test_the_first_handle_that_lives_is_the_one():
    v = tf.Variable([1.0, 2.0])
    copy = tf.identity(v.handle)
    assert first_handle(copy) is copy  # seen before the variable's own
    assert first_handle(v.handle) is copy
    assert describe_handle(v.handle) is None
    del copy
    assert first_handle(v.handle) is v.handle
    assert describe_handle(v.handle) == ((tf.float32.as_datatype_enum, (2,)),)
    assert first_handle(tf.identity(v.handle)) is v.handle


def test_variables_of_one_name_are_two():
    variables = [tf.Variable(1.0, name="same") for _ in range(5)]
    assert all(first_handle(v.handle) is v.handle for v in variables)
