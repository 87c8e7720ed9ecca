"""CPython's own tests of generators, context managers and exceptions come out in a co-executed call as they do plainly.

Each test method runs in the middle of a call, with operations pending, a tape open and more operations behind it, in
calls that are recorded and followed.
"""

import contextlib
import gc
import importlib
import importlib.util
import io
import sys
import unittest
import warnings

import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tracer import intercept

pytestmark = pytest.mark.slow

MODULES = ("test_generators", "test_generator_stop", "test_contextlib", "test_with", "test_raise", "test_exceptions",
           "test_baseexception", "test_exception_variations", "test_unpack_ex")  # fmt: skip

# They count on how deep the stack is, start interpreters, or use up all memory: none of it concerns a call's inside.
LEFT_OUT = ("recursion", "Recursion", "memory", "MemoryError", "script", "_main", "hide", "subprocess")

CALLS = 2  # recorded, and followed


def cases(name):
    """The test cases of one of CPython's modules, without those that are left out."""
    module = importlib.import_module(f"test.{name}")
    loader = unittest.TestLoader()
    found = [case for suite in loader.loadTestsFromModule(module) for case in flat(suite)]
    return [case for case in found if not any(word in case.id() for word in LEFT_OUT)]


def flat(suite):
    return [case for part in suite for case in flat(part)] if isinstance(suite, unittest.TestSuite) else [suite]


def outcome(case):
    """What became of a test: "passed", or the kind of what did not."""
    result = unittest.TestResult()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        case(result)
    for kind in ("errors", "failures", "skipped", "expectedFailures", "unexpectedSuccesses"):
        if getattr(result, kind):
            return kind
    return "passed"


def in_calls(case):
    """The outcomes of a test in the middle of several calls, and the decorated function."""
    counts, method = tf.Variable(0.0), getattr(case, case._testMethodName)

    @coexec.function(jit_compile=False)
    def step(x):
        counts.assign_add(1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(x) * 2.0
            method()
            z = tf.reduce_sum(y * y)
        counts.assign_add(1.0)
        return tape.gradient(z, x)

    def run():
        before = float(counts)
        gradient = step(tf.constant([1.0, 2.0]))
        assert float(counts) == before + 2.0
        assert abs(float(gradient[0]) - 8 * 0.76159416 * (1 - 0.76159416**2)) < 1e-5

    setattr(case, case._testMethodName, run)
    try:
        with testing.compile_everything():
            return [outcome(case) for _ in range(CALLS)], step
    finally:
        delattr(case, case._testMethodName)


@pytest.mark.parametrize("name", MODULES)
def test_outcomes_are_plain_ones(name):
    """Test by test; at least nine in ten of the calls are followed to their end, or fail as plain ones do."""
    if importlib.util.find_spec("test") is None or importlib.util.find_spec(f"test.{name}") is None:
        pytest.skip(f"this Python comes without its test.{name}")
    different, followed, passed = [], 0, 0
    hook, trace = sys.unraisablehook, sys.gettrace()
    for case in cases(name):
        plain = outcome(case)
        found, step = in_calls(case)
        if found != [plain] * CALLS:
            different.append(f"{case.id()}: {plain} plainly, {found} in calls")
        if plain == "passed":
            passed += 1
            followed += step.stats().followed == CALLS - 1
        assert intercept.current_handler() is None, case.id()
        assert (sys.unraisablehook, sys.gettrace()) == (hook, trace)
    gc.collect()
    assert not different, "\n".join(different)
    assert passed > 0
    assert followed >= 0.9 * passed, f"{followed} of {passed}"
