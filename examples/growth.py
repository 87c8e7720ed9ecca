"""Growth: what calls cost on their thread, a unit, as programs grow; nothing may grow faster than n log n.

    make bench-growth                                   all parts, scales 500 to 4,000: some minutes
    make bench-growth ARGS="--part=tapes --scales=1000,10000,100000"

Each part is run at each scale eagerly, then followed. Printed are CPU seconds of the calling thread: eagerly, of the
dearest followed call, and of the last one, and microseconds a unit of the dearest. Exits with 1 where those grow by
more than the logarithm does, or where a call takes more than five times eager's time and two seconds.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("COEXEC_CACHE_DIR", "off")

import tensorflow as tf

import coexec

CALLS = 6
MARGIN = 2.0  # by which the cost of a unit may grow beside the logarithm: one-off costs, other programs on the machine
TIMES, SECONDS = 5.0, 2.0  # of eager's time, and beyond that


def operations(count: int) -> Callable[[Any], Any]:
    """The operations of a call, in one segment."""

    def step(x: Any) -> Any:
        for _ in range(count):
            x = x * 1.01
        return x

    return step


def gradient(count: int) -> Callable[[Any], Any]:
    """The records of a tape whose tensors have values by the time that their gradient is asked for."""
    weight = tf.Variable(tf.ones([4]))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            for _ in range(count):
                x = x * weight
            loss = tf.reduce_sum(x)
        float(loss)
        weight.assign_sub(tape.gradient(loss, weight) * 0.0)
        return loss

    return step


def feeds(count: int) -> Callable[[Any], Any]:
    """The tensors that come into a segment."""
    tensors = [tf.ones([4]) for _ in range(count)]

    def step(x: Any) -> Any:
        for tensor in tensors:
            x = x + tensor
        return x

    return step


def alive(count: int) -> Callable[[Any], Any]:
    """The tensors that are alive where a segment ends."""

    def step(x: Any) -> Any:
        made = [x]
        for _ in range(count):
            made.append(made[-1] * 1.01)
        float(made[-1][0])
        return made[count // 2]

    return step


def tapes(count: int) -> Callable[[Any], Any]:
    """The gradients of a call, one after the other."""
    weight = tf.Variable(1.0)

    def step(x: Any) -> Any:
        for _ in range(count):
            with tf.GradientTape() as tape:
                loss = weight * x[0]
            x = x + tape.gradient(loss, weight) * 1e-6
        return x

    return step


def nesting(count: int) -> Callable[[Any], Any]:
    """The depth at which operations are issued; a tenth of the scale, as CPython's own stack is limited."""

    def inner(x: Any, depth: int) -> Any:
        return x if depth == 0 else inner(x * 1.01, depth - 1)

    return lambda x: inner(x, count // 10)


def reads(count: int) -> Callable[[Any], Any]:
    """The segments of a call."""

    def step(x: Any) -> Any:
        for _ in range(count):
            x = x * 1.01
            float(x[0])
        return x

    return step


PARTS = {part.__name__: part for part in (operations, gradient, feeds, alive, tapes, nesting, reads)}


def seconds(step: Callable[[Any], Any], x: Any) -> float:
    """Returns the CPU time of a call on this thread."""
    began = time.thread_time()
    step(x)
    return time.thread_time() - began


def measure(part: str, scales: list[int]) -> bool:
    """Runs a part at all scales and prints what it costs; returns whether that grows as it may."""
    fine, before = True, 0.0
    for scale in scales:
        step, x = PARTS[part](scale), tf.ones([4])
        eager = min(seconds(step, x) for _ in range(2))
        function = coexec.function(step)
        took = [seconds(function, x) for _ in range(CALLS)]
        unit, expected = max(took) / scale, before * MARGIN
        known = function.stats()
        grows, slow = 0.0 < expected < unit, max(took) > TIMES * eager + SECONDS
        fine = fine and not (grows or slow)
        print(
            f"{part:<10} {scale:>7}  eager {eager:7.3f}  dearest {max(took):7.3f}  last {took[-1]:7.3f}  "
            f"{1e6 * unit:7.1f} us a unit  {known.followed} followed, {known.launches} launches"
            f"{'  GROWS' if grows else ''}{'  SLOW' if slow else ''}",
            flush=True,
        )
        before = unit * math.log(2 * scale) / math.log(scale)
    return fine


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts that are asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="again for more")
    parser.add_argument("--scales", default="500,1000,2000,4000", type=lambda text: [int(n) for n in text.split(",")])
    options = parser.parse_args(arguments)
    sys.setrecursionlimit(max(1000, 5 * max(options.scales)))
    fine = [measure(part, options.scales) for part in options.part or PARTS]  # all, whatever the first ones find
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
