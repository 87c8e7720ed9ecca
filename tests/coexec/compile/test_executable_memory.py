"""Memory: what is compiled is bounded and released, and user objects are not kept."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec.dispatch.test_backoff import segments as registered

X = tf.constant([-1.0, 2.0, -3.0])


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


def powers(x, count):
    """Another segment for each count."""
    for _ in range(count):
        x = tf.tanh(x * 1.1)
    return x


def test_the_least_recently_launched_go(tune):
    """Beyond a bound executables are released; what comes again is compiled again, and right."""
    tune(max_executables=10)
    gc.collect()
    before = registered()
    fn = coexec.function(powers, jit_compile=False)
    for count in range(1, 41):
        for _ in range(3):
            np.testing.assert_allclose(fn(X, count).numpy(), powers(X, count).numpy(), rtol=1e-5)
    gc.collect()
    assert 0 < registered() - before <= 10
    compiles = fn.stats().compiles
    fn(X, 40)
    assert fn.stats().compiles == compiles  # the last is still there
    np.testing.assert_allclose(fn(X, 1).numpy(), powers(X, 1).numpy(), rtol=1e-5)
    assert fn.stats().compiles == compiles + 1


def test_clear_releases_all_functions():
    """`coexec.clear()` takes what was compiled for every function out of TensorFlow's runtime; they go on."""
    coexec.clear()  # of functions that other tests have left
    gc.collect()
    before = registered()
    functions = [coexec.function(powers, jit_compile=False) for _ in range(3)]
    for n, fn in enumerate(functions):
        for _ in range(3):
            fn(X, 5 + n)
    assert registered() == before + 3
    coexec.clear()
    gc.collect()
    assert registered() == before
    for fn in functions:
        np.testing.assert_allclose(fn(X, 5).numpy(), powers(X, 5).numpy(), rtol=1e-5)
        assert fn.stats().recorded == 2


@pytest.mark.parametrize("jit", [True, False])
def test_functions_of_equal_content_go_one_by_one(jit):
    """What is compiled for several functions has one name; it is there as long as one of them is."""
    gc.collect()
    before = registered()
    functions = [coexec.function(lambda x: powers(x, 7), jit_compile=jit) for _ in range(3)]
    for fn in functions:
        for _ in range(3):
            fn(X)
        assert fn.stats().launches > 0
    while functions:
        assert registered() == before + 1
        launches = functions[-1].stats().launches
        np.testing.assert_allclose(functions[-1](X).numpy(), powers(X, 7).numpy(), rtol=1e-5)
        assert functions.pop().stats().launches == launches + 1
        del fn
        fn = functions[-1] if functions else None
        gc.collect()
    assert registered() == before


def test_a_dropped_function_is_released():
    """A function that nobody holds any more leaves nothing in TensorFlow's runtime."""
    gc.collect()
    before = registered()
    fn = coexec.function(lambda x: powers(x, 6), jit_compile=False)
    for _ in range(3):
        fn(X)
    assert registered() > before
    gone = weakref.ref(fn)
    del fn
    gc.collect()
    assert gone() is None
    assert registered() <= before


def test_many_operations_count_as_many_executables(tune):
    """Executables are bounded by their operations, too: a few large ones are as much as many small ones."""
    tune(max_compiled_operations=100)
    gc.collect()
    before = registered()
    fn = coexec.function(powers, jit_compile=False)
    for count in range(8, 20):
        for _ in range(3):
            np.testing.assert_allclose(fn(X, count).numpy(), powers(X, count).numpy(), rtol=1e-5)
        gc.collect()
        assert 0 < registered() - before <= 100 // (2 * 8)
    compiles = fn.stats().compiles
    fn(X, 19)
    assert fn.stats().compiles == compiles  # the last is still there
