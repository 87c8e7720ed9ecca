"""Convolutions and capsules, with the losses that papers write by hand."""

import functools

import keras
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example

layers = keras.layers


def double_conv(x, filters):
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", kernel_initializer="he_normal")(x)
        x = layers.BatchNormalization()(x)
        x = layers.Activation("relu")(x)
    return x


def build_unet(size=16, filters=(4, 8)):
    inputs = keras.Input((size, size, 1))
    skips, x = [], inputs
    for f in filters:
        x = double_conv(x, f)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = double_conv(x, 2 * filters[-1])
    for f, skip in zip(reversed(filters), reversed(skips)):
        x = layers.Conv2DTranspose(f, 2, strides=2, padding="same")(x)
        x = layers.Concatenate()([x, skip])
        x = double_conv(x, f)
    return keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))


@example(rtol=1e-2, atol=1e-3)
def unet_segmentation():
    """A U-Net with dice and focal losses by hand; intersection over union by a Keras metric."""
    rng = np.random.default_rng(0)
    model = build_unet()
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(1e-3, 20, 0.9))
    iou = keras.metrics.BinaryIoU(target_class_ids=[1], threshold=0.5)
    arguments = [
        (
            tf.constant(rng.normal(size=(4, 16, 16, 1)), tf.float32),
            tf.constant(rng.integers(0, 2, (4, 16, 16, 1)), tf.float32),
        )
        for _ in range(3)
    ]

    def dice_loss(y_true, y_pred, smooth=1.0):
        y_true_f = tf.reshape(y_true, [-1])
        y_pred_f = tf.reshape(y_pred, [-1])
        intersection = tf.reduce_sum(y_true_f * y_pred_f)
        return 1 - (2.0 * intersection + smooth) / (tf.reduce_sum(y_true_f) + tf.reduce_sum(y_pred_f) + smooth)

    def focal_loss(y_true, y_pred, gamma=2.0, alpha=0.25):
        y_pred = tf.clip_by_value(y_pred, keras.backend.epsilon(), 1.0 - keras.backend.epsilon())
        p_t = tf.where(tf.equal(y_true, 1), y_pred, 1 - y_pred)
        weight = tf.where(tf.equal(y_true, 1), alpha * tf.ones_like(y_true), (1 - alpha) * tf.ones_like(y_true))
        return tf.reduce_mean(-weight * tf.pow(1 - p_t, gamma) * tf.math.log(p_t))

    def step(images, masks):
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = dice_loss(masks, predictions) + focal_loss(masks, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        iou.update_state(masks, predictions)
        return {"loss": float(loss), "iou": float(iou.result())}

    return Example(step, lambda: (model.variables, optimizer.iterations), arguments)


def squash(vectors, axis=-1):
    s_squared_norm = tf.reduce_sum(tf.square(vectors), axis, keepdims=True)
    scale = s_squared_norm / (1 + s_squared_norm) / tf.sqrt(s_squared_norm + keras.backend.epsilon())
    return scale * vectors


class CapsuleLayer(layers.Layer):
    def __init__(self, num_capsule, dim_capsule, routings=3, **kwargs):
        super().__init__(**kwargs)
        self.num_capsule, self.dim_capsule, self.routings = num_capsule, dim_capsule, routings

    def build(self, input_shape):
        self.input_num_capsule, self.input_dim_capsule = input_shape[1], input_shape[2]
        self.W = self.add_weight(
            shape=[self.num_capsule, self.input_num_capsule, self.dim_capsule, self.input_dim_capsule],
            initializer="glorot_uniform",
            name="W",
        )

    def call(self, inputs, training=None):
        inputs_hat = tf.einsum("jiod,bid->bjio", self.W, inputs)
        b = tf.zeros(shape=[tf.shape(inputs)[0], self.num_capsule, self.input_num_capsule])
        assert self.routings > 0, "The routings should be > 0."
        for i in range(self.routings):
            c = tf.nn.softmax(b, axis=1)
            outputs = squash(tf.einsum("bji,bjio->bjo", c, inputs_hat))
            if i < self.routings - 1:
                b += tf.einsum("bjo,bjio->bji", outputs, inputs_hat)
        return outputs


@example()
def capsule_routing():
    """Capsules that agree by routing in three rounds, the margin loss, and a decoder that sees the right capsule."""
    rng = np.random.default_rng(1)
    convolutions = [layers.Conv2D(16, 5, activation="relu"), layers.Conv2D(16, 5, strides=2)]
    primary = keras.Sequential([*convolutions, layers.Reshape((-1, 8)), layers.Lambda(squash)])
    digits = CapsuleLayer(4, 8)
    decoder = keras.Sequential([layers.Dense(32, "relu"), layers.Dense(14 * 14, "sigmoid")])
    optimizer = keras.optimizers.Adam(1e-3)
    arguments = [
        (tf.constant(rng.uniform(size=(8, 14, 14, 1)), tf.float32), tf.one_hot(rng.integers(0, 4, 8), 4))
        for _ in range(4)
    ]
    decoder(tf.reshape(digits(primary(arguments[0][0])), [8, -1]))
    trainable = functools.reduce(lambda a, b: a + b, [m.trainable_weights for m in (primary, digits, decoder)])

    def margin_loss(y_true, y_pred):
        loss = y_true * tf.square(tf.maximum(0.0, 0.9 - y_pred)) + 0.5 * (1 - y_true) * tf.square(
            tf.maximum(0.0, y_pred - 0.1)
        )
        return tf.reduce_mean(tf.reduce_sum(loss, 1))

    def step(x, y):
        with tf.GradientTape() as tape:
            capsules = digits(primary(x))
            length = tf.sqrt(tf.reduce_sum(tf.square(capsules), -1))
            masked = tf.reshape(capsules * tf.expand_dims(y, -1), [-1, 4 * 8])
            reconstruction = decoder(masked)
            loss = margin_loss(y, length) + 0.392 * tf.reduce_mean(tf.square(reconstruction - tf.reshape(x, [8, -1])))
        for g, v in (pairs := list(zip(tape.gradient(loss, trainable), trainable))):
            assert g is not None, v.name
        optimizer.apply_gradients(pairs)
        accuracy = np.mean(np.argmax(length, 1) == np.argmax(y, 1))
        return loss.numpy().item(), accuracy

    return Example(step, lambda: (trainable, optimizer.variables), arguments)
