"""The cases whose structure is new on every call, each also with its batches written by hand, for a graph.

    python -m examples.bench.structures             some minutes
    python -m examples.bench.structures --quick     one round of fewer trees: that it runs, not how fast

What is written by hand takes the structure as arrays, so that one graph does for all: levels of a forest one after the
other, sequences padded to the longest. All ways of a case start from the same weights, and see the same data.
"""

import argparse
import functools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("COEXEC_CACHE_DIR", "off")

import numpy as np
import tensorflow as tf

import coexec
from examples.bench import table

UNITS, WORDS, CLASSES, RATE = 64, 500, 5, 0.01
NESTED = int | tuple["NESTED", "NESTED"]  # a tree: a word, or two trees


@dataclass(frozen=True)
class Size:
    """How much there is to do."""

    trees: int = 25
    leaves: int = 20
    sequences: int = 32
    longest: int = 30
    calls: int = 12  # before the first that is timed
    rounds: int = 15


QUICK = Size(trees=3, leaves=5, sequences=4, longest=8, calls=3, rounds=1)


class Weights:
    """The variables of a model, and how they learn."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        numbers = np.random.default_rng(0)
        self.variables = {
            name: tf.Variable((numbers.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32))
            for name, shape in shapes.items()
        }

    def __getattr__(self, name: str) -> tf.Variable:
        return self.variables[name]

    def learn(self, tape: tf.GradientTape, loss: tf.Tensor) -> tf.Tensor:
        """Makes a step of gradient descent."""
        variables = list(self.variables.values())
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(RATE * tf.convert_to_tensor(gradient))
        return loss


# Forests.


def tree_weights() -> Weights:
    """Those of a binary TreeLSTM."""
    return Weights(words=(WORDS, UNITS), leaf=(UNITS, 2 * UNITS), leaf_bias=(2 * UNITS,), inner=(2 * UNITS, 5 * UNITS),
                   bias=(5 * UNITS,), classes=(UNITS, CLASSES))  # fmt: skip


def random_tree(numbers: random.Random, leaves: int) -> NESTED:
    """A tree of so many words, split at random."""
    if leaves == 1:
        return numbers.randrange(WORDS)
    left = numbers.randrange(1, leaves)
    return random_tree(numbers, left), random_tree(numbers, leaves - left)


def forests(size: Size) -> Iterator[tuple[list[NESTED], list[int]]]:
    """Trees and their labels, some of a hundred in every call."""
    numbers = random.Random(0)
    pool = [(random_tree(numbers, size.leaves), numbers.randrange(CLASSES)) for _ in range(100)]
    while True:
        chosen = numbers.sample(pool, size.trees)
        yield [tree for tree, _ in chosen], [label for _, label in chosen]


def leaf_of(w: Weights, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Output and memory of words, `[n, units]`."""
    c, o = tf.split(tf.matmul(x, w.leaf) + w.leaf_bias, 2, 1)
    return tf.sigmoid(o) * tf.tanh(c), c


def node_of(w: Weights, left, left_memory, right, right_memory) -> tuple[tf.Tensor, tf.Tensor]:
    """Output and memory of nodes, of their children's."""
    gates = tf.matmul(tf.concat([left, right], 1), w.inner) + w.bias
    i, forget_left, forget_right, u, o = tf.split(gates, 5, 1)
    c = tf.sigmoid(i) * tf.tanh(u) + tf.sigmoid(forget_left) * left_memory + tf.sigmoid(forget_right) * right_memory
    return tf.sigmoid(o) * tf.tanh(c), c


def encode(w: Weights, tree: NESTED) -> tuple[tf.Tensor, tf.Tensor]:
    """Output and memory of a tree, by two helpers."""
    if isinstance(tree, int):
        return leaf_of(w, tf.gather(w.words, [tree]))
    return node_of(w, *encode(w, tree[0]), *encode(w, tree[1]))


def encode_inline(w: Weights, tree: NESTED) -> tuple[tf.Tensor, tf.Tensor]:
    """The same without helpers."""
    if isinstance(tree, int):
        c, o = tf.split(tf.matmul(tf.gather(w.words, [tree]), w.leaf) + w.leaf_bias, 2, 1)
    else:
        left, left_memory = encode_inline(w, tree[0])
        right, right_memory = encode_inline(w, tree[1])
        gates = tf.matmul(tf.concat([left, right], 1), w.inner) + w.bias
        i, forget_left, forget_right, u, o = tf.split(gates, 5, 1)
        c = tf.sigmoid(i) * tf.tanh(u) + tf.sigmoid(forget_left) * left_memory
        c += tf.sigmoid(forget_right) * right_memory
    return tf.sigmoid(o) * tf.tanh(c), c


