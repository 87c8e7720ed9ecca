"""What an operation takes from Python, followed and eagerly, by how it is spelled: those that are dear come first.

    python -m examples.bench.operations             two minutes
    python -m examples.bench.operations v.assign    those whose spelling contains this
    python -m examples.bench.operations --quick     a few calls of each: that it runs, not how fast

A step is the same line forty times, and nobody takes the results, so that next to nothing is left to launch: what is
timed is Python, in microseconds of the thread's time an operation, the least of some calls.
"""

import argparse
import linecache
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("COEXEC_CACHE_DIR", "off")

import keras
import numpy as np
import tensorflow as tf

import coexec
from examples.bench import table

LINES = 40
# What is spelled; `x`, `y` are tensors, `v` a variable, `k` one of Keras', `h` a number and `a` an array of NumPy's.
SPELLINGS = """
x + y | x * 2.0 | x @ v | x ** 2 | x == y | x > 0.5 | -x | x[0] | x[:, None] | x[..., 1:] | x * h | h * x | x / h
x > h | x * np.sqrt(2.0) | x + a | a * x | v + x | v * 2.0 | v * h | v ** 2 | v == 0.0 | v[0] | v[None] | v[1:, 0]
k * 0.5 | k[0] | v.assign(y) | v.assign_add(y) | v.assign_sub(y * 0.1) | count.assign_add(1.0) | count.assign(0.5)
k.assign(y) | v.read_value() | tf.identity(v) | tf.convert_to_tensor(v) | tf.reshape(v, [-1]) | tf.transpose(v)
tf.tile(v, [2, 1]) | tf.concat([x, v], 0) | tf.stack([x, y]) | tf.stack([v, x]) | tf.unstack(x) | tf.split(x, 2, 1)
tf.cast(v, tf.float64) | tf.reduce_sum(x) | tf.reduce_sum(v) | tf.reduce_mean(k) | tf.reduce_max(x, axis=[1])
tf.argmax(x, 1) | tf.argmax(v, 1) | tf.where(x > 0.5, x, 0.0) | tf.where(x > 0.5, x, v) | tf.maximum(x, h)
tf.abs(v) | tf.square(v) | tf.nn.l2_loss(v) | tf.zeros_like(v) | tf.ones([4, 4]) | tf.eye(4) | tf.one_hot(i, 4)
tf.range(4) | tf.constant(1.0) | tf.constant(a) | tf.shape(x) | tf.shape(x)[0] | tf.cumsum(x) | tf.gather(x, i)
tf.gather(v, i) | tf.gather_nd(x, i[:, None]) | tf.einsum("ij,jk->ik", x, y) | tf.tensordot(x, v, 1)
tf.linalg.inv(v) | tf.linalg.diag(x[0]) | tf.norm(x) | tf.nn.softmax(x) | tf.nn.relu(x) | tf.nn.gelu(x)
tf.nn.dropout(x, 0.5) | tf.nn.conv2d(image, kernel, 1, "SAME")
tf.nn.sparse_softmax_cross_entropy_with_logits(i, x) | tf.random.normal([4, 4]) | generator.normal([4])
tf.clip_by_value(v, -1.0, 1.0) | tf.math.divide_no_nan(x, y) | tf.map_fn(tf.tanh, x) | keras.ops.softmax(x)
"""


class Row(NamedTuple):
    """What one spelling takes, in microseconds, and what a followed call of `LINES` of them did."""

    spelling: str
    followed: float
    eager: float
    launches: float
    regions: float
    plain: int


def names() -> dict[str, Any]:
    """Returns what the spellings name."""
    numbers = np.random.default_rng(0)

    def made(*shape: int) -> Any:
        return numbers.random(shape, np.float32)

    return {
        "tf": tf, "np": np, "keras": keras, "x": tf.constant(made(4, 4)), "y": tf.constant(made(4, 4)),
        "i": tf.constant([0, 1, 2, 3]), "v": tf.Variable(made(4, 4)), "k": keras.Variable(made(4, 4)),
        "count": tf.Variable(0.0), "h": np.float32(0.5), "a": made(4, 4), "image": tf.constant(made(2, 8, 8, 3)),
        "kernel": tf.Variable(made(3, 3, 3, 4)), "generator": tf.random.Generator.from_seed(0),
    }  # fmt: skip


def step_of(spelling: str) -> Callable[[], None]:
    """Returns a function of that line, `LINES` times, with a source that is known."""
    name, body = f"<{spelling}>", "".join(f"    {spelling}\n" for _ in range(LINES))
    source = f"def step():\n{body}"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    space = names()
    exec(compile(source, name, "exec"), space)
    step: Callable[[], None] = space["step"]
    return step


def least(step: Callable[[], Any], before: int, calls: int) -> float:
    """Returns the least time of one line, in microseconds, over some calls after those `before`."""
    for _ in range(before):
        step()
    times = []
    for _ in range(calls):
        began = time.thread_time()
        step()
        times.append(time.thread_time() - began)
    return min(times) / LINES * 1e6


def measured(spelling: str, calls: int) -> Row:
    """Times one spelling."""
    step = step_of(spelling)
    eager = least(step, 3, calls)
    followed = coexec.function(step)
    took = least(followed, calls, calls)
    stats = followed.stats()
    return Row(
        spelling, took, eager, stats.launches / stats.calls, stats.regions / stats.calls / LINES, stats.imperative
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="*", help="measure only spellings that contain one of these")
    parser.add_argument("--quick", action="store_true", help="a few calls of each")
    arguments = parser.parse_args()
    spellings = [spelling.strip() for line in SPELLINGS.strip().splitlines() for spelling in line.split(" | ")]
    chosen = [s for s in spellings if not arguments.part or any(part in s for part in arguments.part)]
    rows = [measured(spelling, 3 if arguments.quick else 40) for spelling in chosen]
    cells = [
        [f"`{row.spelling}`", f"{row.followed:.1f}", f"{row.eager:.1f}", f"{row.followed / row.eager:.2f}",
         f"{row.launches:.1f}", f"{row.regions:.1f}", str(row.plain)]
        for row in sorted(rows, key=lambda row: -row.followed)
    ]  # fmt: skip
    head = ["spelled", "followed, us", "eager, us", "ratio", "launches", "regions", "plain"]
    print(table.markdown(head, cells))


if __name__ == "__main__":
    main()
