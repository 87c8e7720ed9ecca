"""The steps in JAX, with Flax's layers and Optax's Adam, compiled as a whole as JAX's users do."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.bench.case import Program, forever
from examples.bench.networks import CLASSES, HEADS, HIDDEN, LAYERS, LENGTH, WIDTHS, WORDS, images, tokens


def training(model: nn.Module, objective: Callable, x: np.ndarray, y: np.ndarray) -> Program:
    """A step of this model on a batch that stays the same."""
    inputs, wanted = jnp.asarray(x), jnp.asarray(y)
    variables = model.init(jax.random.key(0), inputs)
    optimizer = optax.adam(1e-3)
    others = {name: value for name, value in variables.items() if name != "params"}
    state = [variables["params"], others, optimizer.init(variables["params"])]

    @jax.jit
    def update(weights, others, slots, inputs, wanted):
        def loss_of(weights):
            outputs, changed = model.apply({"params": weights, **others}, inputs, mutable=list(others))
            return objective(outputs, wanted), changed

        (loss, changed), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
        changes, slots = optimizer.update(gradients, slots)
        return loss, optax.apply_updates(weights, changes), changed, slots

    def step() -> float:
        loss, *state[:] = update(*state, inputs, wanted)
        return float(loss)

    return Program(step, forever())


def entropy(logits: jax.Array, wanted: jax.Array) -> jax.Array:
    """Mean cross-entropy over all but the last axis."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()


def squares(outputs: jax.Array, wanted: jax.Array) -> jax.Array:
    return jnp.mean((outputs - wanted) ** 2)


class MLP(nn.Module):
    """Two hidden layers of 64."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(10)(x)


def mlp() -> Program:
    numbers = np.random.default_rng(0)
    return training(MLP(), entropy, numbers.normal(size=(32, 20)).astype(np.float32), numbers.integers(10, size=32))


class Unrolled(nn.Module):
    """An LSTM cell in a Python loop, which tracing unrolls."""

    @nn.compact
    def __call__(self, x):
        cell = nn.LSTMCell(64)
        state = jnp.zeros((16, 64)), jnp.zeros((16, 64))
        for time in range(20):
            state, hidden = cell(state, x[:, time])
        return nn.Dense(1)(hidden)


def lstm() -> Program:
    numbers = np.random.default_rng(0)
    x, y = (numbers.normal(size=size).astype(np.float32) for size in ((16, 20, 8), (16, 1)))
    return training(Unrolled(), squares, x, y)


class GPT(nn.Module):
    """Pre-norm blocks, attention to earlier tokens."""

    @nn.compact
    def __call__(self, text):
        x = nn.Embed(WORDS, HIDDEN)(text) + nn.Embed(LENGTH, HIDDEN)(jnp.arange(LENGTH))
        mask = nn.make_causal_mask(text)
        for _ in range(LAYERS):
            x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(HIDDEN)(nn.gelu(nn.Dense(4 * HIDDEN)(nn.LayerNorm()(x)), approximate=False))
        return nn.Dense(WORDS)(nn.LayerNorm()(x))


def gpt() -> Program:
    return training(GPT(), entropy, *tokens())


class ResNet(nn.Module):
    """Eight basic blocks."""

    @nn.compact
    def __call__(self, x):
        def normed(x, width, kernel, strides=1):
            x = nn.Conv(width, (kernel, kernel), strides, use_bias=False)(x)
            return nn.BatchNorm(use_running_average=False)(x)

        x = nn.relu(normed(x, WIDTHS[0], 3))
        for stage, width in enumerate(WIDTHS):
            for block in range(2):
                strides = 2 if stage and not block else 1
                shortcut = normed(x, width, 1, strides) if strides == 2 else x
                x = nn.relu(normed(nn.relu(normed(x, width, 3, strides)), width, 3) + shortcut)
        return nn.Dense(CLASSES)(x.mean((1, 2)))


def resnet() -> Program:
    return training(ResNet(), entropy, *images())


def while_loop() -> Program:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() < 100.0, lambda x: x + 0.25, x)

    return Program(step, forever(jnp.full((4,), 0.1)))


BUILDERS = {"keras-mlp": mlp, "lstm": lstm, "gpt": gpt, "resnet": resnet, "while-loop": while_loop}


def variants(case: str) -> dict[str, Callable[[], Program]]:
    """JAX's variants of a case."""
    return {"jax.jit": BUILDERS[case]}
