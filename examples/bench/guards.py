"""What being eager to the letter costs a co-executed step: `python -m examples.bench.guards [--rounds=N]`.

The same step with checks, with random numbers from seeds, and under validation, each against the plain step, both
co-executed, round by round in turns.
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import keras
import tensorflow as tf

import coexec
from examples.bench.case import Case, Program
from examples.bench.cases import keras_mlp, unrolled_lstm
from examples.bench.measure import Variant, prepare, warm_up

MOST = 1.05  # times the plain step


def checked(program: Program) -> Program:
    """The step with four checks of values: of what comes in, and of the loss."""

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        tf.debugging.check_numerics(x, "inputs")
        tf.debugging.assert_less(y, tf.cast(100, y.dtype), "targets")
        tf.debugging.assert_greater_equal(y, tf.cast(-100, y.dtype), "targets")
        return tf.debugging.check_numerics(program.step(x, y), "loss")

    return Program(step, program.inputs)


def seeded(program: Program) -> Program:
    """The step with noise on its inputs and a random scale of its loss, from seeds that eager would draw."""
    keras.utils.set_random_seed(1)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return program.step(x + 1e-3 * tf.random.uniform(x.shape), y) * tf.random.uniform([], 0.5, 1.5)

    return Program(step, program.inputs)


def validated(step: Callable) -> Callable:
    """The step, of which one call in a thousand is carried out twice."""
    decorated = coexec.function(step)
    watched = coexec.validate(every=1000)(decorated)
    watched.stats = decorated.stats
    return watched


GUARDS: dict[str, tuple[Callable[[Program], Program], Callable]] = {
    "plain": (lambda program: program, coexec.function),
    "checks": (checked, coexec.function),
    "seeds": (seeded, coexec.function),
    "validation": (lambda program: program, validated),
}
STEPS = {"Keras MLP step": keras_mlp, "LSTM cell, 20 steps": unrolled_lstm}


def measured(build: Callable[[], Program], rounds: int, calls: int) -> dict[str, Variant]:
    """Runs all variants in turns after each has settled."""
    variants = {}
    for name, (change, wrap) in GUARDS.items():
        variant = prepare(lambda change=change: change(build()), "coexec", wrap)
        warm_up(variant, Case(name, name, build, calls))
        variants[name] = variant
    for number in range(rounds):
        order = list(variants.values())
        turn = number % len(order)
        for variant in order[turn:] + order[:turn]:
            variant.block(calls)
    return variants


def main() -> int:
    """Prints the ratios; returns 1 if one is above the goal."""
    parser = argparse.ArgumentParser(prog="python -m examples.bench.guards", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=20, help="calls of a round")
    options = parser.parse_args()
    worst = 0.0
    for title, build in STEPS.items():
        variants = measured(build, options.rounds, options.calls)
        plain = variants.pop("plain")
        print(f"{title}: {1000 * plain.per_call:.2f} ms plainly followed", flush=True)
        for name, variant in variants.items():
            ratios = [a / b for a, b in zip(variant.block_seconds, plain.block_seconds, strict=True)]
            ratio = statistics.median(ratios)
            worst = max(worst, ratio)
            print(f"  with {name}: {ratio:.3f} of that", flush=True)
    print(f"the goal is {MOST}")
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main())
