"""BERT with early exits, as PABEE and DeeBERT have them: a classifier after each layer, and texts that leave early."""

import collections

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.batches import batches
from examples.programs.parts.bert import Bert, WarmUp, adamw, initializer
from examples.programs.parts.texts import MODULES, Vocabulary, docstrings, padded


class EarlyExitBert(keras.Model):
    """An encoder that can be left after any of its layers."""

    def __init__(self, bert: Bert, classes: int, seed: int) -> None:
        super().__init__()
        self.bert = bert
        self.exits = [
            keras.layers.Dense(classes, kernel_initializer=initializer(seed + n)) for n in range(len(bert.blocks))
        ]
        self.dropout = keras.layers.Dropout(0.1, seed=seed)

    def layers_of(self, tokens, training=False):
        """Yields the scores after each layer; the next layer is computed only for who asks."""
        bert = self.bert
        x = bert.words(tokens) + bert.positions(tf.range(tokens.shape[1])) + bert.segments(tf.zeros_like(tokens))
        x = bert.dropout(bert.norm(x), training=training)
        bias = -1e4 * tf.cast(tokens == 0, tf.float32)[:, None, None, :]
        for block, leave in zip(bert.blocks, self.exits, strict=True):
            x = block(x, bias, training=training)
            yield leave(self.dropout(bert.pooler(x[:, 0]), training=training))


@program(origin="early exit", data="docstrings of Python's library, by module")
def early_exit_bert(function, published=False):
    """BERT that learns at all of its exits, deeper ones weighing more, and then classifies single texts: a generator
    makes layers until patience or entropy ends it, which Python reads and counts, and adapts its threshold to.
    """
    seed = 18
    keras.utils.set_random_seed(seed)
    length, batch, tried = (128, 32, 8) if published else (16, 8, 2)
    size = {"vocabulary": 30522, "hidden": 768, "layers": 12, "heads": 12}
    if not published:
        size = {"vocabulary": 1000, "hidden": 32, "layers": 3, "heads": 2}

    texts = docstrings(MODULES)
    vocabulary = Vocabulary((words for _, words in texts), size["vocabulary"])
    tokens = padded([[vocabulary.START, *vocabulary.encode(words)] for _, words in texts], length)
    labels = np.array([module for module, _ in texts], np.int32)
    data = batches(np.random.default_rng(seed), batch, tokens, labels)

    model = EarlyExitBert(Bert(length=length, seed=seed, **size), len(MODULES), seed)
    optimizer, schedule = adamw(), WarmUp(2e-3, warmup=10, total=1000)
    patience = 2
    exits: collections.Counter = collections.Counter()
    kept = {"entropy": 0.95 * np.log(len(MODULES)), "right": 0}

    def classify(tokens):
        """The class of one text, and the number of the layer at which it was clear."""
        agreed, last, layer = 0, None, 0
        for logits in model.layers_of(tokens):
            layer += 1
            chances = tf.nn.softmax(logits[0])
            guess, entropy = int(tf.argmax(chances)), float(-tf.reduce_sum(chances * tf.math.log(chances)))
            agreed = agreed + 1 if guess == last else 0
            last = guess
            if entropy < kept["entropy"] or agreed == patience:
                break
        return last, layer

    @function
    def train(tokens, labels):
        optimizer.learning_rate = schedule.advance()
        with tf.GradientTape() as tape:
            total, weights = 0.0, 0
            for weight, logits in enumerate(model.layers_of(tokens, training=True), start=1):
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
                total += weight * tf.reduce_mean(losses)
                weights += weight
            loss = total / weights
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        optimizer.apply(gradients, model.trainable_variables)

        for number in range(tried):
            guess, layer = classify(tokens[number : number + 1])
            exits[layer] += 1
            kept["right"] += guess == int(labels[number])
            # Half of the texts are to leave before the last layer.
            kept["entropy"] *= 0.99 if layer < len(model.exits) else 1.01
        return loss

    return Training(
        step=lambda: train(*next(data)),
        state=lambda: (model.variables, optimizer.variables, schedule, sorted(exits.items()), kept),
    )