def forest(function: Callable, encode: Callable = encode, reads: bool = False) -> Callable:
    """A step over trees; `reads`: whether each tree's loss is read before the gradient."""
    w, log = tree_weights(), []

    @function
    def step(trees, labels):
        with tf.GradientTape() as tape:
            losses = []
            for tree, label in zip(trees, labels, strict=True):
                scores = tf.matmul(encode(w, tree)[0], w.classes)
                losses.append(tf.nn.sparse_softmax_cross_entropy_with_logits([label], scores)[0])
                if reads:
                    log.append(float(losses[-1]))
            loss = tf.add_n(losses) / len(losses)
        return w.learn(tape, loss)

    return step


def levels_of(trees: list[NESTED]) -> tuple[list[int], list[list[tuple[int, int]]], list[int]]:
    """The words, of each level the rows of the two children of each node, and the rows of the roots."""
    words: list[int] = []
    levels: list[list[tuple[Any, Any]]] = []

    def place(tree: NESTED) -> tuple[int, int]:
        """The level of a tree, and its number there."""
        if isinstance(tree, int):
            words.append(tree)
            return 0, len(words) - 1
        left, right = place(tree[0]), place(tree[1])
        level = max(left[0], right[0]) + 1
        while len(levels) < level:
            levels.append([])
        levels[level - 1].append((left, right))
        return level, len(levels[level - 1]) - 1

    roots = [place(tree) for tree in trees]
    starts = np.cumsum([0, len(words), *(len(level) for level in levels)])
    row = lambda at: int(starts[at[0]]) + at[1]  # noqa: E731
    return words, [[(row(left), row(right)) for left, right in level] for level in levels], [row(r) for r in roots]


def forest_by_levels() -> Callable:
    """The same step, its levels batched by hand."""
    w = tree_weights()
    of_rows, of_one = tf.TensorSpec([None, UNITS]), tf.TensorSpec([None], tf.int32)

    @tf.function(input_signature=[of_one, tf.TensorSpec([None, 2], tf.int32), of_one, of_one, of_one], autograph=True)
    def graph(words, children, ends, roots, labels):
        with tf.GradientTape() as tape:
            h, c = leaf_of(w, tf.gather(w.words, words))
            start = 0
            for end in ends:
                tf.autograph.experimental.set_loop_options(
                    shape_invariants=[(h, of_rows.shape), (c, of_rows.shape)]
                )
                left, right = children[start:end, 0], children[start:end, 1]
                new_h, new_c = node_of(w, tf.gather(h, left), tf.gather(c, left), tf.gather(h, right),
                                       tf.gather(c, right))  # fmt: skip
                h, c = tf.concat([h, new_h], 0), tf.concat([c, new_c], 0)
                start = end
            scores = tf.matmul(tf.gather(h, roots), w.classes)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))
        return w.learn(tape, loss)

    def step(trees, labels):
        words, levels, roots = levels_of(trees)
        children = np.array([pair for level in levels for pair in level], np.int32)
        ends = np.cumsum([len(level) for level in levels])
        return graph(*(tf.constant(v, tf.int32) for v in (words, children, ends, roots, labels)))

    return step


# Sequences.


def sequence_weights() -> Weights:
    """Those of a GRU."""
    return Weights(kernel=(2 * UNITS, 2 * UNITS), bias=(2 * UNITS,), new=(2 * UNITS, UNITS), new_bias=(UNITS,),
                   classes=(UNITS, CLASSES))  # fmt: skip


def cell(w: Weights, x: tf.Tensor, h: tf.Tensor) -> tf.Tensor:
    """One step of a GRU."""
    z, r = tf.split(tf.sigmoid(tf.matmul(tf.concat([x, h], 1), w.kernel) + w.bias), 2, 1)
    return z * h + (1.0 - z) * tf.tanh(tf.matmul(tf.concat([x, r * h], 1), w.new) + w.new_bias)


def sequences(size: Size) -> Iterator[tuple[list[np.ndarray], list[int]]]:
    """Sequences of all lengths, and their labels."""
    numbers = np.random.default_rng(0)
    while True:
        lengths = numbers.integers(5, size.longest + 1, size.sequences)
        yield (
            [numbers.normal(size=(n, 1, UNITS)).astype(np.float32) for n in lengths],
            numbers.integers(CLASSES, size=size.sequences).tolist(),
        )


def ragged(function: Callable) -> Callable:
    """A step over sequences, a cell at a time."""
    w = sequence_weights()

    @function
    def step(sequences, labels):
        with tf.GradientTape() as tape:
            losses = []
            for sequence, label in zip(sequences, labels, strict=True):
                h = tf.zeros([1, UNITS])
                for x in sequence:
                    h = cell(w, x, h)
                scores = tf.matmul(h, w.classes)
                losses.append(tf.nn.sparse_softmax_cross_entropy_with_logits([label], scores)[0])
            loss = tf.add_n(losses) / len(losses)
        return w.learn(tape, loss)

    return step


