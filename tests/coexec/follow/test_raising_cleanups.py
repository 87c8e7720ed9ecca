"""Cleanups that raise themselves: eagerly, behind a failing operation, their error is the one that goes on."""

import collections
import contextlib
import math
import sys
import time

import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import unchanged
from tests.snapshots import assert_same, snapshot

GOOD, BAD = tf.constant([1.0, 2.0]), tf.constant([1.0, float("nan")])


class Held:
    """What a cleanup looks at; `n` is 0 in every third call."""

    def __init__(self):
        self.counts, self.rows, self.n, self.name, self.words = {"a": 1.0}, [1.0, 2.0], 1, "a", "7"
        self.counter, self.total, self.missing = collections.Counter(), 1.0, float("nan")

    def rate(self, n):
        return self.total / n


# What raises in some calls, or in each.
RAISING = {
    "an item that is not there": "{}[n]",
    "an item that may be there": "held.counts[held.name]",
    "an item that is counted": "held.counts[held.name] += 1.0",
    "an item of a list": "held.rows[n]",
    "an item of a list that is set": "held.rows[n - 1] = 2.0",
    "an item set at a place": "held.rows[n] = 2.0",
    "a part of a text": "held.words[n]",
    "a quotient": "7 / held.n",
    "a quotient in place": "held.n //= n",
    "a remainder": "size = 7 % n",
    "a remainder beside a text": "held.words = 'rest', 7 % n",
    "a power": "0.0 ** -n",
    "by a constant": "1 // 0",
    "by what is computed": "5 / (n - n)",
    "a text as a number": "int('a')",
    "a variable's text as a number": "float(held.words)",
    "an empty list": "held.rows.pop()",
    "a root": "math.sqrt(-n)",
    "a method's argument": "held.rate(n)",
    "an item set behind a sum": "held.total += held.counts['a']\nheld.rows[n] = 2.0",
    "a whole number of none": "int(held.missing)",
    "a rounded one of none": "round(held.missing)",
    "a negative time": "time.sleep(-n)",
    "an exception": "if n == 0:\n    raise KeyError(n)",
}
# What raises for no value that it has here.
PASSING = {
    "counts": "held.counts['a'] += 1.0",
    "a mean": "held.counts['a'] = held.counts['a'] / 4.0",
    "a clock": "held.rows.append(time.perf_counter() - begun)",
    "a text": "print('%d of %s' % (n, held.counts), end='')",
    "a text of what is computed": "print('%.0f s' % (time.perf_counter() - begun), end='')",
    "a counter": "held.counter[n] += 1",
    "a whole number": "int(held.n)",
}


IN_TRY = """
def step(x, n):
    begun, y, kept = time.perf_counter(), x * 2.0, None
    try:
        try:
            y = tf.debugging.check_numerics(y, 'made') + 1.0
        finally:
            CLEANUP
    except (KeyError, IndexError) as error:
        kept = type(error.__context__).__name__
    return y * 3.0, kept
"""
IN_MANAGER = """
def step(x, n):
    begun, y = time.perf_counter(), x * 2.0
    class Manager:
        def __enter__(self): pass
        def __exit__(self, *_):
            CLEANUP
    with Manager():
        y = tf.debugging.check_numerics(y, 'made') + 1.0
    return y * 3.0
"""
ALONE = """
def step(x, n):
    begun, y = time.perf_counter(), x * 2.0
    try:
        y = tf.debugging.check_numerics(y, 'made') + 1.0
    finally:
        CLEANUP
    return y * 3.0
"""


def made(text, cleanup):
    """Makes steps with this cleanup, behind an operation that fails for `BAD`."""

    def make(decorate):
        held = Held()
        names = {"tf": tf, "time": time, "math": math, "held": held}
        before, _, after = text.partition("CLEANUP")
        exec(before + cleanup.replace("\n", "\n" + before.rpartition("\n")[2]) + after, names)
        return held, decorate(names["step"])

    return make


def compared(make, calls=24):
    """Returns the decorated step after calls that do the same as eagerly."""
    (one, plain), (other, step) = make(unchanged), make(coexec.function)
    for call in range(calls):
        x, n = BAD if call > 5 and call % 2 else GOOD, call % 3
        results = []
        for held, function in ((one, plain), (other, step)):
            held.n, held.rows, held.name = n, [1.0, 2.0][:n], "ab"[call % 5 == 4]
            try:
                results.append(snapshot(function(x, n)))
            except Exception as error:
                results.append((snapshot(error.with_traceback(None)), type(error.__context__)))
        assert_same(*results, path=f"call {call}: ")
    return step


@pytest.mark.parametrize("text", [IN_TRY, IN_MANAGER, ALONE], ids=["caught", "manager", "finally"])
@pytest.mark.parametrize("name", RAISING)
def test_their_own_error_goes_on(name, text):
    """Also where a handler around them catches it, so that the operation's never shows."""
    compared(made(text, RAISING[name]))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames cannot be read before Python 3.11: each cleanup cuts")
@pytest.mark.parametrize("text", [IN_MANAGER, ALONE], ids=["manager", "finally"])
@pytest.mark.parametrize("name", PASSING)
def test_those_that_raise_nothing_do_not_cut(name, text):
    """One launch has what comes before the failing operation, and what comes behind."""
    with contextlib.redirect_stdout(None), testing.compile_everything():
        step = compared(made(text, PASSING[name]))
        before = step.stats().launches
        for _ in range(4):
            step(GOOD, 1)
    assert step.stats().launches == before + 4, step.explain()
