"""BlockDrop, of Cocktailer: a small network looks at each image and chooses which blocks of a large one it needs."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.batches import batches
from examples.programs.parts.digits import digits

WIDTHS = (16, 32, 64)  # of the three stages


class Residual(keras.layers.Layer):
    """Two convolutions, without the shortcut: who calls decides what to add them to."""

    def __init__(self, filters: int, strides: int) -> None:
        super().__init__()
        self.convolutions = [
            keras.layers.Conv2D(filters, 3, stride, "same", use_bias=False, kernel_initializer="he_normal")
            for stride in (strides, 1)
        ]
        self.norms = [keras.layers.BatchNormalization(momentum=0.9) for _ in range(2)]

    def call(self, x):
        x = tf.nn.relu(self.norms[0](self.convolutions[0](x)))
        return self.norms[1](self.convolutions[1](x))


class ResNet(keras.Model):
    """A residual network for small images, any block of which can be left out of it."""

    def __init__(self, stages: tuple[int, ...], narrower: int, outputs: int) -> None:
        super().__init__()
        widths = [width // narrower for width in WIDTHS]
        self.stem = keras.layers.Conv2D(widths[0], 3, padding="same", use_bias=False)
        self.norm = keras.layers.BatchNormalization(momentum=0.9)
        self.widths = [width for width, blocks in zip(widths, stages, strict=True) for _ in range(blocks)]
        before = [widths[0], *self.widths]
        self.blocks = [
            Residual(width, 2 if width != last else 1) for last, width in zip(before, self.widths, strict=False)
        ]
        self.head = keras.layers.Dense(outputs)
        self(tf.zeros((1, 8, 8, 3)))  # Keras builds a model by a call without values, which no policy survives

    def call(self, x, policy=None, training=False):
        """With a policy, a tensor of ones and zeros for images and blocks, blocks that no image wants do not run."""
        wanted = None if policy is None else policy.numpy()
        x = tf.nn.relu(self.norm(self.stem(x)))
        for number, (block, width) in enumerate(zip(self.blocks, self.widths, strict=True)):
            shortcut = x
            if width != x.shape[-1]:  # half the size, and zeros for the new filters
                shortcut = tf.nn.avg_pool2d(x, 2, 2, "SAME")
                shortcut = tf.pad(shortcut, [[0, 0], [0, 0], [0, 0], [0, width - x.shape[-1]]])
            if wanted is None:
                x = tf.nn.relu(shortcut + block(x))
            elif not wanted[:, number].any():
                x = shortcut
            else:
                mask = tf.reshape(policy[:, number], (-1, 1, 1, 1))
                x = tf.nn.relu(shortcut + block(x)) * mask + shortcut * (1.0 - mask)
        return self.head(tf.reduce_mean(x, (1, 2)))


@program(origin="Cocktailer", data="scikit-learn's digits, enlarged to 16x16", rtol=1e-2, atol=1e-3)
def blockdrop(function, published=False):
    """A policy network says for every image which residual blocks to use, NumPy draws, and Python skips the blocks that
    no image of the batch wants: the step's operations depend on the policy. The policy learns by reinforcement.
    """
    seed = 15
    keras.utils.set_random_seed(seed)
    stages, narrower, size, batch = ((18, 18, 18), 1, 32, 256) if published else ((2, 2, 2), 2, 16, 4)
    penalty, entropy_weight = -5.0, 0.1

    images, labels = digits(size, channels=3)
    rng = np.random.default_rng(seed)
    data = batches(rng, batch, images, labels)
    network, agent = ResNet(stages, narrower, 10), ResNet((1, 1, 1), narrower, sum(stages))
    optimizer = keras.optimizers.Adam(1e-3)
    log: list[dict[str, float]] = []

    def reward(policy, logits, labels):
        """The fewer blocks, the better, but only for images that are still seen rightly."""
        used = policy.mean(1)
        return np.where(logits.numpy().argmax(1) == labels.numpy(), 1.0 - used**2, penalty).astype(np.float32)

    @function
    def train(images, labels):
        with tf.GradientTape() as tape:
            chances = tf.sigmoid(agent(images, training=True)) * 0.8 + 0.1
            sample = (rng.random(chances.shape) < chances.numpy()).astype(np.float32)
            greedy = (chances.numpy() > 0.5).astype(np.float32)
            with tape.stop_recording():
                baseline = reward(greedy, network(images, tf.constant(greedy)), labels)
            logits = network(images, tf.constant(sample), training=True)
            advantage = reward(sample, logits, labels) - baseline

            taken = sample * chances + (1.0 - sample) * (1.0 - chances)
            entropy = -tf.reduce_mean(chances * tf.math.log(chances) + (1 - chances) * tf.math.log(1 - chances))
            policy_loss = -tf.reduce_mean(tf.math.log(taken) * advantage[:, None])
            class_loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            loss = policy_loss + class_loss - entropy_weight * entropy
        variables = [*agent.trainable_variables, *network.trainable_variables]
        pairs = zip(tape.gradient(loss, variables), variables, strict=True)
        optimizer.build(variables)
        # Blocks that were left out have no gradient, and stay as they are.
        optimizer.apply_gradients([(gradient, variable) for gradient, variable in pairs if gradient is not None])
        log.append({"loss": float(loss), "blocks": float(sample.sum(1).mean()), "advantage": float(advantage.mean())})
        return loss

    return Training(
        step=lambda: train(*next(data)),
        state=lambda: (network.variables, agent.variables, optimizer.variables, log),
    )
