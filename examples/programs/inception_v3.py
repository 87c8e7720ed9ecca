"""Inception-v3, of JANUS: towers of convolutions side by side, a second head, and a rate that Python schedules."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.photographs import piece

LAYERS = keras.layers


class Conv(LAYERS.Layer):
    """Convolution, batch normalisation without a scale, ReLU."""

    def __init__(self, filters: int, size, strides: int = 1, padding: str = "same") -> None:
        super().__init__()
        self.convolution = LAYERS.Conv2D(filters, size, strides, padding, use_bias=False)
        self.norm = LAYERS.BatchNormalization(momentum=0.9997, epsilon=1e-3, scale=False)

    def call(self, x):
        return tf.nn.relu(self.norm(self.convolution(x)))  # Keras hands down whether this is training


class Tower(LAYERS.Layer):
    """Layers one after the other."""

    def __init__(self, *layers: LAYERS.Layer) -> None:
        super().__init__()
        self.layers = list(layers)

    def call(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Beside(LAYERS.Layer):
    """Towers over the same input, their outputs side by side."""

    def __init__(self, *towers: LAYERS.Layer) -> None:
        super().__init__()
        self.towers = list(towers)

    def call(self, x):
        return tf.concat([tower(x) for tower in self.towers], -1)


def average() -> LAYERS.Layer:
    return LAYERS.AveragePooling2D(3, 1, "same")


class InceptionV3(keras.Model):
    """The network of "Rethinking the Inception Architecture": 94 convolutions. `width` scales all of their filters."""

    def __init__(self, classes: int, width: float, seed: int) -> None:
        super().__init__()

        def conv(filters, *rest, **options):
            return Conv(max(4, int(filters * width)), *rest, **options)

        self.stem = Tower(
            conv(32, 3, 2, "valid"), conv(32, 3, padding="valid"), conv(64, 3), LAYERS.MaxPooling2D(3, 2),
            conv(80, 1), conv(192, 3, padding="valid"), LAYERS.MaxPooling2D(3, 2),
        )  # fmt: skip
        # 35x35: sizes one, five and twice three.
        self.blocks = [
            Beside(
                conv(64, 1), Tower(conv(48, 1), conv(64, 5)), Tower(conv(64, 1), conv(96, 3), conv(96, 3)),
                Tower(average(), conv(pooled, 1)),
            )
            for pooled in (32, 64, 64)
        ]  # fmt: skip
        self.blocks.append(
            Beside(
                conv(384, 3, 2, "valid"), Tower(conv(64, 1), conv(96, 3), conv(96, 3, 2, "valid")),
                LAYERS.MaxPooling2D(3, 2),
            )
        )  # fmt: skip
        # 17x17: size seven, as rows and columns.
        self.blocks += [
            Beside(
                conv(192, 1),
                Tower(conv(n, 1), conv(n, (1, 7)), conv(192, (7, 1))),
                Tower(conv(n, 1), conv(n, (7, 1)), conv(n, (1, 7)), conv(n, (7, 1)), conv(192, (1, 7))),
                Tower(average(), conv(192, 1)),
            )
            for n in (128, 160, 160, 192)
        ]
        self.second = Tower(
            LAYERS.AveragePooling2D(5, 3, "same"), conv(128, 1), conv(768, 5),
            LAYERS.GlobalAveragePooling2D(), LAYERS.Dense(classes),
        )  # fmt: skip
        # 8x8: towers that fork again.
        seven = (conv(192, 1), conv(192, (1, 7)), conv(192, (7, 1)), conv(192, 3, 2, "valid"))
        self.late = [
            Beside(Tower(conv(192, 1), conv(320, 3, 2, "valid")), Tower(*seven), LAYERS.MaxPooling2D(3, 2)),
            *(
                Beside(
                    conv(320, 1),
                    Tower(conv(384, 1), Beside(conv(384, (1, 3)), conv(384, (3, 1)))),
                    Tower(conv(448, 1), conv(384, 3), Beside(conv(384, (1, 3)), conv(384, (3, 1)))),
                    Tower(average(), conv(192, 1)),
                )
                for _ in range(2)
            ),
        ]
        self.pool = LAYERS.GlobalAveragePooling2D()
        self.dropout = LAYERS.Dropout(0.2, seed=seed)
        self.classes = LAYERS.Dense(classes)

    def call(self, x, training=False):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        second = self.second(x) if training else None
        for block in self.late:
            x = block(x)
        return self.classes(self.dropout(self.pool(x))), second


@program(origin="JANUS", data="pieces of scikit-learn's photographs", rtol=1e-4, atol=1e-6)
def inception_v3(function, published=False):
    """Inception-v3 with its second head. Normalisation changes moving averages as it goes, towers are Python lists, and
    Python counts the steps and changes the learning rate every few of them.
    """
    seed = 11
    keras.utils.set_random_seed(seed)
    size, batch, width, classes = (299, 32, 1.0, 1000) if published else (107, 2, 1 / 16, 2)

    rng = np.random.default_rng(seed)
    # Rounding decides whether a ReLU is open, and with few pixels to a batch one ReLU matters to all layers behind it.
    # A rate that suits the small batch and a precision without such accidents make two runs comparable.
    rate, precision = (0.045, "float32") if published else (1e-4, "float64")
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    model = InceptionV3(classes, width, seed)
    keras.config.set_dtype_policy(before)
    objective = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1, dtype=precision)
    optimizer = keras.optimizers.RMSprop(rate, rho=0.9, epsilon=1.0)
    log = {"steps": 0, "best": float("inf")}

    @function
    def train(images, labels):
        with tf.GradientTape() as tape:
            first, second = model(images, training=True)
            truth = tf.one_hot(labels, classes, dtype=precision)
            loss = objective(truth, first) + 0.4 * objective(truth, second)
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 2.0)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        log["steps"] += 1
        log["best"] = min(log["best"], float(loss))
        if log["steps"] % 5 == 0:
            optimizer.learning_rate = float(optimizer.learning_rate) * 0.94
        return loss

    def step():
        images, labels = zip(*(piece(rng, size) for _ in range(batch)), strict=True)
        return train(tf.constant(np.stack(images) * 2 - 1, precision), tf.constant(labels))

    return Training(step, state=lambda: (model.variables, optimizer.variables, log))
