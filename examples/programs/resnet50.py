"""ResNet50, of Terra: the plain network, trained by a loop that keeps its own books."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.batches import batches
from examples.programs.parts.digits import digits
from examples.programs.parts.residual import ResNet


@program(origin="Terra", data="scikit-learn's digits, enlarged", rtol=1e-3, atol=2e-3)
def resnet50(function, published=False):
    """A residual network with decay summed in Python over the variables, a metric, and a rate set by step."""
    seed = 6
    keras.utils.set_random_seed(seed)
    if published:
        size, batch, stages, width, classes, peak, warmup = 224, 64, (3, 4, 6, 3), 64, 1000, 0.1, 5000
    else:
        size, batch, stages, width, classes, peak, warmup = 16, 16, (1, 2, 1), 8, 10, 0.001, 20
    images, labels = digits(size, channels=3)
    data = batches(np.random.default_rng(seed), batch, images, labels)

    model = ResNet(stages, width, classes, small_images=not published)
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(peak, momentum=0.9)
    mean, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
    steps, results = 0, []

    @function
    def train(images, labels):
        nonlocal steps
        steps += 1
        optimizer.learning_rate.assign(peak * min(1.0, steps / warmup))
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = objective(labels, logits)
            kernels = [weights for weights in model.trainable_variables if len(weights.shape) > 1]
            loss += 1e-4 * tf.add_n([tf.nn.l2_loss(weights) for weights in kernels])
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        mean.update_state(loss)
        accuracy.update_state(labels, logits)
        if steps % 5 == 0:
            results.append((steps, float(mean.result()), float(accuracy.result())))
            mean.reset_state()
            accuracy.reset_state()
        return loss

    return Training(
        step=lambda: train(*next(data)),
        state=lambda: (model.variables, optimizer.variables, steps, results),
    )
