"""Random numbers: those eager would have drawn, wherever the seed comes from."""

import random

import keras
import numpy as np
import tensorflow as tf

from tests.programs import Instance, args, each, program, signed, vector, whole

# Normal numbers come from a logarithm and a sine, which compilers round in their own ways.
NORMAL = {"rtol": 2e-6, "atol": 2e-6}


@program(rtol=0, atol=0)
def uniform(function):
    "Uniform floats and whole numbers under the global seed, bit for bit."

    @function
    def step(x):
        return (
            x + tf.random.uniform([4]),
            tf.random.uniform([3], 0, 10, tf.int32),
            tf.random.uniform([2], 5, 2**40, tf.int64),
        )

    return Instance(step, each(lambda i: args(tf.zeros(4))))


@program(launches=False, why="there is nothing but random operations")
def seeded_operations(function):
    "An op seed of its own, the same in two places, and another that changes by call."

    @function
    def step(number):
        a, b = tf.random.uniform([2], seed=5), tf.random.uniform([2], seed=5)
        return a, b, tf.random.uniform([2], seed=number), tf.random.uniform([], dtype=tf.float64)

    return Instance(step, each(lambda i: args(i)))


@program(**NORMAL)
def normal(function):
    "Normal, truncated normal and scaled normal numbers."

    @function
    def step(x):
        return (
            x + tf.random.normal([5]),
            tf.random.truncated_normal([5]),
            tf.random.normal([2, 2], mean=3.0, stddev=0.5),
        )

    return Instance(step, each(lambda i: args(whole(i))))


@program(rtol=0, atol=0)
def shuffled(function):
    "`tf.random.shuffle` and `tf.random.categorical` give the same order and the same classes."

    @function
    def step(x):
        return (
            tf.random.shuffle(x),
            tf.random.categorical(tf.zeros([2, 3]), 5),
            tf.random.shuffle(tf.range(5)),
        )

    return Instance(step, each(lambda i: args(tf.range(6) * (i + 1))))


@program(rtol=0, atol=0)
def own_seeds(function):
    "Seeds of the operations' own: a constant, one that changes by call, none; in a loop, and outside of the step."

    @function
    def step(x, number):
        total = x
        for _ in range(2):
            total = total + tf.random.uniform([4], seed=3)
        return tf.nn.dropout(total, 0.5, seed=number), tf.random.shuffle(x, seed=3), tf.random.uniform([4])

    def outside(_):
        return tf.random.uniform([4], seed=3)

    return Instance(step, each(lambda i: args(tf.zeros(4), [1, None, 1, 2][i % 4])), after=outside)


@program(rtol=0, atol=0)
def drawn_before_a_failure(function):
    "An operation fails and is caught: what was drawn before stays drawn, and the next draws are as if eager."
    totals = tf.Variable(0.0)

    @function
    def step(x, index):
        first = tf.random.uniform([2])
        totals.assign_add(first[0])
        try:
            first = first + tf.gather(x, index)
        except tf.errors.InvalidArgumentError:
            first = first * tf.random.uniform([2])
        return first, tf.random.uniform([], 0, 100, tf.int32)

    return Instance(step, each(lambda i: args(tf.ones(3), 5 if i % 4 == 2 else i % 3)), lambda: totals)


@program(**NORMAL)
def gradient_through_noise(function):
    "Dropout and noise between weights and a loss; the gradient takes the numbers that were drawn."
    weights = tf.Variable(tf.ones([4, 3]))

    @function
    def step(x):
        with tf.GradientTape() as tape:
            hidden = tf.nn.dropout(x @ weights, 0.25) + tf.random.normal([2, 3])
            loss = tf.reduce_sum(hidden * hidden)
        gradient = tape.gradient(loss, weights)
        weights.assign_sub(0.125 * gradient)
        return loss, gradient

    return Instance(step, each(lambda i: args(whole(i) + tf.ones([2, 4]))), lambda: weights)


@program(rtol=1e-5, atol=1e-6)
def other_distributions(function):
    "Gamma, Poisson and log-uniform candidates."

    @function
    def step(x):
        return tf.random.gamma([3], 2.0), tf.random.poisson([3], [4.0]), x * 2.0

    return Instance(step, each(lambda i: args(vector(i))))


@program(rtol=0, atol=0)
def dropout(function):
    "`tf.nn.dropout`, its stateless kin, and a rate that changes."

    @function
    def step(x, rate):
        return (
            tf.nn.dropout(x, 0.5),
            tf.nn.dropout(x, rate),
            tf.nn.experimental.stateless_dropout(x, 0.5, seed=[1, 2]),
        )

    return Instance(step, each(lambda i: args(tf.ones(8), 0.25 + 0.25 * (i % 2))))


