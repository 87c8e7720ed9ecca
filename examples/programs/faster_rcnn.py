"""Faster R-CNN, of Terra: NumPy chooses regions in the middle of the step, from what the network has said so far."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.batches import batches
from examples.programs.parts.digits import scenes
from examples.programs.parts.residual import ResNet

SPREAD = np.array([0.1, 0.1, 0.2, 0.2], np.float32)  # of a region's corrections


def anchors(size: int, stride: int, scales, ratios) -> np.ndarray:
    """Boxes `float32[places * scales * ratios, 4]` of each scale and ratio around the middle of each place."""
    middles = (np.arange(size // stride) + 0.5) * stride
    y, x, scale, ratio = np.meshgrid(middles, middles, scales, ratios, indexing="ij")
    height, width = scale * np.sqrt(ratio), scale / np.sqrt(ratio)
    boxes = np.stack([y - height / 2, x - width / 2, y + height / 2, x + width / 2], -1)
    return boxes.reshape(-1, 4).astype(np.float32)


def overlaps(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Intersection over union of each box with each other one."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    common = np.prod(np.maximum(high - low, 0.0), -1)
    areas, other_areas = (np.prod(each[:, 2:] - each[:, :2], -1) for each in (boxes, others))
    return common / np.maximum(areas[:, None] + other_areas[None] - common, 1e-6)


def encode(boxes: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """How each box must be moved and scaled to become its target."""
    sizes, wanted = boxes[:, 2:] - boxes[:, :2], targets[:, 2:] - targets[:, :2]
    moved = (targets[:, :2] + wanted / 2 - boxes[:, :2] - sizes / 2) / sizes
    return np.concatenate([moved, np.log(wanted / sizes)], -1) / SPREAD


def decode(boxes: np.ndarray, deltas: np.ndarray, size: int) -> np.ndarray:
    """The boxes moved and scaled, inside of the image."""
    deltas = deltas * SPREAD
    sizes = boxes[:, 2:] - boxes[:, :2]
    middles = boxes[:, :2] + sizes / 2 + deltas[:, :2] * sizes
    sizes = sizes * np.exp(np.minimum(deltas[:, 2:], 4.0))
    return np.clip(np.concatenate([middles - sizes / 2, middles + sizes / 2], -1), 0.0, size)


def suppress(boxes: np.ndarray, scores: np.ndarray, threshold: float, most: int) -> np.ndarray:
    """Which boxes remain, best first, when each removes those that overlap it; only the first are looked at."""
    order, kept = np.argsort(-scores, kind="stable")[: 6 * most], []
    while len(order) and len(kept) < most:
        best, order = order[0], order[1:]
        kept.append(best)
        order = order[overlaps(boxes[best : best + 1], boxes[order])[0] <= threshold]
    return np.array(kept)


def sample(rng: np.random.Generator, labels: np.ndarray, count: int, share: float) -> np.ndarray:
    """Indices of at most `count` rows, of which at most that share has a label above 0; rows of -1 are left out."""
    positive, negative = np.flatnonzero(labels > 0), np.flatnonzero(labels == 0)
    positive = rng.permutation(positive)[: int(count * share)]
    return np.sort(np.concatenate([positive, rng.permutation(negative)[: count - len(positive)]]))


def align(features, boxes: np.ndarray, owners: np.ndarray, cells: int):
    """The features in each box as a grid of cells, each read between its four nearest places.

    By multiplication, as on a TPU: the gradient of `tf.image.crop_and_resize` adds up in an order that changes.
    """
    sides = []
    for axis in (0, 1):
        length, low, high = features.shape[1 + axis], boxes[:, axis : axis + 1], boxes[:, axis + 2 : axis + 3]
        read = low + (high - low) * (np.arange(cells) + 0.5) / cells - 0.5
        near = 1.0 - np.abs(np.clip(read, 0, length - 1)[:, :, None] - np.arange(length))
        sides.append(np.maximum(near, 0.0).astype(np.float32))
    return tf.einsum("rih,rhwc,rjw->rijc", sides[0], tf.gather(features, owners), sides[1])


def smooth_l1(difference):
    size = tf.abs(difference)
    return tf.reduce_sum(tf.where(size < 1.0, 0.5 * tf.square(difference), size - 0.5), -1)


class Detector(keras.Model):
    """A ResNet's features, a network that proposes regions on them, and one that names and corrects regions."""

    def __init__(self, stages, width: int, hidden: int, kinds: int, classes: int, small_images: bool) -> None:
        super().__init__()
        self.classes = classes
        self.backbone = ResNet(stages, width, 1, small_images)
        self.shared = keras.layers.Conv2D(hidden, 3, padding="same", activation="relu")
        self.scores, self.deltas = keras.layers.Conv2D(kinds, 1), keras.layers.Conv2D(4 * kinds, 1)
        self.inner = [keras.layers.Dense(2 * hidden, "relu") for _ in range(2)]
        self.names, self.corrections = keras.layers.Dense(classes + 1), keras.layers.Dense(4 * (classes + 1))

    def propose(self, images):
        features = self.backbone.features(images)  # its normalisation is frozen: few images are in a batch
        x = self.shared(features)
        batch = images.shape[0]
        return features, tf.reshape(self.scores(x), (batch, -1)), tf.reshape(self.deltas(x), (batch, -1, 4))

    def judge(self, features, boxes, owners, size):
        """Of regions of the images that own them: the logits of their classes, and their corrections for each class."""
        pooled = align(features, boxes * (features.shape[1] / size), owners, 7)
        x = tf.reshape(pooled, (pooled.shape[0], -1))
        for layer in self.inner:
            x = layer(x)
        return self.names(x), tf.reshape(self.corrections(x), (-1, self.classes + 1, 4))


