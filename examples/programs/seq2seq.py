"""Seq2Seq, of Cocktailer: spells words backwards, and reads its own letters until it says that the word has ended."""

import random

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.texts import docstrings

PAD, START, END = range(3)
LETTERS = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz", start=3)}


class Seq2Seq(keras.Model):
    """A GRU reads, and another one with attention to what was read writes."""

    def __init__(self, letters: int, units: int) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(letters, units)
        self.reader = keras.layers.GRUCell(units)
        self.writer = keras.layers.GRUCell(units)
        self.query = keras.layers.Dense(units, use_bias=False)
        self.scores = keras.layers.Dense(letters)

    def read(self, words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Outputs at each letter, the state at the end of each word, and where there are letters."""
        state = tf.zeros((words.shape[0], self.reader.units))
        outputs, present = [], tf.cast(words != PAD, tf.float32)
        for t in range(words.shape[1]):
            output, _ = self.reader(self.embedding(words[:, t]), state)
            state = tf.where(words[:, t, None] != PAD, output, state)
            outputs.append(state)
        return tf.stack(outputs, 1), state, present

    def write(self, letter: tf.Tensor, state: tf.Tensor, read: tf.Tensor, present: tf.Tensor):
        """The scores of the next letter, and the state after it."""
        output, _ = self.writer(self.embedding(letter), state)
        match = tf.einsum("bu,btu->bt", self.query(output), read) - 1e9 * (1.0 - present)
        context = tf.einsum("bt,btu->bu", tf.nn.softmax(match), read)
        return self.scores(tf.concat([output, context], 1)), output


@program(origin="Cocktailer", data="words of the docstrings of Python's library")
def seq2seq(function, published=False):
    """Two recurrent networks with attention. A coin of Python's decides whether the decoder is told the right letters
    or reads its own; then a word is decoded greedily, letter by letter, until the network ends it or takes too long.
    """
    seed = 13
    keras.utils.set_random_seed(seed)
    units, batch, longest = (256, 64, 24) if published else (48, 16, 5)

    words = sorted({word for _, row in docstrings() for word in row if word.isalpha() and 3 <= len(word) <= longest})
    coins = random.Random(seed)
    model = Seq2Seq(len(LETTERS) + 3, units)
    optimizer = keras.optimizers.Adam(5e-3)
    history: dict[str, list] = {"taught": [], "losses": [], "spelled": []}

    def encoded(rows, length):
        table = np.full((len(rows), length), PAD, np.int32)
        for line, row in zip(table, rows, strict=True):
            line[: len(row)] = row
        return tf.constant(table)

    def spell(word):
        read, state, present = model.read(word)
        letter, spelled = tf.constant([START]), []
        while len(spelled) < longest + 2:
            scores, state = model.write(letter, state, read, present)
            letter = tf.argmax(scores, 1, output_type=tf.int32)
            spelled.append(int(letter[0]))
            if spelled[-1] == END:
                break
        return spelled

    @function
    def train(sources, targets):
        taught = coins.random() < 0.5
        with tf.GradientTape() as tape:
            read, state, present = model.read(sources)
            letter, losses = tf.fill((batch,), START), []
            for t in range(targets.shape[1]):
                scores, state = model.write(letter, state, read, present)
                each = tf.nn.sparse_softmax_cross_entropy_with_logits(targets[:, t], scores)
                losses.append(each * tf.cast(targets[:, t] != PAD, tf.float32))
                letter = targets[:, t] if taught else tf.argmax(scores, 1, output_type=tf.int32)
            loss = tf.reduce_mean(tf.add_n(losses))
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 5.0)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        history["taught"].append(taught)
        history["losses"].append(float(loss))
        history["spelled"].append(spell(sources[:1]))
        return loss

    def step():
        rows = [[LETTERS[letter] for letter in word] for word in coins.sample(words, batch)]
        return train(encoded(rows, longest), encoded([[*reversed(row), END] for row in rows], longest + 1))

    return Training(step, state=lambda: (model.variables, optimizer.variables, history))
