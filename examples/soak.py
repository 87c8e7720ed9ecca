"""Soak: many calls, shapes and models in one process, whose memory must stay flat.

    make soak                                        100,000 calls, 10,000 shapes, 1,000 models: some twenty minutes
    make soak ARGS="--calls=2000 --shapes=0 --models=0"

Each part prints its resident memory as it goes. After the first fifth, when caches are full, it may move, and not grow:
the least of the last fifth is held against the most of the second. Exits with 1 if it has grown by more.
"""

import argparse
import collections
import gc
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("COEXEC_CACHE_DIR", "off")

import keras
import tensorflow as tf

import coexec
from coexec import testing

LIMIT = 32.0  # MiB of growth that count as none: arenas of the allocator come and go
LINES = 20  # of progress, and measurements, for each part


def training(units: int) -> coexec.Function:
    """A Keras step with an effect in Python, and a model and an optimizer of its own."""
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)
    seen: collections.deque[float] = collections.deque(maxlen=10)

    @coexec.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - 1.0))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        seen.append(float(loss))
        return loss

    return step


@coexec.function
def rounds(x: tf.Tensor) -> tf.Tensor:
    """A few operations that take any number of rows."""
    for _ in range(5):
        x = tf.tanh(x * 1.1 + 0.1)
    return tf.reduce_sum(x)


def calls(count: int) -> Iterator[coexec.Function]:
    """One step on one shape."""
    step, x = training(16), tf.ones([8, 8])
    for _ in range(count):
        step(x)
        yield step


def shapes(count: int) -> Iterator[coexec.Function]:
    """One function on ever other shapes, three calls each, all followed."""
    with testing.always_follow():
        for rows in range(1, count + 1):
            x = tf.ones([rows, 4])
            for _ in range(3):
                rounds(x)
            yield rounds


def models(count: int) -> Iterator[coexec.Function]:
    """Ever new models, of some sizes, trained for a few steps and dropped."""
    x = tf.ones([8, 8])
    for number in range(count):
        step = training(8 + number % 4)
        for _ in range(6):
            step(x)
        yield step
        if number % 10 == 9:
            del step  # and what Keras keeps of every model: 0.2 MiB, eagerly as well
            keras.backend.clear_session()
            gc.collect()


def resident() -> float:
    """The resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def soak(what: str, count: int, part: Callable[[int], Iterator[coexec.Function]], limit: float) -> bool:
    """Runs one part and prints how it goes; returns whether memory stayed flat."""
    began, measured = time.monotonic(), []
    followed = 0
    for number, fn in enumerate(part(count), 1):
        if number * LINES // count != (number - 1) * LINES // count:
            measured.append(resident())
            stats = fn.stats()
            followed = stats.followed
            print(
                f"{number:>7} {what}  {measured[-1]:8.1f} MiB  {time.monotonic() - began:6.0f} s  "
                f"{stats.followed} followed, {stats.launches} launches, {stats.compiles} compiles",
                flush=True,
            )
    fifth = len(measured) // 5
    growth = min(measured[-fifth:]) - max(measured[fifth : 2 * fifth])
    flat = growth <= limit and followed > 0
    print(f"{what}: {growth:+.1f} MiB after the first fifth: {'flat' if flat else 'NOT FLAT'}", flush=True)
    return flat


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts that are asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--shapes", type=int, default=10_000)
    parser.add_argument("--models", type=int, default=1_000)
    parser.add_argument("--limit", type=float, default=LIMIT, help="MiB that memory may have grown by")
    options = parser.parse_args(arguments)
    parts = [("calls", options.calls, calls), ("shapes", options.shapes, shapes), ("models", options.models, models)]
    flat = [soak(what, count, part, options.limit) for what, count, part in parts if count]
    return 0 if all(flat) else 1


if __name__ == "__main__":
    sys.exit(main())
