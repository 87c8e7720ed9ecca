"""YOLOv3, of Terra: detects at three scales, whose losses a Python loop adds up from parts."""

import math

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.batches import batches
from examples.programs.parts.digits import scenes

STRIDES = (8, 16, 32)
# Heights and widths in pixels of an image of 416, three for each stride: those of COCO.
ANCHORS = np.array(
    [[(13, 10), (30, 16), (23, 33)], [(61, 30), (45, 62), (119, 59)], [(90, 116), (198, 156), (326, 373)]], np.float32
)


class Convolution(keras.layers.Layer):
    """A convolution, normalised, and leaky."""

    def __init__(self, filters: int, kernel: int, strides: int = 1) -> None:
        super().__init__()
        self.convolution = keras.layers.Conv2D(filters, kernel, strides, padding="same", use_bias=False)
        self.norm = keras.layers.BatchNormalization()

    def call(self, x, training=False):
        return tf.nn.leaky_relu(self.norm(self.convolution(x), training=training), 0.1)


class Darknet(keras.layers.Layer):
    """Five halvings with shortcuts behind them; returns the last three feature maps."""

    def __init__(self, width: int, depths) -> None:
        super().__init__()
        self.stem = Convolution(width, 3)
        self.halvings, self.narrow, self.widen = [], [], []
        for stage, depth in enumerate(depths, start=1):
            self.halvings.append(Convolution(width * 2**stage, 3, 2))
            self.narrow.append([Convolution(width * 2 ** (stage - 1), 1) for _ in range(depth)])
            self.widen.append([Convolution(width * 2**stage, 3) for _ in range(depth)])

    def call(self, x, training=False):
        x = self.stem(x, training=training)
        maps = []
        for halve, *pairs in zip(self.halvings, self.narrow, self.widen, strict=True):
            x = halve(x, training=training)
            for narrow, widen in zip(*pairs, strict=True):
                x = x + widen(narrow(x, training=training), training=training)
            maps.append(x)
        return maps[-3:]


