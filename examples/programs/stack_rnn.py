"""StackRNN, as in ACRoBat: a shift-reduce parser with its stack in Python, which reads each move off its own scores."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.trees import Tree, treebank, words_of

SHIFT, REDUCE = range(2)


def moves_of(tree: Tree) -> list[int]:
    """The moves that parse a sentence into this tree."""
    return [SHIFT if node.word else REDUCE for node in tree.nodes()]


class Parser:
    """Moves words to a stack and joins what lies on top; a recurrent network remembers the moves."""

    def __init__(self, words: dict[str, int], units: int) -> None:
        self.words, self.units = words, units
        self.embedding = keras.layers.Embedding(len(words), units)
        self.join = keras.layers.Dense(units, "tanh")
        self.tracker = keras.layers.GRUCell(units)
        self.scores = keras.layers.Dense(2)
        self.layers = [self.embedding, self.join, self.tracker, self.scores]
        self.nothing = tf.Variable(tf.zeros((1, units)))  # what lies on an empty stack

    @property
    def variables(self) -> list:
        return [variable for layer in self.layers for variable in layer.trainable_variables] + [self.nothing]

    def parse(self, sentence: list[str], gold: list[int] | None) -> tuple[list[int], list[tf.Tensor]]:
        """The moves that were made, those of `gold` if given, and the scores by which they were chosen."""
        coming = [self.embedding(np.array([self.words[word]], np.int32)) for word in reversed(sentence)]
        stack: list[tf.Tensor] = []
        state = tf.zeros((1, self.units))
        moves, scores = [], []
        while coming or len(stack) > 1:
            tops = [self.nothing, self.nothing, *stack][-2:]
            following = coming[-1] if coming else self.nothing
            _, (state,) = self.tracker(tf.concat([*tops, following], 1), [state])
            scores.append(self.scores(state))
            if gold is not None:
                move = gold[len(moves)]
            elif not coming:
                move = REDUCE
            elif len(stack) < 2:
                move = SHIFT
            else:
                move = int(tf.argmax(scores[-1][0]))
            moves.append(move)
            if move == SHIFT:
                stack.append(coming.pop())
            else:
                right, left = stack.pop(), stack.pop()
                stack.append(self.join(tf.concat([left, right], 1)))
        return moves, scores


@program(origin="ACRoBat", data="parse trees of the expressions in Python's library")
def stack_rnn(function, published=False):
    """A neural shift-reduce parser. Stack and buffer are Python lists of tensors; a step learns from the moves that a
    tree asks for, then parses a sentence by its own scores, read at every move, to see how many moves it gets right.
    """
    seed = 19
    keras.utils.set_random_seed(seed)
    units, batch, most, sentences = (256, 16, 56, None) if published else (32, 1, 6, 3)

    trees = treebank(fewest=5, most=most)
    rng = np.random.default_rng(seed)
    parser = Parser(words_of(trees), units)
    trees = [trees[number] for number in rng.permutation(len(trees))[:sentences]]  # the small size comes back to them
    optimizer = keras.optimizers.Adam(1e-3)
    right: list[float] = []

    @function
    def train(batch):
        with tf.GradientTape() as tape:
            losses = []
            for tree in batch:
                moves, scores = parser.parse([leaf.word for leaf in tree.leaves()], moves_of(tree))
                losses += [
                    tf.nn.sparse_softmax_cross_entropy_with_logits([move], score)
                    for move, score in zip(moves, scores, strict=True)
                ]
            loss = tf.add_n(losses) / len(losses)
        gradients = tape.gradient(loss, parser.variables)
        optimizer.apply_gradients(zip(gradients, parser.variables, strict=True))

        tree = batch[0]
        moves, _ = parser.parse([leaf.word for leaf in tree.leaves()], None)
        right.append(float(np.mean([move == gold for move, gold in zip(moves, moves_of(tree), strict=True)])))
        return loss

    return Training(
        step=lambda: train([trees[number] for number in rng.choice(len(trees), batch, replace=False)]),
        state=lambda: (parser.variables, optimizer.variables, right),
    )
