"""The page on operations is what the runtime decides by, and what it does."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import __main__ as command
from coexec.reporting.op_table import ALONE, AT_ONCE, GRAPH, XLA, as_markdown, how_followed, operations
from coexec.testing import always_follow, compile_everything
from tests.marks import as_documented

PAGE = Path(__file__).resolve().parents[3] / "docs" / "operations.md"
WORKS = {
    "MatMul": lambda x: tf.matmul(x, x),
    "GatherV2": lambda x: tf.gather(x, tf.cast(x[0] * 0.0, tf.int32)),
    "Betainc": lambda x: tf.math.betainc(x * 0.0 + 1.0, x * 0.0 + 2.0, tf.sigmoid(x)),
    "Igamma": lambda x: tf.math.igamma(x * 0.0 + 1.0, x * x),
    "AsString": lambda x: tf.strings.as_string(x * 0.0 + 1.0),
    "Unique": lambda x: tf.unique(tf.reshape(tf.round(x @ x), [-1]))[0],
    "EagerPyFunc": lambda x: tf.py_function(lambda v: v * 2.0, [x @ x], tf.float32),
}


@as_documented
def test_the_page_is_what_the_command_prints(capsys):
    assert PAGE.read_text().endswith("\n\n" + as_markdown()), "python -m coexec operations"
    assert command.main(["operations", "MatMul", "Unique"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"MatMul: {XLA}; it cannot fail"
    assert command.main(["operations", "MatMull"]) == 1


@as_documented
def test_every_operation_is_on_the_page_once():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("*")]
    listed = [name for line in lines for name in line.rpartition(": ")[2].split(", ")]
    assert len(listed) > 1000
    assert sorted(listed) == sorted(operations())


@pytest.mark.parametrize("op", WORKS)
def test_operations_are_followed_as_the_page_says(op):
    def step(x):
        return WORKS[op](tf.tanh(x) + 1.0), tf.reduce_sum(tf.tanh(x @ x) * 2.0)

    fn = coexec.function(step, jit_compile=True)
    with always_follow(), compile_everything():
        for n in range(6):
            x = tf.constant(np.random.default_rng(n).normal(size=(3, 3)), tf.float32)
            for one, other in zip(fn(x), step(x), strict=True):
                if one.dtype == tf.string:
                    assert one.numpy().tolist() == other.numpy().tolist()
                else:
                    np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-5)
    assert (fn.stats().followed, fn.stats().launches > 2) == (5, True), fn.explain()
    told, how = str(fn.explain()), how_followed(op).how
    assert (f"{op} runs on its own" in told) == (how in (AT_ONCE, ALONE)), told
    assert (f"{op} at " in told) == (how == GRAPH), told
