"""Python of libraries that chooses by sizes, at sizes at which it has not run: by a bound, or by which is larger."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from coexec import testing
from tests.coexec import run_both


def _sizes(seed, least, most, shape):
    return np.random.default_rng(seed).integers(least, most, shape).tolist()


def crops_nothing_of_small_images(decorate):
    return decorate(lambda x: tf.reduce_mean(tf.image.central_crop(tf.tanh(x), 0.9)))


def solves_tall_and_wide_systems(decorate):
    @decorate
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.linalg.lstsq(x, tf.reduce_sum(x, 1, keepdims=True) + 1.0))
        return loss, tape.gradient(loss, x)

    return step


def resizes_small_images(decorate):
    layer = keras.layers.CenterCrop(16, 16)
    return decorate(lambda x: layer(tf.tanh(x)))


def takes_no_short_ones(decorate):
    layer = keras.layers.Cropping1D((1, 1))
    return decorate(lambda x: layer(tf.tanh(x)))


def takes_no_small_images(decorate):
    return decorate(lambda x: tf.image.crop_to_bounding_box(tf.tanh(x), 1, 1, 4, 4))


TALL = [(2 + n % 7, 1 + n % 3) for n in range(30) if 2 + n % 7 > 1 + n % 3]
PROGRAMS = {
    "a fraction": (crops_nothing_of_small_images, [
        *([h, w, 1] for h, w in _sizes(1, 3, 15, (40, 2))), [30, 40, 1], [25, 22, 1], [19, 21, 1], [10, 40, 1],
    ]),
    "which is larger": (solves_tall_and_wide_systems, [*TALL, *((m, n) for n, m in TALL[:6]), (4, 4)]),
    "and back": (solves_tall_and_wide_systems, [*((m, n) for n, m in TALL), *TALL[:6], (4, 4)]),
    "a layer": (resizes_small_images, [[2, n, n, 3] for n in (*_sizes(2, 4, 14, 30), 20, 24, 9, 31)]),
    "an error of a layer": (takes_no_short_ones, [[2, n, 3] for n in (*_sizes(3, 4, 14, 30), 2, 3, 20, 2, 1)]),
    "an error of a function": (takes_no_small_images, [
        [h, w, 3] for h, w in (*_sizes(4, 5, 14, (30, 2)), (4, 9), (3, 3), (20, 20), (9, 4))
    ]),
}  # fmt: skip


@pytest.mark.parametrize("follows", [True, False], ids=["always", "where it pays"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_beyond_what_was_seen(name, follows):
    make, shapes = PROGRAMS[name]
    draw = np.random.default_rng(5)
    calls = [(tf.constant(draw.normal(size=shape), tf.float32),) for shape in shapes]
    with testing.always_follow() if follows else contextlib.nullcontext():
        step = run_both(make, calls)
    if follows:
        assert step.stats().regions > len(shapes) // 3, step.explain()


def test_between_what_was_seen():
    """Sizes that are new, in between others, are skipped at once."""

    def make(decorate):
        layer = keras.layers.Dense(3, "tanh", kernel_initializer="ones")
        layer.build((None, 4))
        return decorate(lambda x: layer(x))

    sizes = [4, 40, 9, 30, 17, *range(5, 40)]
    with testing.always_follow():
        step = run_both(make, [(tf.ones([n, 4]),) for n in sizes])
    assert step.stats().regions >= len(sizes) - 6, step.explain()