@program(origin="Terra", data="generated scenes of scikit-learn's digits", rtol=1e-3, atol=2e-3)
def faster_rcnn(function, published=False):
    """Faster R-CNN: proposals become NumPy arrays, are suppressed and sampled there, and go back for a second loss."""
    seed = 5
    keras.utils.set_random_seed(seed)
    if published:
        size, batch, stages, width, hidden, classes = 1024, 2, (3, 4, 6), 64, 512, 80
        stride, scales, best, regions = 16, (128, 256, 512), 2000, 128
    else:
        size, batch, stages, width, hidden, classes = 64, 2, (1, 1, 1, 1), 8, 32, 10
        stride, scales, best, regions = 8, (8, 16, 24), 50, 32
    ratios = (0.5, 1.0, 2.0)
    rng = np.random.default_rng(seed)
    data = batches(rng, batch, *scenes(rng, 32, size, objects=4))

    model = Detector(stages, width, hidden, len(scales) * len(ratios), classes, small_images=not published)
    optimizer = keras.optimizers.SGD(0.01 if published else 0.002, momentum=0.9)
    grid = anchors(size, stride, scales, ratios)
    inside = np.all((grid >= 0) & (grid <= size), -1)
    log = []

    def wanted_of_anchors(boxes):
        """Of one image's anchors: 1, 0 or -1 where they do not count, and how to correct them."""
        shared = overlaps(grid, boxes)
        nearest = shared.argmax(1)
        labels = np.where(shared.max(1) < 0.3, 0, np.where(shared.max(1) >= 0.7, 1, -1))
        labels[(shared == shared[inside].max(0)).any(1)] = 1  # each object's best anchor, however bad
        labels[~inside] = -1
        chosen = sample(rng, labels, 256 if published else 64, 0.5)
        weights = np.zeros(len(grid), np.float32)
        weights[chosen] = 1.0
        return labels == 1, weights, encode(grid, boxes[nearest])

    def wanted_of_regions(proposals, boxes, classes):
        """Some of one image's proposals, its objects among them: the boxes, their classes, 0 for none, corrections."""
        candidates = np.concatenate([proposals, boxes])
        shared = overlaps(candidates, boxes)
        labels = np.where(shared.max(1) >= 0.5, classes[shared.argmax(1)] + 1, 0)
        chosen = sample(rng, labels, regions, 0.25)
        return candidates[chosen], labels[chosen], encode(candidates[chosen], boxes[shared.argmax(1)[chosen]])

    @function
    def train(images, boxes, classes):
        real = [classes.numpy()[image] >= 0 for image in range(batch)]
        boxes = [boxes.numpy()[image][real[image]] for image in range(batch)]
        classes = [classes.numpy()[image][real[image]] for image in range(batch)]
        positive, weights, targets = map(np.stack, zip(*map(wanted_of_anchors, boxes), strict=True))

        with tf.GradientTape() as tape:
            features, scores, deltas = model.propose(images)
            objectness = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(positive, tf.float32), scores)
            proposal_loss = tf.reduce_sum(objectness * weights) / np.sum(weights)
            proposal_loss += tf.reduce_sum(smooth_l1(deltas - targets) * weights * positive) / np.sum(weights)

            chosen = []
            for image in range(batch):
                moved = decode(grid, deltas[image].numpy(), size)
                large = np.flatnonzero(np.min(moved[:, 2:] - moved[:, :2], -1) >= 2.0)
                kept = suppress(moved[large], scores[image].numpy()[large], 0.7, best)
                chosen.append(wanted_of_regions(moved[large][kept], boxes[image], classes[image]))
            regions, labels, corrections = (np.concatenate(each) for each in zip(*chosen, strict=True))
            owners = np.repeat(np.arange(batch), [len(each[0]) for each in chosen]).astype(np.int32)

            logits, moves = model.judge(features, regions, owners, size)
            region_loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            found = np.flatnonzero(labels > 0)
            if len(found):
                moves = tf.gather_nd(moves, np.stack([found, labels[found]], -1))
                region_loss += tf.reduce_sum(smooth_l1(moves - corrections[found])) / len(labels)
            loss = proposal_loss + region_loss
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            (gradient, variable)
            for gradient, variable in zip(gradients, model.trainable_variables, strict=True)
            if gradient is not None  # the backbone's classifier takes no part
        )
        log.append((len(regions), len(found), float(np.mean(logits.numpy().argmax(-1) == labels))))
        return proposal_loss, region_loss

    return Training(
        step=lambda: train(*next(data)),
        state=lambda: (model.variables, optimizer.variables, log),
    )