@program(**NORMAL)
def generator(function):
    "A `tf.random.Generator` advances its state by each draw."
    source = tf.random.Generator.from_seed(3)

    @function
    def step(x):
        return (
            x + source.uniform([2]),
            source.normal([3]),
            source.uniform([2], 0, 9, tf.int32),
            source.make_seeds(1),
        )

    return Instance(step, each(lambda i: args(whole(i))), lambda: source.state)


@program()
def generator_made_inside(function):
    "Generators are made, split and reset within a step."
    source = tf.random.Generator.from_seed(7)

    @function
    def step(number):
        own = tf.random.Generator.from_seed(number)
        first, second = source.split(2)
        if number % 3 == 2:
            source.reset_from_seed(number)
        return own.uniform([2]), first.uniform([2]), second.uniform([2])

    return Instance(step, each(lambda i: args(i)), lambda: source.state)


@program(**NORMAL)
def stateless(function):
    "Stateless draws whose seeds are constants, arguments and computed ones."

    @function
    def step(seed):
        split = tf.random.split(seed, 2)
        drawn = tf.random.stateless_uniform([2], seed), tf.random.stateless_normal([2], split[0])
        return drawn, tf.random.stateless_uniform([2], [1, 2], 0, 9, tf.int32), tf.random.fold_in(seed, 3)

    return Instance(step, each(lambda i: args(tf.constant([i, 1]))))


@program(rtol=0, atol=0)
def seed_set_inside(function):
    "`tf.random.set_seed` within a step starts the numbers again."

    @function
    def step(number):
        before = tf.random.uniform([2])
        if number % 3 == 0:
            tf.random.set_seed(number)
        return before, tf.random.uniform([2]), tf.random.uniform([2])

    return Instance(step, each(lambda i: args(i), 12))


@program()
def python_and_numpy(function):
    "Python's and NumPy's random numbers go into operations and decide branches."

    @function
    def step(x):
        x = x * random.random() + np.random.normal(size=4).astype(np.float32)
        if random.random() < 0.5:
            x = x + tf.random.uniform([4])
        return x, random.choice("abc"), np.random.permutation(3)

    return Instance(step, each(lambda i: args(vector(i)), 10))


@program(rtol=0, atol=0)
def drawn_in_a_branch(function):
    "A branch draws more numbers than the other; the next draws are as if eager."

    @function
    def step(x):
        first = tf.random.uniform([2])
        if tf.reduce_sum(x) > 0:
            first = first + tf.random.uniform([2]) + tf.random.uniform([2])
        return first, tf.random.uniform([2])

    return Instance(step, each(lambda i: args(signed(i))), after=lambda _: tf.random.uniform([2]))


@program(rtol=0, atol=0)
def drawn_in_a_loop(function):
    "Rejection sampling: as many draws as it takes."

    @function
    def step(limit):
        draws = 0
        while True:
            value = tf.random.uniform([])
            draws += 1
            if value < limit or draws == 4:
                return value, draws

    return Instance(step, each(lambda i: args(tf.constant(0.4)), 16))


@program(**NORMAL)
def keras_random(function):
    "`keras.random` with a seed generator, with a number and with the global one."
    seeds = keras.random.SeedGenerator(5)

    @function
    def step(x):
        drawn = (
            keras.random.uniform((2,), seed=seeds),
            keras.random.normal((2,), seed=3),
            keras.random.uniform((2,)),
        )
        return drawn, keras.random.dropout(x, 0.5, seed=seeds), keras.random.shuffle(x, seed=seeds)

    return Instance(step, each(lambda i: args(vector(i))), lambda: seeds.state)


@program()
def initializers(function):
    "Weights are drawn by initializers within a step."
    glorot, he = keras.initializers.GlorotUniform(seed=1), tf.keras.initializers.HeNormal(seed=2)

    @function
    def step(x):
        layer = keras.layers.Dense(2, kernel_initializer=glorot)
        return layer(x), he((2, 2)), tf.random_uniform_initializer(0, 1, seed=1)([2])

    return Instance(step, each(lambda i: args(vector(i, 2, 3))))


@program()
def random_images(function):
    "Flips, crops and brightness, seeded by the operation and without a seed."

    @function
    def step(image, number):
        flipped = tf.image.random_flip_left_right(image, seed=1)
        cropped = tf.image.stateless_random_crop(flipped, [2, 2, 1], seed=[number, 0])
        return flipped, cropped, tf.image.random_brightness(cropped, 0.5)

    return Instance(step, each(lambda i: args(vector(i, 4, 4, 1), i)))
