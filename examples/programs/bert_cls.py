"""BERT-CLS, of Terra: fine-tunes a classifier of texts and has scikit-learn judge each batch inside the step."""

import keras
import numpy as np
import tensorflow as tf
from sklearn.metrics import accuracy_score, f1_score

from examples.programs import Training, program
from examples.programs.parts.batches import batches
from examples.programs.parts.bert import Bert, WarmUp, adamw, initializer
from examples.programs.parts.texts import MODULES, Vocabulary, docstrings, padded


class Classifier(keras.Model):
    """Says of a text which of the modules it describes."""

    def __init__(self, bert: Bert, classes: int, seed: int) -> None:
        super().__init__()
        self.bert = bert
        self.dropout = keras.layers.Dropout(0.1, seed=seed)
        self.head = keras.layers.Dense(classes, kernel_initializer=initializer(seed))

    def call(self, inputs, training=False):
        _, pooled = self.bert(inputs, training=training)
        return self.head(self.dropout(pooled, training=training))


@program(origin="Terra", data="docstrings of Python's library, by module")
def bert_cls(function, published=False):
    """BERT with a classifier. The step turns its logits into NumPy and appends scikit-learn's scores to a list."""
    seed = 1
    keras.utils.set_random_seed(seed)
    length, batch = (128, 32) if published else (32, 16)
    size = {"vocabulary": 30522, "hidden": 768, "layers": 12, "heads": 12}
    if not published:
        size = {"vocabulary": 1000, "hidden": 64, "layers": 2, "heads": 2}

    texts = docstrings(MODULES)
    vocabulary = Vocabulary((words for _, words in texts), size["vocabulary"])
    tokens = padded([[vocabulary.START, *vocabulary.encode(words)] for _, words in texts], length)
    labels = np.array([module for module, _ in texts], np.int32)
    data = batches(np.random.default_rng(seed), batch, tokens, np.zeros_like(tokens), labels)

    model = Classifier(Bert(length=length, seed=seed, **size), len(MODULES), seed)
    optimizer, schedule = adamw(), WarmUp(5e-4, warmup=10, total=1000)
    history = []

    @function
    def train(tokens, segments, labels):
        optimizer.learning_rate = schedule.advance()
        with tf.GradientTape() as tape:
            logits = model((tokens, segments), training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
        optimizer.apply(gradients, model.trainable_variables)

        truth, predictions = labels.numpy(), logits.numpy().argmax(-1)
        scores = {
            "loss": float(loss),
            "norm": float(norm),
            "accuracy": accuracy_score(truth, predictions),
            "f1": f1_score(truth, predictions, average="macro", zero_division=0.0),
        }
        if scores["accuracy"] > max((before["accuracy"] for before in history), default=0.0):
            scores["best"] = len(history)
        history.append(scores)
        return loss

    return Training(
        step=lambda: train(*next(data)),
        state=lambda: (model.variables, optimizer.variables, schedule, history),
    )
