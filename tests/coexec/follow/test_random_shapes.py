"""Random programs in which values decide shapes, of sizes that come again or never do: each as eager has it."""

import contextlib
import random

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec.testing import always_follow, compile_everything
from tests.coexec import outcomes, unchanged
from tests.snapshots import assert_same

CALLS = 10


class Rows:
    """Rows of numbers, with an integer each, that parts of a program replace by others."""

    def __init__(self, numbers, keys, table, log):
        self.numbers, self.keys, self.table, self.log = numbers, keys, table, log

    def fit(self):
        """Drops the rows without an integer, or the integers without a row."""
        count = tf.minimum(tf.shape(self.numbers)[0], tf.size(self.keys))
        self.numbers, self.keys = self.numbers[:count], self.keys[:count]

    def pick(self, places):
        self.numbers, self.keys = tf.gather(self.numbers, places), tf.gather(self.keys, places)

    def masked(self, choice):
        self.fit()
        self.pick(tf.where(self.keys > choice)[:, 0])

    def masked_by_numbers(self, choice):
        self.fit()
        mask = self.numbers[:, 0] > -1.0 - choice
        self.numbers, self.keys = tf.boolean_mask(self.numbers, mask), tf.boolean_mask(self.keys, mask)

    def summed_by_kind(self, choice):
        self.fit()
        kinds, places = tf.unique(self.keys)
        self.numbers, self.keys = tf.math.unsorted_segment_sum(self.numbers, places, tf.size(kinds)), kinds

    def summed_by_key(self, choice):
        self.fit()
        count = tf.reduce_max(tf.concat([self.keys, [choice]], 0)) + 1
        self.numbers, self.keys = tf.math.unsorted_segment_mean(self.numbers, self.keys, count), tf.range(count)

    def tiled(self, choice):
        self.numbers = tf.tile(self.numbers, [tf.size(self.keys) % 2 + 1, 1])

    def repeated(self, choice):
        self.fit()
        counts = self.keys % 3
        self.numbers, self.keys = tf.repeat(self.numbers, counts, axis=0)[:30], tf.repeat(self.keys, counts)[:30]

    def partitioned(self, choice):
        self.fit()
        even, odd = tf.dynamic_partition(self.numbers, self.keys % 2, 2)
        self.numbers = tf.concat([odd, even * 0.5], 0)

    def padded(self, choice):
        self.numbers = tf.pad(self.numbers, [[0, tf.reduce_sum(self.keys) % 4], [0, 0]])

    def looked_up(self, choice):
        self.fit()
        self.numbers = self.numbers * (1.0 + 0.1 * self.table.lookup(self.keys)[:, None])

    def inserted(self, choice):
        self.table.insert(self.keys, tf.cast(self.keys, tf.float32) * 0.1)

    def spelled(self, choice):
        self.fit()
        lengths = tf.strings.length(tf.strings.as_string(self.keys * 7))
        self.numbers = self.numbers * tf.cast(lengths, tf.float32)[:, None]

    def centred(self, choice):
        mean = tf.Variable(tf.reduce_mean(tf.concat([self.numbers, tf.zeros([1, 3])], 0), 0))
        mean.assign_add([0.1, 0.0, -0.1])
        self.numbers = self.numbers - mean

    def drawn(self, choice):
        self.numbers = self.numbers * tf.random.uniform([tf.shape(self.numbers)[0], 1])

    def renumbered(self, choice):
        self.keys = (self.keys * (choice + 1) + tf.size(self.keys)) % 9

    def squashed(self, choice):
        self.numbers = tf.tanh(self.numbers) * (choice + 0.5)

    def branched(self, choice):
        self.numbers = self.numbers + 1.0 if tf.size(self.keys) > 3 + choice else self.numbers - 1.0

    def read(self, choice):
        self.log.append(int(tf.reduce_sum(self.keys)))


PARTS = [part for name, part in vars(Rows).items() if name not in ("__init__", "fit", "pick") and callable(part)]


def program(seed):
    """A training step of some of the parts, and how often its sizes come again."""
    rng = random.Random(seed)
    plan = [(rng.choice(PARTS), rng.randint(0, 3)) for _ in range(rng.randint(4, 12))]
    persistent, highs = rng.random() < 0.3, rng.choice([[5], [2, 6, 4], [1, 2, 3, 5, 8]])

    def make(decorate):
        tf.random.set_seed(seed)
        weight = tf.Variable([1.0, -2.0, 0.5])
        table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, -1.0)
        log = []

        @decorate
        def step(numbers, keys):
            with tf.GradientTape(persistent=persistent) as tape:
                rows = Rows(numbers * weight, keys, table, log)
                for part, choice in plan:
                    part(rows, choice)
                loss = tf.reduce_sum(rows.numbers**2)
            gradient = tape.gradient(loss, weight, unconnected_gradients="zero")
            weight.assign_sub(1e-4 * tf.clip_by_value(gradient, -1.0, 1.0))
            return loss, rows.numbers, rows.keys, gradient, weight.read_value(), list(log)

        return step

    data = np.random.default_rng(seed)
    numbers = [tf.constant(data.normal(size=(9, 3)), tf.float32) for _ in range(CALLS)]
    keys = [tf.constant(data.integers(0, highs[n % len(highs)], 9), tf.int32) for n in range(CALLS)]
    return make, list(zip(numbers, keys, strict=True))


@pytest.mark.sample(*map(str, range(4)))
@pytest.mark.parametrize("seed", range(40), ids=str)
def test_random_programs(seed):
    make, calls = program(seed)
    expected = outcomes(make(unchanged), calls)
    with always_follow(), compile_everything() if seed % 2 else contextlib.nullcontext():
        fn = make(coexec.function)
        found = outcomes(fn, calls)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert_same(one, other, rtol=1e-3, atol=1e-4, path=f"call {number}: ")  # gradients amplify rounding
    assert fn.stats().followed >= CALLS - 2, fn.explain()
    assert fn.stats().diverged <= 1, fn.explain()
