"""SkipNet, of Cocktailer: a gate before every layer looks at the image, and Python computes the layer or not."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.batches import batches
from examples.programs.parts.digits import digits


class Residual(keras.layers.Layer):
    """What a block adds: two convolutions, normalised for each image, as images go through one by one."""

    def __init__(self, filters: int) -> None:
        super().__init__()
        self.convolutions = [keras.layers.Conv2D(filters, 3, padding="same", activation="relu") for _ in range(2)]
        self.norm = keras.layers.GroupNormalization(2)

    def call(self, x):
        return self.convolutions[1](self.convolutions[0](self.norm(x)))


class SkipNet(keras.Model):
    """Residual blocks, each behind a gate; the gates are one LSTM that goes along the layers."""

    def __init__(self, blocks: int, filters: int, units: int, classes: int) -> None:
        super().__init__()
        self.stem = keras.layers.Conv2D(filters, 3, 2, "same", activation="relu")
        self.blocks = [Residual(filters) for _ in range(blocks)]
        self.looks = [keras.layers.Dense(units) for _ in range(blocks)]
        self.memory = keras.layers.LSTMCell(units)
        self.gate = keras.layers.Dense(1, bias_initializer="ones")  # open, at first
        self.head = keras.layers.Dense(classes)
        self.units = units
        for layer in self.blocks:
            layer(tf.zeros((1, 8, 8, filters)))  # a block that is skipped at first has variables nevertheless

    def classify(self, image: tf.Tensor, taken: list[int]) -> tuple[tf.Tensor, tf.Tensor]:
        """Scores for one image and the mean of its gates; appends the blocks that it went through."""
        x = self.stem(image)
        state, gates = [tf.zeros((1, self.units))] * 2, []
        for number, (block, look) in enumerate(zip(self.blocks, self.looks, strict=True)):
            output, state = self.memory(look(tf.reduce_mean(x, (1, 2))), state)
            gate = tf.sigmoid(self.gate(output))
            gates.append(gate)
            if gate > 0.5:
                # One forward, the gate backward: the straight-through estimate teaches the gate as well.
                x = x + block(x) * (1.0 + gate - tf.stop_gradient(gate))[..., None, None]
                taken.append(number)
        return self.head(tf.reduce_mean(x, (1, 2))), tf.reduce_mean(tf.concat(gates, 1))


@program(origin="Cocktailer", data="scikit-learn's digits, enlarged to 16x16", rtol=1e-3, atol=1e-4)
def skipnet(function, published=False):
    """A residual network with a gate at each block. Every image of a step takes a way of its own, by `if`s on tensors
    in the loop over the blocks, and Python notes which blocks it went through.
    """
    seed = 16
    keras.utils.set_random_seed(seed)
    blocks, filters, units, size, batch = (54, 64, 10, 32, 64) if published else (4, 8, 10, 16, 2)

    images, labels = digits(size)
    data = batches(np.random.default_rng(seed), batch, images, labels)
    model = SkipNet(blocks, filters, units, 10)
    optimizer = keras.optimizers.Adam(5e-3)
    ways: list[tuple[int, ...]] = []

    @function
    def train(images, labels):
        losses, costs = [], []
        with tf.GradientTape() as tape:
            for number in range(batch):
                taken: list[int] = []
                logits, cost = model.classify(images[number : number + 1], taken)
                losses.append(tf.nn.sparse_softmax_cross_entropy_with_logits(labels[number : number + 1], logits))
                costs.append(cost * len(taken) / blocks)  # who computes much pays more for open gates
                ways.append(tuple(taken))
            loss = tf.reduce_mean(losses) + tf.reduce_mean(costs)
        variables = model.trainable_variables
        pairs = zip(tape.gradient(loss, variables), variables, strict=True)
        optimizer.build(variables)
        # A block that no image went through has no gradient, and stays as it is.
        optimizer.apply_gradients([(gradient, variable) for gradient, variable in pairs if gradient is not None])
        return loss

    return Training(step=lambda: train(*next(data)), state=lambda: (model.variables, optimizer.variables, ways))
