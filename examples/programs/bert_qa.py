"""BERT-Q&A, of Terra: fine-tunes BERT to find the words of a text that answer a question."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.batches import batches
from examples.programs.parts.bert import Bert, WarmUp, adamw, initializer
from examples.programs.parts.texts import Vocabulary, docstrings, padded


class Answerer(keras.Model):
    """For each token the logits of being the first and the last of the answer."""

    def __init__(self, bert: Bert, seed: int) -> None:
        super().__init__()
        self.bert = bert
        self.head = keras.layers.Dense(2, kernel_initializer=initializer(seed))

    def call(self, inputs, training=False):
        sequence, _ = self.bert(inputs, training=training)
        return tf.unstack(self.head(sequence), axis=-1)


def ask(rng: np.random.Generator, words: list[int], length: int) -> tuple[list[int], list[int], int, int]:
    """A question whose answer is a few words of the text: what stands around them there. With the text behind it."""
    words = words[: length - 9]
    size = int(rng.integers(1, 4))
    first = int(rng.integers(0, len(words) - size + 1))
    around = [*words[max(0, first - 3) : first], Vocabulary.UNKNOWN, *words[first + size : first + size + 3]]
    question = [Vocabulary.START, *around, Vocabulary.SEPARATOR]
    segments = [0] * len(question) + [1] * len(words)
    return question + words, segments, len(question) + first, len(question) + first + size - 1


@program(origin="Terra", data="docstrings of Python's library, with gaps to fill as questions")
def bert_qa(function, published=False):
    """BERT with a start and an end to find: the two losses, the clipping, and answers counted by Python as strings."""
    seed = 8
    keras.utils.set_random_seed(seed)
    length, batch = (384, 12) if published else (40, 8)
    size = {"vocabulary": 30522, "hidden": 768, "layers": 12, "heads": 12}
    if not published:
        size = {"vocabulary": 1000, "hidden": 64, "layers": 2, "heads": 2}

    rng = np.random.default_rng(seed)
    texts = [words for _, words in docstrings()]
    vocabulary = Vocabulary(texts, size["vocabulary"])
    rows, segments, first, last = zip(*(ask(rng, vocabulary.encode(words), length) for words in texts), strict=True)
    tables = padded(rows, length), padded(segments, length), np.array(first, np.int32), np.array(last, np.int32)
    data = batches(rng, batch, *tables)

    model = Answerer(Bert(length=length, seed=seed, **size), seed)
    optimizer, schedule = adamw(), WarmUp(5e-4, warmup=10, total=1000)
    losses = keras.metrics.Mean()
    exact = {"right": 0, "asked": 0}

    @function
    def train(tokens, segments, first, last):
        optimizer.learning_rate.assign(schedule.advance())
        with tf.GradientTape() as tape:
            begins, ends = model((tokens, segments), training=True)
            loss = sum(
                tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(place, logits))
                for place, logits in ((first, begins), (last, ends))
            )
            loss /= 2
        variables = model.trainable_variables
        # The pooled vector is not asked for, so its weights have no gradient.
        pairs = [(g, v) for g, v in zip(tape.gradient(loss, variables), variables, strict=True) if g is not None]
        clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 1.0)
        optimizer.apply_gradients(zip(clipped, [variable for _, variable in pairs], strict=True))
        losses.update_state(loss)

        found = zip(tf.argmax(begins, -1).numpy(), tf.argmax(ends, -1).numpy(), strict=True)
        for row, (begin, end) in enumerate(found):
            exact["asked"] += 1
            exact["right"] += int((begin, end) == (int(first[row]), int(last[row])))
        return loss

    return Training(
        step=lambda: train(*next(data)),
        state=lambda: (model.variables, optimizer.variables, losses.result(), schedule, exact),
    )
