"""SDPoint, of Terra: every step shrinks the feature map behind a block, and by a ratio, that Python draws."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.batches import batches
from examples.programs.parts.digits import digits
from examples.programs.parts.residual import ResNet


def averages(size: int, smaller: int) -> np.ndarray:
    """The matrix that averages `size` numbers over `smaller` windows, which may share their borders."""
    matrix = np.zeros((smaller, size), np.float32)
    for row in range(smaller):
        first, last = row * size // smaller, -(-(row + 1) * size // smaller)
        matrix[row, first:last] = 1.0 / (last - first)
    return matrix


class SDPointResNet(ResNet):
    """A ResNet with a point, `(block, ratio)` or None, at which its feature map becomes smaller."""

    point = None
    RATIOS = (0.5, 0.75)

    def draw(self, rng: np.random.Generator) -> None:
        """Draws the point of the next step; none of them is as likely as each of them."""
        choices = [(block, ratio) for block in range(len(self.blocks)) for ratio in self.RATIOS]
        chosen = int(rng.integers(len(choices) + 1))
        self.point = choices[chosen] if chosen < len(choices) else None

    def after_block(self, number, x, training):
        if not training or self.point is None or self.point[0] != number:
            return x
        _, height, width, _ = x.shape
        rows, columns = (averages(size, max(1, round(size * self.point[1]))) for size in (height, width))
        return tf.einsum("rh,bhwc,sw->brsc", rows, x, columns)


@program(origin="Terra", data="scikit-learn's digits, enlarged", rtol=1e-3, atol=2e-3)
def sdpoint(function, published=False):
    """A ResNet with stochastic downsampling: the point is drawn anew in the step, and shapes behind it depend on it."""
    seed = 3
    keras.utils.set_random_seed(seed)
    if published:
        size, batch, stages, width, classes = 224, 32, (3, 4, 6, 3), 64, 1000
    else:
        size, batch, stages, width, classes = 16, 16, (1, 1, 1), 8, 10
    images, labels = digits(size, channels=3)
    rng = np.random.default_rng(seed)
    data = batches(rng, batch, images, labels)

    model = SDPointResNet(stages, width, classes, small_images=not published)
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1 if published else 0.002, momentum=0.9, nesterov=True)
    points = []

    @function
    def train(images, labels):
        model.draw(rng)
        points.append(model.point)
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = objective(labels, logits)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return Training(
        step=lambda: train(*next(data)),
        state=lambda: (model.variables, optimizer.variables, points),
    )