class YOLO(keras.Model):
    """Raw predictions `[batch, rows, columns, 3, 5 + classes]` of each scale, the finest first."""

    def __init__(self, width: int, depths, neck: int, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.darknet = Darknet(width, depths)
        self.necks = [
            [Convolution(width * 2 ** (scale + 2 + n % 2), 1 + 2 * (n % 2)) for n in range(neck)] for scale in range(3)
        ]
        self.last = [Convolution(width * 2 ** (scale + 3), 3) for scale in range(3)]
        self.heads = [keras.layers.Conv2D(3 * (5 + classes), 1) for _ in range(3)]
        self.laterals = [Convolution(width * 2 ** (scale + 2), 1) for scale in range(2)]

    def call(self, images, training=False):
        maps = self.darknet(images, training=training)
        outputs, x = [], None
        for scale in reversed(range(3)):
            here = maps[scale]
            if x is not None:
                up = self.laterals[scale](x, training=training)
                up = tf.image.resize(up, here.shape[1:3], method="nearest")
                here = tf.concat([up, here], -1)
            x = here
            for layer in self.necks[scale]:
                x = layer(x, training=training)
            raw = self.heads[scale](self.last[scale](x, training=training))
            outputs.insert(0, tf.reshape(raw, (*raw.shape[:3], 3, 5 + self.classes)))
        return outputs


def decode(raw, anchors: np.ndarray, stride: int):
    """The middles and sizes in pixels of what a scale predicts, how sure it is, and of which classes."""
    rows, columns = raw.shape[1:3]
    middle, size, sure, classes = tf.split(raw, (2, 2, 1, raw.shape[-1] - 5), -1)
    grid = tf.stack(tf.meshgrid(tf.range(rows), tf.range(columns), indexing="ij"), -1)
    grid = tf.cast(grid, tf.float32)[None, :, :, None]
    boxes = tf.concat([(tf.sigmoid(middle) + grid) * stride, tf.exp(size) * anchors], -1)
    return boxes, tf.sigmoid(sure), tf.sigmoid(classes)


def corners(boxes):
    return boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2


def overlap(boxes, others, generalized: bool):
    """Intersection over union of boxes as middles and sizes; generalized, with a penalty for the gap between them."""
    (low, high), (other_low, other_high) = corners(boxes), corners(others)
    common = tf.reduce_prod(tf.maximum(tf.minimum(high, other_high) - tf.maximum(low, other_low), 0.0), -1)
    union = tf.reduce_prod(boxes[..., 2:], -1) + tf.reduce_prod(others[..., 2:], -1) - common
    ratio = tf.math.divide_no_nan(common, union)
    if not generalized:
        return ratio
    around = tf.reduce_prod(tf.maximum(high, other_high) - tf.minimum(low, other_low), -1)
    return ratio - tf.math.divide_no_nan(around - union, around)


def losses_of_scale(raw, decoded, wanted, objects, size: int):
    """The loss of one scale for where its boxes are, how sure it is of them, and what they hold."""
    boxes, sure, _ = decoded
    there = wanted[..., 4:5]
    small = 2.0 - tf.reduce_prod(wanted[..., 2:4], -1, keepdims=True) / size**2
    place = there * small * (1.0 - overlap(boxes, wanted[..., :4], generalized=True)[..., None])
    best = tf.reduce_max(
        overlap(boxes[:, :, :, :, None], objects[:, None, None, None], generalized=False), -1, keepdims=True
    )
    absent = (1.0 - there) * tf.cast(best < 0.5, tf.float32)
    entropy = tf.nn.sigmoid_cross_entropy_with_logits(there, raw[..., 4:5])
    certainty = tf.square(there - sure) * (there + absent) * entropy
    kind = there * tf.nn.sigmoid_cross_entropy_with_logits(wanted[..., 5:], raw[..., 5:])
    return [tf.reduce_mean(tf.reduce_sum(part, (1, 2, 3, 4))) for part in (place, certainty, kind)]


def wanted_of_scales(boxes: np.ndarray, names: np.ndarray, size: int, classes: int, anchors: np.ndarray):
    """What each scale should predict for an image with these objects, and the objects as middles and sizes."""
    scales = [np.zeros((size // stride, size // stride, 3, 5 + classes), np.float32) for stride in STRIDES]
    objects = np.zeros((len(boxes), 4), np.float32)
    for number in np.flatnonzero(names >= 0):
        low, high = boxes[number, :2], boxes[number, 2:]
        middle, extent = (low + high) / 2, high - low
        objects[number] = *middle, *extent
        common = np.minimum(extent, anchors).prod(-1)
        scale, kind = divmod(int(np.argmax(common / (extent.prod() + anchors.prod(-1) - common))), 3)
        row, column = (middle // STRIDES[scale]).astype(int)
        smooth = np.full(classes, 0.01 / classes, np.float32)
        smooth[names[number]] += 0.99
        scales[scale][row, column, kind] = np.concatenate([objects[number], [1.0], smooth])
    return *scales, objects


@program(origin="Terra", data="generated scenes of scikit-learn's digits")
def yolov3(function, published=False):
    """A detector at three scales: loops over scales and parts of the loss, a cosine rate by Python's math, a log."""
    seed = 10
    keras.utils.set_random_seed(seed)
    if published:
        size, batch, width, depths, neck, classes, warmup, total = 416, 4, 32, (1, 2, 8, 8, 4), 5, 80, 1000, 50000
    else:
        size, batch, width, depths, neck, classes, warmup, total = 64, 4, 4, (0, 0, 0, 1, 0), 1, 10, 5, 100
    rng = np.random.default_rng(seed)
    anchors = ANCHORS * size / 416
    images, boxes, names = scenes(rng, 32, size, objects=4)
    wanted = [wanted_of_scales(*each, size, classes, anchors) for each in zip(boxes, names, strict=True)]
    data = batches(rng, batch, images, *map(np.stack, zip(*wanted, strict=True)))

    model = YOLO(width, depths, neck, classes)
    optimizer = keras.optimizers.Adam()
    steps = tf.Variable(0, dtype=tf.int64)
    log = []

    @function
    def train(images, *wanted):
        *scales, objects = wanted
        with tf.GradientTape() as tape:
            raws = model(images, training=True)
            parts = [0.0, 0.0, 0.0]
            for scale, (raw, stride) in enumerate(zip(raws, STRIDES, strict=True)):
                decoded = decode(raw, anchors[scale], stride)
                for part, loss in enumerate(losses_of_scale(raw, decoded, scales[scale], objects, size)):
                    parts[part] += loss
            total_loss = sum(parts)
        gradients = tape.gradient(total_loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        steps.assign_add(1)
        step = int(steps)
        if step < warmup:
            rate = step / warmup * 1e-3
        else:
            rate = 1e-6 + 0.5 * (1e-3 - 1e-6) * (1 + math.cos((step - warmup) / (total - warmup) * math.pi))
        optimizer.learning_rate.assign(rate)
        place, certainty, kind = map(float, parts)
        log.append({"step": step, "rate": rate, "place": place, "certainty": certainty, "kind": kind})
        return total_loss

    return Training(
        step=lambda: train(*next(data)),
        state=lambda: (model.variables, optimizer.variables, steps, log),
    )
