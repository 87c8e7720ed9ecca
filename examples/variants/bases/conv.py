"""A small convolutional network with batch normalisation and dropout."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training


def conv(function):
    keras.utils.set_random_seed(0)
    numbers = np.random.default_rng(0)
    x = tf.constant(numbers.normal(size=(4, 8, 8, 1)), tf.float32)
    y = tf.constant(numbers.integers(4, size=4), tf.int32)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, padding="same"),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2, seed=1),
            keras.layers.Dense(4),
        ]
    )
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(model.trainable_variables)

    @function
    def train(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = objective(y, logits)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    return Training(step=lambda: train(x, y), state=lambda: (model.variables, optimizer.variables))
