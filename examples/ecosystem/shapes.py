"""einops and scikit-learn beside TensorFlow: images cut into patches, and a metric that looks at every step."""

import keras
import numpy as np
import tensorflow as tf
from einops import rearrange, reduce, repeat
from sklearn.metrics import f1_score

from examples.ecosystem import Example, example


@example(rtol=1e-2, atol=1e-3)
def einops_vision_transformer():
    """One block of a vision transformer, its shapes said by einops."""
    rng, size, heads = np.random.default_rng(0), 48, 4
    embed, qkv, out = keras.layers.Dense(size), keras.layers.Dense(3 * size), keras.layers.Dense(size)
    norms = [keras.layers.LayerNormalization() for _ in range(2)]
    feed = keras.Sequential([keras.layers.Dense(96, "gelu"), keras.layers.Dense(size)])
    head = keras.layers.Dense(10)
    token = tf.Variable(tf.random.normal([1, 1, size], stddev=0.02))
    optimizer = keras.optimizers.AdamW(1e-3)
    arguments = [
        (tf.constant(rng.random((8, 16, 16, 3)), tf.float32), tf.constant(rng.integers(0, 10, 8))) for _ in range(4)
    ]

    def model(images):
        x = embed(rearrange(images, "b (h p) (w q) c -> b (h w) (p q c)", p=4, q=4))
        x = tf.concat([repeat(token, "1 1 d -> b 1 d", b=images.shape[0]), x], axis=1)
        q, k, v = rearrange(qkv(norms[0](x)), "b n (three h d) -> three b h n d", three=3, h=heads)
        attention = tf.nn.softmax(tf.einsum("bhid,bhjd->bhij", q, k) * (size // heads) ** -0.5)
        x = x + out(rearrange(tf.einsum("bhij,bhjd->bhid", attention, v), "b h n d -> b n (h d)"))
        x = x + feed(norms[1](x))
        return head(reduce(x, "b n d -> b d", "mean"))

    model(arguments[0][0])
    variables = [v for layer in [embed, qkv, out, *norms, feed, head] for v in layer.trainable_variables] + [token]

    def step(images, labels):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=model(images))
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables))
        return loss

    return Example(step, lambda: ([v.numpy() for v in variables], optimizer.variables), arguments)


@example()
def scikit_learn_metric():
    """A classifier whose F1 score scikit-learn computes in every step, and whose rate follows it."""
    rng = np.random.default_rng(0)
    model = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    scores = []
    features = rng.normal(size=(4, 64, 10)).astype(np.float32)
    arguments = [(x, np.digitize(x[:, 0], [-0.5, 0.5])) for x in features]
    model(features[0])

    def step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        scores.append(f1_score(y, logits.numpy().argmax(1), average="macro"))
        if len(scores) > 20 and scores[-1] < np.mean(scores[-20:-1]) - 0.2:
            optimizer.learning_rate.assign(optimizer.learning_rate * 0.9)
        return loss

    return Example(step, lambda: (model.variables, optimizer.variables, len(scores)), arguments)
