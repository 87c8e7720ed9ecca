"""DropBlock, of Terra: a residual network whose regions are dropped with a probability that its layers keep."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.batches import batches
from examples.programs.parts.digits import digits
from examples.programs.parts.residual import ResNet


class DropBlock(keras.layers.Layer):
    """Drops squares of a feature map. `keep` is a plain Python number, which whoever trains moves between steps."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block
        self.keep = 1.0

    def call(self, x, training=False):
        if not training or self.keep == 1.0:
            return x
        _, height, width, _ = x.shape
        block = min(self.block, height, width)
        places = (height - block + 1) * (width - block + 1)
        rate = (1.0 - self.keep) * height * width / (block**2 * places)

        batch, channels = x.shape[0], x.shape[3]
        drawn = tf.random.uniform((batch, height - block + 1, width - block + 1, channels))
        seeds = tf.cast(drawn < rate, x.dtype)
        before, after = (block - 1) // 2, block // 2
        seeds = tf.pad(seeds, [[0, 0], [before, after], [before, after], [0, 0]])
        mask = 1.0 - tf.nn.max_pool2d(seeds, block, 1, "SAME")
        # The rest is made larger, by as much as there is less of it.
        return x * mask * (tf.size(mask, tf.float32) / tf.maximum(tf.reduce_sum(mask), 1.0))


class DropBlockResNet(ResNet):
    """Drops after each block of its last two stages."""

    def __init__(self, stages, width, classes, small_images, block):
        super().__init__(stages, width, classes, small_images)
        first = sum(stages[:-2])
        self.drops = {str(number): DropBlock(block) for number in range(first, sum(stages))}

    def after_block(self, number, x, training):
        drop = self.drops.get(str(number))
        return x if drop is None else drop(x, training=training)


class Schedule:
    """Lowers the share that is kept from 1 to its end, by setting it on the layers."""

    def __init__(self, layers, end: float, total: int) -> None:
        self.layers, self.end, self.total = list(layers), end, total
        self.step = 0

    def advance(self) -> None:
        self.step += 1
        keep = 1.0 - (1.0 - self.end) * min(1.0, self.step / self.total)
        for layer in self.layers:
            layer.keep = keep


@program(origin="Terra", data="scikit-learn's digits, enlarged", rtol=1e-3, atol=2e-3)
def dropblock(function, published=False):
    """A ResNet with DropBlock: the share to keep is an attribute of layers, another number in every step."""
    seed = 2
    keras.utils.set_random_seed(seed)
    if published:
        size, batch, stages, width, classes, block = 224, 32, (3, 4, 6, 3), 64, 1000, 7
    else:
        size, batch, stages, width, classes, block = 16, 16, (1, 1, 1), 8, 10, 3
    images, labels = digits(size, channels=3)
    data = batches(np.random.default_rng(seed), batch, images, labels)

    model = DropBlockResNet(stages, width, classes, small_images=not published, block=block)
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1 if published else 0.002, momentum=0.9, nesterov=True)
    schedule = Schedule(model.drops.values(), end=0.9, total=20)

    @function
    def train(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = objective(labels, logits)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def step():
        schedule.advance()
        return train(*next(data))

    def state():
        return model.variables, optimizer.variables, [layer.keep for layer in schedule.layers]

    return Training(step, state)
