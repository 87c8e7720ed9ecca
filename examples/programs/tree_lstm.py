"""TreeLSTM, of JANUS: memory cells that are passed up a parse tree by recursion, a new tree every step."""

import keras
import numpy as np
import tensorflow as tf
from sklearn.metrics import f1_score

from examples.programs import Training, program
from examples.programs.parts.trees import CLASSES, Tree, treebank, words_of


class TreeLSTM(keras.layers.Layer):
    """Tai's binary tree LSTM: each child has a forget gate of its own. Keras' layers, called once a node."""

    def __init__(self, words: dict[str, int], units: int, seed: int) -> None:
        super().__init__()
        self.words, self.units = words, units
        self.embedding = keras.layers.Embedding(len(words), units)
        self.leaf = keras.layers.Dense(2 * units)
        self.inner = keras.layers.Dense(5 * units)
        self.dropout = keras.layers.Dropout(0.2, seed=seed)
        self.classes = keras.layers.Dense(CLASSES)

    def encode(self, tree: Tree, found: dict[int, list[tf.Tensor]]) -> tuple[tf.Tensor, tf.Tensor]:
        """Output and memory of a tree; keeps the outputs of its nodes by their labels."""
        if tree.word:
            x = self.embedding(np.array([self.words[tree.word]], np.int32))
            c, o = tf.split(self.leaf(x), 2, 1)
        else:
            left, left_memory = self.encode(tree.left, found)
            right, right_memory = self.encode(tree.right, found)
            gates = tf.split(self.inner(tf.concat([left, right], 1)), 5, 1)
            i, forget_left, forget_right, u, o = gates
            c = tf.sigmoid(i) * tf.tanh(u)
            c += tf.sigmoid(forget_left) * left_memory + tf.sigmoid(forget_right) * right_memory
        h = tf.sigmoid(o) * tf.tanh(c)
        found.setdefault(tree.label, []).append(h)
        return h, c

    def call(self, tree: Tree) -> tuple[tf.Tensor, tf.Tensor]:
        """The scores of every node, and their labels, in the order of the labels."""
        found: dict[int, list[tf.Tensor]] = {}
        self.encode(tree, found)
        labels = [label for label in sorted(found) for _ in found[label]]
        outputs = tf.concat([h for label in sorted(found) for h in found[label]], 0)
        return self.classes(self.dropout(outputs, training=True)), tf.constant(labels)


@program(origin="JANUS", data="parse trees of the expressions in Python's library")
def tree_lstm(function, published=False):
    """LSTM cells over binary parse trees, one new tree after the other. Nodes are gathered in a dictionary by what the
    parser called them, and scikit-learn scores each tree inside of the step.
    """
    seed = 5
    keras.utils.set_random_seed(seed)
    units, batch, most = (150, 25, 56) if published else (32, 2, 12)

    trees = treebank(fewest=5, most=most)
    rng = np.random.default_rng(seed)
    model = TreeLSTM(words_of(trees), units, seed)
    optimizer = keras.optimizers.Adagrad(0.05)
    scores: list[float] = []

    @function
    def train(batch):
        losses = []
        with tf.GradientTape() as tape:
            for tree in batch:
                logits, labels = model(tree=tree)
                losses.append(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)))
                guesses = logits.numpy().argmax(1)
                scores.append(f1_score(labels.numpy(), guesses, average="micro"))
            loss = tf.add_n(losses) / len(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return Training(
        step=lambda: train([trees[number] for number in rng.choice(len(trees), batch, replace=False)]),
        state=lambda: (model.variables, optimizer.variables, scores),
    )
