"""The programs that are measured, each built anew for each variant, so that no two variants share state.

A program returns a number or a small tensor that depends on all it did. The same call of two variants must
return the same, which is how a variant that silently runs another program is found out.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from examples import digits


@dataclass(frozen=True)
class Program:
    """One fresh instance of a case: the function, and the arguments of its calls without end."""

    step: Callable
    inputs: Iterator[tuple]


@dataclass(frozen=True)
class Case:
    """What is measured, and what is expected of it."""

    name: str
    what: str
    build: Callable[[], Program]
    calls: int  # calls of one variant in one round, which are timed together
    at_most: float | None = None  # goal for the time of a call, as a multiple of eager's
    follows: bool = True  # whether some call must have been followed for the figures to mean anything


def forever(*args: object) -> Iterator[tuple]:
    """The same arguments for every call."""
    while True:
        yield args


def raw_ops() -> Program:
    """40 operations on 8x8 matrices, nearly all of whose eager time is dispatch."""
    weights = tf.constant(np.random.default_rng(0).normal(size=(8, 8)) / 4, tf.float32)

    def step(x: tf.Tensor) -> tf.Tensor:
        for _ in range(10):
            x = tf.matmul(x, weights)
            x = x + weights
            x = tf.nn.relu(x)
            x = tf.raw_ops.Tanh(x=x)
        return x

    return Program(step, forever(tf.ones((8, 8))))


def training(model: keras.Model, x: np.ndarray, y: np.ndarray) -> Program:
    """A training step of a classifier, on a batch that stays the same."""
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam()
    # Slots made now let tf.function take part: it may not create variables in a later trace.
    optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = objective(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return Program(step, forever(tf.constant(x), tf.constant(y)))


def keras_mlp() -> Program:
    """A training step 20-64-64-10 on 32 rows, written as the Keras guides write it."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((20,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(32, 20)).astype(np.float32), numbers.integers(10, size=32).astype(np.int32)
    return training(model, x, y)


def mlp_with_effects() -> Program:
    """The Keras step with Python in it: a list, a dict, a counter, and NumPy on the loss."""
    program = keras_mlp()
    losses: list[float] = []
    seen = {"steps": 0, "best": np.inf}

    def with_effects(x: tf.Tensor, y: tf.Tensor) -> float:
        loss = program.step(x, y)
        losses.append(float(loss))
        seen["steps"] += 1
        seen["best"] = min(seen["best"], float(np.mean(losses[-10:])))
        return losses[-1]

    return Program(with_effects, program.inputs)


def unrolled_lstm() -> Program:
    """A Keras LSTM cell of 64 units, called 20 times by a Python loop, on 16 rows."""
    keras.utils.set_random_seed(0)
    cell, head = keras.layers.LSTMCell(64), keras.layers.Dense(1)
    cell.build((16, 8))
    head.build((16, 64))
    variables = cell.trainable_variables + head.trainable_variables
    optimizer = keras.optimizers.Adam()
    optimizer.build(variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            state = [tf.zeros((16, 64)), tf.zeros((16, 64))]
            for time in range(20):
                hidden, state = cell(x[:, time], state)
            loss = tf.reduce_mean(tf.square(head(hidden) - y))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    numbers = np.random.default_rng(0)
    x = tf.constant(numbers.normal(size=(16, 20, 8)), tf.float32)
    y = tf.constant(numbers.normal(size=(16, 1)), tf.float32)
    return Program(step, forever(x, y))


def q_learning() -> Program:
    """A DQN step: replay in a Python list, sampled by NumPy; two forward passes, an update."""
    keras.utils.set_random_seed(0)

    def network() -> keras.Model:
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(64, "relu"), layers.Dense(64, "relu"), layers.Dense(2)]
        )

    online, target = network(), network()
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(online.trainable_variables)
    numbers = np.random.default_rng(0)
    replay = [
        (numbers.normal(size=4), numbers.integers(2), numbers.normal(), numbers.normal(size=4)) for _ in range(500)
    ]

    def step() -> float:
        sample = [replay[i] for i in numbers.choice(len(replay), 32)]
        states, actions, rewards, following = (np.stack(part) for part in zip(*sample, strict=True))
        best = tf.reduce_max(target(tf.constant(following, tf.float32)), axis=1)
        wanted = tf.constant(rewards, tf.float32) + 0.99 * best
        with tf.GradientTape() as tape:
            chosen = tf.reduce_sum(
                online(tf.constant(states, tf.float32)) * tf.one_hot(tf.constant(actions), 2), axis=1
            )
            loss = tf.reduce_mean(tf.square(wanted - chosen))
        variables = online.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        replay[int(numbers.integers(500))] = (states[0], actions[0], float(loss), following[0])
        return replay[0][2]

    return Program(step, forever())


class Wanderer:
    """An object whose every call issues another sequence of 40 operations, picked by Python."""

    def __init__(self) -> None:
        self.picks = random.Random(0)

    def step(self, x: tf.Tensor) -> tf.Tensor:
        """Applies 40 of four operations in an order that was never seen before and never comes again."""
        for _ in range(40):
            pick = self.picks.randrange(4)
            if pick == 0:
                x = x + 0.5
            elif pick == 1:
                x = x * 0.75
            elif pick == 2:
                x = tf.math.tanh(x)
            else:
                x = tf.nn.relu(x)
        return x


def new_every_call() -> Program:
    """Nothing to gain: every call takes a path of its own."""
    return Program(Wanderer().step, forever(tf.ones((8, 8))))


def digits_step() -> Program:
    """The training step of `examples/digits.py`: lists, a schedule, scikit-learn, an early return."""
    trainer = digits.Trainer(seed=0)
    images, _, labels, _ = digits.digits(seed=0)
    return Program(trainer.step, digits.batches(images, labels, size=32, steps=10**9, seed=0))


def while_loop() -> Program:
    """A loop of 100 iterations, each of which asks the tensor whether to go on."""

    def step(x: tf.Tensor) -> tf.Tensor:
        while tf.reduce_sum(x) < 100.0:
            x = x + 0.25
        return x

    return Program(step, forever(tf.fill((4,), 0.1)))


def hand_written_gradient() -> Program:
    """A dense layer, its tape and its update, without Keras: what the memory case calls 10,000 times."""
    numbers = np.random.default_rng(0)
    weights = tf.Variable(numbers.normal(size=(16, 4)), dtype=tf.float32)
    x = tf.constant(numbers.normal(size=(8, 16)), tf.float32)
    y = tf.constant(numbers.normal(size=(8, 4)), tf.float32)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(tf.matmul(x, weights)) - y))
        weights.assign_sub(0.01 * tape.gradient(loss, weights))
        return loss

    return Program(step, forever(x, y))


CASES = (
    Case("raw-ops", "40 small raw ops", raw_ops, calls=15, at_most=0.45),
    Case("keras-mlp", "Keras MLP step, Adam", keras_mlp, calls=4, at_most=0.06),
    Case("effects", "the same, with Python effects", mlp_with_effects, calls=4, at_most=0.06),
    Case("lstm", "LSTM cell, 20 steps in Python", unrolled_lstm, calls=3, at_most=0.2),
    Case("q-learning", "DQN step, replay in a list", q_learning, calls=4, at_most=0.2),
    Case("new-every-call", "new path on every call", new_every_call, calls=15, at_most=1.15, follows=False),
    Case("digits", "digits step, full of Python", digits_step, calls=4),
    Case("while-loop", "`while` on a tensor, 100 rounds", while_loop, calls=3),
)
MEMORY = Case("memory", "a tape and an update, no Keras", hand_written_gradient, calls=10_000)
