"""TreeRNN, of JANUS: a recursive network that Python's recursion lays over a parse tree, a new tree every step."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.trees import CLASSES, Tree, treebank, words_of


class TreeRNN:
    """Socher's: a node's vector is made of its children's by one matrix, and classified by another."""

    def __init__(self, words: dict[str, int], units: int) -> None:
        glorot = keras.initializers.GlorotUniform(seed=1)
        self.words = words
        self.embedding = tf.Variable(tf.random.uniform((len(words), units), -0.1, 0.1))
        self.kernel, self.bias = tf.Variable(glorot((2 * units, units))), tf.Variable(tf.zeros(units))
        self.classes, self.offset = tf.Variable(glorot((units, CLASSES))), tf.Variable(tf.zeros(CLASSES))

    @property
    def variables(self) -> list[tf.Variable]:
        return [self.embedding, self.kernel, self.bias, self.classes, self.offset]

    def encode(self, tree: Tree, scores: list[tuple[int, tf.Tensor]]) -> tf.Tensor:
        """The vector of a tree, `float32[1, units]`; appends every node's label and scores."""
        if tree.word:
            vector = tf.nn.embedding_lookup(self.embedding, [self.words[tree.word]])
        else:
            children = [self.encode(child, scores) for child in (tree.left, tree.right)]
            vector = tf.tanh(tf.matmul(tf.concat(children, 1), self.kernel) + self.bias)
        scores.append((tree.label, tf.matmul(vector, self.classes) + self.offset))
        return vector


@program(origin="JANUS", data="parse trees of the expressions in Python's library")
def tree_rnn(function, published=False):
    """A recursive network over binary parse trees with a label at every node. Each step is over trees of its own: the
    recursion, and with it the sequence of operations, is never the same twice.
    """
    seed = 4
    keras.utils.set_random_seed(seed)
    units, batch, most = (128, 25, 56) if published else (32, 3, 12)

    trees = treebank(fewest=5, most=most)
    rng = np.random.default_rng(seed)
    model = TreeRNN(words_of(trees), units)
    sums = [tf.Variable(tf.fill(variable.shape, 0.1), trainable=False) for variable in model.variables]  # Adagrad's
    roots: list[bool] = []

    @function
    def train(batch):
        with tf.GradientTape() as tape:
            losses = []
            for tree in batch:
                scores: list[tuple[int, tf.Tensor]] = []
                model.encode(tree, scores)
                losses += [tf.nn.sparse_softmax_cross_entropy_with_logits([label], score) for label, score in scores]
                roots.append(int(tf.argmax(scores[-1][1][0])) == tree.label)
            loss = tf.add_n(losses) / len(batch) + 1e-3 * tf.nn.l2_loss(model.kernel)
        for variable, total, gradient in zip(model.variables, sums, tape.gradient(loss, model.variables), strict=True):
            gradient = tf.convert_to_tensor(gradient)
            total.assign_add(gradient**2)
            variable.assign_sub(0.05 * gradient / tf.sqrt(total))
        return loss

    return Training(
        step=lambda: train([trees[number] for number in rng.choice(len(trees), batch, replace=False)]),
        state=lambda: (model.variables, sums, roots),
    )
