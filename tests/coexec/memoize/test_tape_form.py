"""Gradients on ever other paths: known by what their tapes have recorded, and never taken for others."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coexec.base.tuning import tuned
from tests.coexec import run_both
from tracer.library import gradient

WIDTH, TURNS = 6, 5


class Cell:
    """Layers of raw operations, and the variables of a recurrent step."""

    def __init__(self, seed=0, dtype=tf.float32):
        draw = np.random.default_rng(seed)
        self.table, self.w, self.u = [
            tf.Variable(draw.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, dtype=dtype) for _ in range(3)
        ]
        self.variables = [self.table, self.w, self.u]

    def __call__(self, token, h):
        return tf.tanh(tf.gather(self.table, token) @ self.w + h @ self.u)


def decoder(choose, penalty=None, persistent=False, cells=1):
    """Makes training steps over some turns; `choose` gives the next token, and `coins` say how."""

    def make(decorate):
        models = [Cell(seed) for seed in range(cells)]
        variables = [v for model in models for v in model.variables]
        optimizer = keras.optimizers.SGD(0.05)
        optimizer.build(variables)

        @decorate
        def step(tokens, coins):
            with tf.GradientTape(persistent=persistent) as tape:
                h = tf.zeros([tokens.shape[0], WIDTH])
                token, total = tokens[:, 0], 0.0
                for turn, coin in enumerate(coins, 1):
                    h = models[coin % cells](token, h)
                    total += tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tokens[:, turn], h))
                    token = choose(coin, tokens[:, turn], h)
                loss = total / len(coins)
                if penalty is not None:
                    loss += penalty(coins, h)
            gradients = tape.gradient(loss, variables)
            optimizer.apply([tf.zeros_like(v) if g is None else tf.convert_to_tensor(g)
                             for g, v in zip(gradients, variables, strict=True)], variables)  # fmt: skip
            if persistent:
                return loss, tape.gradient(h, models[0].w), token
            return loss, token

        return step

    return make


def calls(count, seed=0, faces=2, turns=TURNS):
    draw = np.random.default_rng(seed)
    return [
        (tf.constant(draw.integers(0, WIDTH, (3, turns + 1)), tf.int32), draw.integers(0, faces, turns).tolist())
        for _ in range(count)
    ]


def sampled(coin, token, h):
    return token if coin else tf.argmax(h, 1, output_type=tf.int32)


def test_choices_that_no_gradient_depends_on(observed):
    """A gradient is learnt for some of many hundred paths, and then known for all of them."""
    step = run_both(decoder(CHOICES["of several operations"]), calls(40, turns=10))
    known, regions = observed.count(gradient), step.stats().regions
    for call in calls(20, seed=1, turns=10):
        step(*call)
    assert observed.count(gradient) == known <= 8, step.explain()
    assert step.stats().regions - regions >= 20
    assert "keeps changing" not in str(step.explain())


def test_a_gradient_is_run_again_now_and_then(observed):
    """On whatever path it is due; and then it is known for all of them as before."""
    with tuned(region_first_check=20):
        step = run_both(decoder(CHOICES["of several operations"]), calls(60, turns=10))
        known = observed.count(gradient)
        for call in calls(60, seed=1, turns=10):
            step(*call)
    assert 1 <= observed.count(gradient) - known <= 5, step.explain()


CHOICES = {
    "sampled": sampled,
    "through the logits": lambda coin, token, h: token if coin else tf.cast(tf.round(h[:, 0] * 0.0), tf.int32),
    "of several operations": lambda coin, token, h: token if coin else tf.cast(tf.argmax(h * 2.0, 1) % 3, tf.int32),
    "a constant": lambda coin, token, h: tf.zeros_like(token) + coin,
    "read": lambda coin, token, h: token if float(h[0, 0]) > 0.0 and coin else token * 0,
    "stopped": lambda coin, token, h: token if coin else tf.argmax(tf.stop_gradient(h), 1, output_type=tf.int32),
}  # fmt: skip
PENALTIES = {
    "none": None,
    "a number": lambda coins, h: tf.reduce_sum(h**2) * (0.1 + sum(coins)),
    "an exponent": lambda coins, h: tf.reduce_sum(h ** (2 + coins[0])),
    "an axis": lambda coins, h: tf.reduce_sum(tf.reduce_max(h, coins[0] % 2)),
    "another operation": lambda coins, h: tf.reduce_sum(tf.sin(h) if coins[0] else tf.cos(h)),
    "another tensor": lambda coins, h: tf.reduce_sum(h * (tf.ones_like(h) * 2.0 if coins[-1] else h)),
    "an order": lambda coins, h: tf.reduce_sum(h - h * 0.5 if coins[0] else h * 0.5 - h),
    "a slice": lambda coins, h: tf.reduce_sum(h[:, coins[0] : coins[0] + 2]),
    "a constant of its own": lambda coins, h: tf.reduce_sum(h * tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0 + coins[0]])),
    "a large one": lambda coins, h: tf.reduce_sum(h @ tf.constant(np.full((WIDTH, 99), 1.0 + coins[0], "float32"))),
    "a library's": lambda coins, h: tf.reduce_sum(tf.nn.silu(h) if coins[0] else tf.nn.gelu(h)),
    "a norm": lambda coins, h: tf.reduce_sum(tf.clip_by_norm(h, 0.5 + coins[0])),
}  # fmt: skip


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_choices(choice, persistent):
    run_both(decoder(CHOICES[choice], persistent=persistent), calls(40))


@pytest.mark.parametrize("penalty", PENALTIES)
def test_what_a_gradient_depends_on(penalty):
    run_both(decoder(sampled, PENALTIES[penalty]), calls(40))


@pytest.mark.parametrize("cells", [2, 3])
def test_choices_among_variables(cells):
    """The same operations on other variables are another gradient."""
    run_both(decoder(lambda coin, token, h: token, cells=cells), calls(45, faces=cells))


def test_choices_among_layers():
    """The same kind of layer, on the same kind of input: which one was called is part of the form."""

    def make(decorate):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(WIDTH, "tanh") for _ in range(2)] + [keras.layers.LayerNormalization()]
        for layer in layers:
            layer.build((None, WIDTH))
        variables = [v for layer in layers for v in layer.trainable_variables]

        @decorate
        def step(x, coins):
            with tf.GradientTape() as tape:
                for coin in coins:
                    x = layers[coin](x)
                    if not coin:
                        x = tf.cast(tf.argmax(x, 1), tf.float32)[:, None] * 0.1 + x
                loss = tf.reduce_sum(x**2)
            return loss, tape.gradient(loss, variables)

        return step

    draw = np.random.default_rng(5)
    data = [tf.constant(draw.normal(size=(4, WIDTH)), tf.float32) for _ in range(50)]
    run_both(make, [(x, draw.integers(0, 3, 4).tolist()) for x in data])


def test_what_is_asked_of_a_tape():
    """Targets, sources, watched tensors and cotangents that differ, behind choices."""

    def make(decorate):
        cell = Cell()

        @decorate
        def step(tokens, coins):
            one, two = tf.constant(np.eye(3, WIDTH), tf.float32), tf.constant(np.ones((3, WIDTH)), tf.float32)
            with tf.GradientTape() as tape:
                tape.watch(one if coins[0] else [one, two])
                h, token = one * two, tokens[:, 0]
                for turn, coin in enumerate(coins, 1):
                    h = cell(token, h)
                    token = sampled(coin, tokens[:, turn], h)
                other = h * 2.0
            sources = [one, two, cell.w, cell.u] if coins[1] else [cell.u, cell.w, two, one]
            cotangent = tf.ones_like(h) * 3.0 if coins[2] else None
            found = tape.gradient(h if coins[3] else other, sources, output_gradients=cotangent)
            return [None if g is None else tf.convert_to_tensor(g) for g in found]

        return step

    run_both(make, calls(60))


def test_gradients_of_gradients():
    """What an outer tape records is no gradient by form."""

    def make(decorate):
        cell = Cell(dtype=tf.float64)

        @decorate
        def step(tokens, coins):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    h, token = tf.zeros([3, WIDTH], tf.float64), tokens[:, 0]
                    for turn, coin in enumerate(coins, 1):
                        h = cell(token, h)
                        token = sampled(coin, tokens[:, turn], h)
                    loss = tf.reduce_sum(h**2)
                first = inner.gradient(loss, cell.w)
                norm = tf.reduce_sum(first**2)
            return loss, norm, outer.gradient(norm, [cell.w, cell.u])

        return step

    run_both(make, calls(40))


def test_a_variable_that_is_replaced():
    """A form names variables by place: another one at the same place is found where it is."""

    def make(decorate):
        cells = [Cell(0), Cell(1)]

        @decorate
        def step(tokens, coins, number):
            cell = cells[number]
            with tf.GradientTape() as tape:
                h, token = tf.zeros([3, WIDTH]), tokens[:, 0]
                for turn, coin in enumerate(coins, 1):
                    h = cell(token, h)
                    token = sampled(coin, tokens[:, turn], h)
                loss = tf.reduce_sum(h**2)
            gradients = tape.gradient(loss, cell.variables)
            for variable, found in zip(cell.variables, gradients, strict=True):
                variable.assign_sub(0.1 * tf.convert_to_tensor(found))
            return loss, gradients[1:]

        return step

    run_both(make, [(*call, number // 20 % 2) for number, call in enumerate(calls(80))])


@pytest.mark.parametrize("raw", [False, True], ids=["layer", "operations"])
def test_a_variable_that_is_trained_no_more(raw):
    """Whether a tape watches it is part of what the gradient is known by."""

    def make(decorate):
        keras.utils.set_random_seed(1)
        cell, dense = Cell(), keras.layers.Dense(WIDTH, "tanh")
        dense.build((None, WIDTH))
        variables = [cell.w, cell.u, *(v.value for v in dense.variables)]

        @decorate
        def train(tokens, coins):
            with tf.GradientTape() as tape:
                h, token = tf.zeros([3, WIDTH]), tokens[:, 0]
                for turn, coin in enumerate(coins, 1):
                    h = cell(token, h) if raw else dense(cell(token, h))
                    token = sampled(coin, tokens[:, turn], h)
                loss = tf.reduce_sum(h**2)
            return loss, tape.gradient(loss, variables)

        def step(tokens, coins, trained):
            for variable in variables:
                variable._trainable = trained
            return train(tokens, coins)

        return step

    run_both(make, [(*call, number // 7 % 2 == 0) for number, call in enumerate(calls(50))])


def critics(between, layer):
    """Makes programs of two losses of one form, of which a choice says which one a gradient is asked of."""

    def make(decorate):
        keras.utils.set_random_seed(1)
        dense = keras.layers.Dense(WIDTH, "tanh")
        dense.build((None, WIDTH))
        w = dense.kernel.value

        @decorate
        def step(x, z, choice):
            with tf.GradientTape() as tape:
                losses = [tf.reduce_sum((dense(v) if layer else tf.sin(v @ w)) ** 2) for v in (x, z)]
            taken = between(x, z, losses)
            return tape.gradient(losses[choice], [w]), taken

        return step

    return make


BETWEEN = {
    "nothing": lambda x, z, losses: None,
    "a read": lambda x, z, losses: [float(loss) for loss in losses],
    "a read, and both fed": lambda x, z, losses: ([float(loss) for loss in losses], x * z),
    "a read, and one fed": lambda x, z, losses: ([float(loss) for loss in losses], x * 2.0),
}  # fmt: skip


@pytest.mark.parametrize("layer", [False, True], ids=["operations", "layer"])
@pytest.mark.parametrize("between", BETWEEN)
def test_which_of_two_losses(between, layer):
    """They have one form, and are at different places in the segment, which the gradient's operations know."""
    draw = np.random.default_rng(7)
    x = [tf.constant(draw.normal(size=(3, WIDTH)), tf.float32) for _ in range(61)]
    run_both(critics(BETWEEN[between], layer), [(*x[n : n + 2], int(draw.integers(2))) for n in range(60)])


COTANGENTS = {
    "made": lambda x: [tf.abs(x), tf.exp(x), tf.cos(x)],
    "constants": lambda x: [tf.ones_like(x), tf.zeros_like(x), tf.ones_like(x) * 2.0],
}


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("cotangents", COTANGENTS)
def test_which_of_some_cotangents(cotangents, read):
    def make(decorate):
        w = tf.Variable(np.arange(WIDTH), dtype=tf.float32)

        @decorate
        def step(x, choice, noise):
            for number in range(noise):
                tf.argmax(x) if number % 2 else tf.range(3)
            with tf.GradientTape() as tape:
                y = tf.sin(x * w)
            if read:
                float(y[0])
            return tape.gradient(y, w, output_gradients=COTANGENTS[cotangents](x)[choice])

        return step

    draw = np.random.default_rng(8)
    x = [tf.constant(draw.normal(size=WIDTH), tf.float32) for _ in range(60)]
    run_both(make, [(v, int(draw.integers(3)), int(draw.integers(4))) for v in x])
