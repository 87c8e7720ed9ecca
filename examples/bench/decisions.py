"""The cases in which tensors, or Python's recursion, decide what comes next."""

import functools
import itertools
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import coexec
from examples.bench.case import Program, forever

# Where tensors decide: on the device, and, for comparison, in Python. Loops are the device's by default.
LOOPS: dict[str, Callable] = {
    "eager": lambda step: step,
    "coexec": coexec.function,
    "host": functools.partial(coexec.function, control_flow=False),
    "tf.function": tf.function,
    "jit": functools.partial(tf.function, jit_compile=True),
}
BRANCHES: dict[str, Callable] = {**LOOPS, "coexec": functools.partial(coexec.function, control_flow=True)}


def while_loop() -> Program:
    """A loop of 100 iterations, each of which asks the tensor whether to go on."""

    def step(x: tf.Tensor) -> tf.Tensor:
        while tf.reduce_sum(x) < 100.0:
            x = x + 0.25
        return x

    return Program(step, forever(tf.fill((4,), 0.1)))


def greedy_decoding() -> Program:
    """A GRU writes letters until the one that ends a word, or fifty: its own letters decide."""
    keras.utils.set_random_seed(1)
    units, letters, end = 32, 30, 2
    embedding, cell = keras.layers.Embedding(letters, units), keras.layers.GRUCell(units)
    scores = keras.layers.Dense(letters)

    def step(state: tf.Tensor) -> tf.Tensor:
        letter, count, written = tf.constant([1]), 0, tf.zeros([50], tf.int32)
        while count < 50 and letter[0] != end:
            state, _ = cell(embedding(letter), state)
            letter = tf.argmax(scores(state), 1, output_type=tf.int32)
            written = tf.tensor_scatter_nd_update(written, [[count]], letter)
            count += 1
        return tf.reduce_sum(written) + count

    return Program(step, forever(tf.random.normal((1, units))))


def early_exits() -> Program:
    """A classifier that leaves after any of four stages, as soon as it is sure."""
    keras.utils.set_random_seed(0)
    stages = [keras.layers.Dense(64, "tanh", kernel_initializer="orthogonal") for _ in range(4)]
    heads = [keras.layers.Dense(10) for _ in range(4)]
    for layer, width in zip([*stages, *heads], [32, *[64] * 7], strict=True):
        layer.build((1, width))

    def step(x: tf.Tensor) -> tf.Tensor:
        x = stages[0](x)
        scores = tf.nn.softmax(heads[0](x))
        if tf.reduce_max(scores) > 0.3:
            return scores
        x = stages[1](x)
        scores = tf.nn.softmax(heads[1](x))
        if tf.reduce_max(scores) > 0.4:
            return scores
        x = stages[2](x)
        scores = tf.nn.softmax(heads[2](x))
        if tf.reduce_max(scores) > 0.4:
            return scores
        return tf.nn.softmax(heads[3](stages[3](x)))

    numbers = np.random.default_rng(0)
    rows = [tf.constant(scale * numbers.normal(size=(1, 32)), tf.float32) for scale in (0.3, 1.0, 2.0, 4.0)]
    return Program(step, ((row,) for row in itertools.cycle(rows)))


def skipped_blocks() -> Program:
    """Eight residual blocks, each behind a gate that looks at what it would be given."""
    keras.utils.set_random_seed(0)
    blocks = [keras.layers.Dense(64, "relu") for _ in range(8)]
    gates = [keras.layers.Dense(1) for _ in range(8)]
    for layer in (*blocks, *gates):
        layer.build((1, 64))

    def step(x: tf.Tensor) -> tf.Tensor:
        for block, gate in zip(blocks, gates, strict=True):
            if gate(x)[0, 0] > 0.0:
                x = x + block(x)
        return tf.reduce_sum(x)

    numbers = np.random.default_rng(0)  # so many rows that each gate is open for some and shut for others
    rows = [tf.constant(numbers.normal(size=(1, 64)), tf.float32) for _ in range(64)]
    return Program(step, ((row,) for row in itertools.cycle(rows)))


def one_tree() -> Program:
    """A TreeLSTM that climbs one tree of sixteen words by recursion, and learns what to say of it."""
    keras.utils.set_random_seed(0)
    units = 32
    leaf, inner, score = (keras.layers.Dense(width) for width in (2 * units, 5 * units, 5))
    for layer, width in ((leaf, units), (inner, 2 * units), (score, units)):
        layer.build((1, width))
    variables = [v for layer in (leaf, inner, score) for v in layer.trainable_variables]
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(variables)
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def encode(words: tf.Tensor, first: int, count: int) -> tuple[tf.Tensor, tf.Tensor]:
        if count == 1:
            memory, gate = tf.split(leaf(words[first : first + 1]), 2, 1)
        else:
            left, left_memory = encode(words, first, count // 2)
            right, right_memory = encode(words, first + count // 2, count - count // 2)
            i, keep_left, keep_right, new, gate = tf.split(inner(tf.concat([left, right], 1)), 5, 1)
            memory = tf.sigmoid(i) * tf.tanh(new)
            memory += tf.sigmoid(keep_left) * left_memory + tf.sigmoid(keep_right) * right_memory
        return tf.sigmoid(gate) * tf.tanh(memory), memory

    def step(words: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = objective(label, score(encode(words, 0, 16)[0]))
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    numbers = np.random.default_rng(0)
    return Program(step, forever(tf.constant(numbers.normal(size=(16, units)), tf.float32), tf.constant([3])))
