"""What being eager to the letter costs a co-executed step: `python -m examples.bench.guards [--rounds=N]`.

The same step with checks and under validation, each against the plain step, and with eager's random numbers against
others that depend on no state; all of them co-executed, round by round in turns.
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable

import keras
import tensorflow as tf

import coexec
from examples.bench.case import Case, Program
from examples.bench.cases import keras_mlp, unrolled_lstm
from examples.bench.measure import Variant, prepare, warm_up

MOST = 1.05  # times the step that each is compared with


def checked(program: Program) -> Program:
    """The step with four checks of values: of what comes in, and of the loss."""

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        tf.debugging.check_numerics(x, "inputs")
        tf.debugging.assert_less(y, tf.cast(100, y.dtype), "targets")
        tf.debugging.assert_greater_equal(y, tf.cast(-100, y.dtype), "targets")
        return tf.debugging.check_numerics(program.step(x, y), "loss")

    return Program(step, program.inputs)


def noisy(program: Program, uniform: Callable[..., tf.Tensor]) -> Program:
    """The step with noise on its inputs and a random scale of its loss."""
    keras.utils.set_random_seed(1)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return program.step(x + 1e-3 * uniform(x.shape), y) * uniform([], minval=0.5, maxval=1.5)

    return Program(step, program.inputs)


def drawn(program: Program) -> Program:
    """With numbers that follow from a constant, as graphs may have them in any order."""
    return noisy(program, functools.partial(tf.random.stateless_uniform, seed=[1, 2]))


def seeded(program: Program) -> Program:
    """With numbers from the seeds that eager would draw."""
    return noisy(program, tf.random.uniform)


def validated(step: Callable) -> Callable:
    """The step, of which one call in a thousand is carried out twice."""
    decorated = coexec.function(step)
    watched = coexec.validate(every=1000)(decorated)
    watched.stats = decorated.stats
    return watched


GUARDS: dict[str, tuple[Callable[[Program], Program], Callable]] = {
    "plain": (lambda program: program, coexec.function),
    "checks": (checked, coexec.function),
    "validation": (lambda program: program, validated),
    "noise": (drawn, coexec.function),
    "seeds": (seeded, coexec.function),
}
AGAINST = {"checks": "plain", "validation": "plain", "seeds": "noise"}
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
        for name, other in AGAINST.items():
            pairs = zip(variants[name].block_seconds, variants[other].block_seconds, strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            worst = max(worst, ratio)
            times = [1000 * variants[which].per_call for which in (name, other)]
            print(f"{title} with {name}: {times[0]:.2f} ms, {ratio:.3f} of {other}, {times[1]:.2f} ms", flush=True)
    print(f"the goal is {MOST}")
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main())
