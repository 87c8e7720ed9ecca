"""Random loops under a tape: on the device each result has the gradients that it has in Python, or none."""

import linecache
import random

import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot

pytestmark = [needs_places, pytest.mark.slow]

STATEMENTS = """
a = tf.tanh(a * w) + b * 0.5
b = b * 0.75 + tf.sin(c)
c = u * 0.5
a = b * 1.0
a, b = b * 0.5, a
a, b, c = b, c * 0.5, c + 0.25
c = tf.stop_gradient(a) * 0.125 + w
v = v * 0.5 + a
b = tf.reduce_sum(v * v) * 0.125
v = tf.roll(v, 1, 0) * u
n = n + 3
a = a + tf.cast(n, tf.float32) * 0.01
b = tf.gather(table, n % 4) * w
c = table[n % 4] - c * 0.5
b = tf.sqrt(tf.nn.relu(b)) + a
c = tf.sqrt(a - a) + c
a = a * tf.cast(k, tf.float32) * 0.125
b = tf.cast(tf.cast(b, tf.float16), tf.float32) + u * u
late = a * 2.0; c = c * 0.5 + late
if a > b: a = a * w + u
else: a = a * u - w
if c > 0.5: b, c = b + c, c * 0.5
else: b, c = b * c, c - b
if n % 2 == 0: v = v * a
else: v = v - a
if a > 0.75: c = c * 0.5
""".strip().splitlines()


def made(seed):
    """Writes a random function."""
    numbers = random.Random(seed)
    body = []
    for _ in range(numbers.randint(2, 5)):
        first = numbers.choice([n for n, line in enumerate(STATEMENTS) if not line.startswith("else")])
        body += STATEMENTS[first : first + 1 + (STATEMENTS[first + 1 : first + 2] or [""])[0].startswith("else")]
    lines = [
        "def function(x):",
        "    w, u, table = tf.constant(0.75), tf.constant(-0.5), tf.constant([0.5, -1.0, 0.25, 2.0])",
        "    with tf.GradientTape(persistent=True) as tape:",
        "        tape.watch([x, w, u])",
        "        a, b, c, v = x * 0.5, u + 1.0, w * 2.0, tf.stack([x, 1.0, -x]) * 0.25",
        "        n, i, k, late = tf.constant(1), x, 0, x * 3.0",
        "        while i > 0.5:",
        *("            " + line for line in body),
        "            i = i - 1.0",
        "            k += 1",
        "        total = a * 1.0",
        "    states = [a, b, c, v, late, total]",
        "    return states, n, k, [tape.gradient(s, [x, w, u]) for s in states], tape.gradient([a, v], [x, b])",
    ]
    return "\n".join(lines) + "\n"


IN_PYTHON = {3, 7}  # an `if` has a gradient one way, or a value is kept from the turn before


@pytest.mark.parametrize("backend", ["graph", "xla"])
@pytest.mark.parametrize("seed", range(16))
def test_random_gradients(seed, backend, tune):
    """Values, gradients and where there are none are plain Python's, however often the loop turns."""
    tune(decision_patience=1)
    source, file = made(seed), f"<random gradients {seed}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    names = {"tf": tf}
    exec(compile(source, file, "exec"), names)
    function = names["function"]
    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    with testing.compile_everything():
        for number, value in enumerate([3.0, 2.0, 1.0, 0.0, 1.0, 2.0, 5.0, 3.0, 9.0, 0.0, 2.0]):
            results = [snapshot(each(tf.constant(value))) for each in (function, fn)]
            assert_same(*results, rtol=1e-3, atol=1e-4, path=f"{source}\n{fn.explain()}\ncall {number}: ")
    assert (fn.stats().decisions_on_device > 0) is (seed not in IN_PYTHON), fn.explain()