def ragged_padded() -> Callable:
    """The same step, padded by hand."""
    w = sequence_weights()

    @tf.function(input_signature=[tf.TensorSpec([None, None, UNITS]), tf.TensorSpec([None], tf.int32),
                                  tf.TensorSpec([None], tf.int32)])  # fmt: skip
    def graph(padded, lengths, labels):
        with tf.GradientTape() as tape:
            h = tf.zeros([tf.shape(padded)[1], UNITS])
            for time in tf.range(tf.shape(padded)[0]):
                h = tf.where((time < lengths)[:, None], cell(w, padded[time], h), h)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.matmul(h, w.classes))
            )
        return w.learn(tape, loss)

    def step(sequences, labels):
        lengths = [len(sequence) for sequence in sequences]
        padded = np.zeros((max(lengths), len(sequences), UNITS), np.float32)
        for number, sequence in enumerate(sequences):
            padded[: len(sequence), number] = sequence[:, 0]
        return graph(tf.constant(padded), tf.constant(lengths), tf.constant(labels))

    return step


# What is measured.


@dataclass(frozen=True)
class Case:
    """A step, its peer with batches written by hand, and data for both."""

    name: str
    what: str
    build: Callable[[Callable], Callable]
    by_hand: Callable[[], Callable]
    data: Callable[[Size], Iterator[tuple]]
    goal: float  # for co-execution, as a multiple of what is written by hand


CASES = (
    Case("forest", "TreeLSTM, 25 trees of 20 leaves", forest, forest_by_levels, forests, 0.4),
    Case("inline", "the same, without helpers", functools.partial(forest, encode=encode_inline), forest_by_levels,
         forests, 1.0),
    Case("reads", "the same, each tree's loss read", functools.partial(forest, reads=True), forest_by_levels, forests,
         2.16),
    Case("ragged", "GRU, 32 sequences of 5 to 30 steps", ragged, ragged_padded, sequences, 1.0),
)  # fmt: skip


@dataclass
class Way:
    """One way to run a case."""

    step: Callable
    data: Iterator[tuple]
    first: float = 0.0  # seconds of the first call
    seconds: list[float] = field(default_factory=list)  # of each timed call
    losses: list[float] = field(default_factory=list)

    def call(self) -> float:
        """Makes a call; returns the seconds that it took."""
        arguments = next(self.data)
        began = time.perf_counter()
        self.losses.append(float(self.step(*arguments)))
        return time.perf_counter() - began


def measure(case: Case, size: Size) -> dict[str, Way]:
    """Runs all ways of a case in turn, each round in another order; raises an error where their losses differ."""
    ways = {
        "eager": Way(case.build(lambda step: step), case.data(size)),
        "coexec": Way(case.build(coexec.function(batching=True)), case.data(size)),
        "by hand": Way(case.by_hand(), case.data(size)),
    }
    for way in ways.values():
        way.first = way.call()
    order = random.Random(0)
    for number in range(size.calls + size.rounds):
        for way in order.sample(list(ways.values()), len(ways)):
            seconds = way.call()
            if number >= size.calls:
                way.seconds.append(seconds)
    for name, way in ways.items():
        np.testing.assert_allclose(way.losses, ways["eager"].losses, 1e-3, 1e-5, err_msg=f"{case.name}, {name}")
    return ways


def render(measured: dict[str, dict[str, Way]]) -> str:
    """What was measured, as a Markdown table."""
    rows = []
    for case in CASES:
        if case.name not in measured:
            continue
        ways = measured[case.name]
        of = {
            other: statistics.median(a / b for a, b in zip(ways["coexec"].seconds, ways[other].seconds, strict=True))
            for other in ("eager", "by hand")
        }
        times = [table.milliseconds(statistics.median(way.seconds)) for way in ways.values()]
        first = [table.milliseconds(ways[name].first) for name in ("coexec", "by hand")]
        rows.append([case.what, *times, f"{of['eager']:.3f}", f"{of['by hand']:.2f}", f"{case.goal:.3g}", *first])
    heads = ["ms per call", "eager", "coexec", "by hand", "coexec of eager", "of by hand", "goal", "first: coexec",
             "by hand"]  # fmt: skip
    return table.markdown(heads, rows)


def main(arguments: list[str] | None = None) -> int:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser("examples.bench.structures", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round of fewer trees")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="may be repeated")
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else Size()
    wanted = options.case or [case.name for case in CASES]
    measured = {case.name: measure(case, size) for case in CASES if case.name in wanted}
    print(f"{table.circumstances()}\n\n{render(measured)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
