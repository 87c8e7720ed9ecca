"""A detector of squares: boxes are decoded, pruned and scored by NumPy inside of the training step.

python -m examples.training.detector
"""

import keras
import numpy as np
import tensorflow as tf

import coexec

SIZE, CELLS, ROWS = 24, 4, 16
CELL = SIZE // CELLS


def pictures(numbers: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Noise with one bright square each, and the squares: x, y and width."""
    images = numbers.uniform(0, 0.3, (ROWS, SIZE, SIZE, 1)).astype("float32")
    boxes = np.stack([*numbers.integers(0, SIZE - 9, (2, ROWS)), numbers.integers(5, 9, ROWS)], axis=1)
    for image, (x, y, width) in zip(images, boxes, strict=True):
        image[y : y + width, x : x + width] += 0.7
    return images, boxes.astype("float32")


def overlap(one: np.ndarray, other: np.ndarray) -> float:
    """Intersection over union of two squares."""
    low, high = np.maximum(one[:2], other[:2]), np.minimum(one[:2] + one[2], other[:2] + other[2])
    common = np.prod(np.maximum(high - low, 0))
    return float(common / (one[2] ** 2 + other[2] ** 2 - common))


def detections(grid: np.ndarray) -> list[np.ndarray]:
    """The boxes of one picture, best first, without those that overlap a better one."""
    kept: list[np.ndarray] = []
    order = np.argsort(-grid[..., 0], axis=None)
    for y, x in zip(*np.unravel_index(order[:6], (CELLS, CELLS)), strict=True):
        _, dx, dy, width = grid[y, x]
        box = np.array([CELL * (x + dx), CELL * (y + dy), max(SIZE * width, 1.0)])
        if all(overlap(box, better) < 0.3 for better in kept):
            kept.append(box)
    return kept


class Detector:
    """A small convolutional network, one box for each cell of a grid."""

    def __init__(self) -> None:
        layers = keras.layers
        self.model = keras.Sequential(
            [keras.Input((SIZE, SIZE, 1)), layers.Conv2D(16, 3, 2, "same", activation="relu"),
             layers.Conv2D(16, 3, 3, "same", activation="relu"), layers.Conv2D(4, 3, 1, "same")]
        )  # fmt: skip
        self.optimizer = keras.optimizers.Adam(0.005)
        self.found: list[float] = []

    @coexec.function
    def step(self, images: tf.Tensor, boxes: tf.Tensor) -> float:
        """Learns; where the boxes that it found are poor, places count twice. Returns the loss."""
        truth = boxes.numpy()
        target = np.zeros((ROWS, CELLS, CELLS, 4), np.float32)
        for row, (x, y, width) in enumerate(truth):
            cell = int(y // CELL), int(x // CELL)
            target[(row, *cell)] = 1, x / CELL - cell[1], y / CELL - cell[0], width / SIZE
        with tf.GradientTape() as tape:
            grid = self.model(images, training=True)
            there = tf.constant(target[..., :1])
            seen = tf.nn.sigmoid_cross_entropy_with_logits(there, grid[..., :1])
            places = there * tf.square(grid[..., 1:] - tf.constant(target[..., 1:]))
            best = [detections(g)[0] for g in grid.numpy()]
            self.found.append(float(np.mean([overlap(b, t) for b, t in zip(best, truth, strict=True)])))
            weight = 2.0 if self.found[-1] < 0.5 else 1.0
            loss = tf.reduce_mean(seen) + weight * tf.reduce_sum(places) / ROWS
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return float(loss)


def train(steps: int) -> list[float]:
    """Trains and returns the loss of each step."""
    keras.utils.set_random_seed(0)
    numbers, detector = np.random.default_rng(0), Detector()
    return [detector.step(*map(tf.constant, pictures(numbers))) for _ in range(steps)]


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in train(200)))
