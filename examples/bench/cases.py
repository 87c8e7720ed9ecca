"""The programs that are measured, each built anew for each variant, so that no two variants share state.

A program returns a number or a small tensor that depends on all it did. The same call of two variants must
return the same, which is how a variant that silently runs another program is found out.
"""

import functools
import itertools
import random
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from sklearn.metrics import accuracy_score

import coexec
from examples import digits
from examples.bench import decisions, fits, networks
from examples.bench.case import Case, Program, forever


def raw_ops() -> Program:
    """40 operations on 8x8 matrices, nearly all of whose eager time is dispatch."""
    weights = tf.constant(np.random.default_rng(0).normal(size=(8, 8)) / 4, tf.float32)

    def step(x: tf.Tensor) -> tf.Tensor:
        for _ in range(10):
            x = tf.matmul(x, weights)
            x = x + weights
            x = tf.nn.relu(x)
            x = tf.raw_ops.Tanh(x=x)
        return x

    return Program(step, forever(tf.ones((8, 8))))


def training(model: keras.Model, x: np.ndarray, y: np.ndarray) -> Program:
    """A training step of a classifier, on a batch that stays the same."""
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam()
    # Slots made now let tf.function take part: it may not create variables in a later trace.
    optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = objective(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return Program(step, forever(tf.constant(x), tf.constant(y)))


def keras_mlp() -> Program:
    """A training step 20-64-64-10 on 32 rows, written as the Keras guides write it."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((20,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(32, 20)).astype(np.float32), numbers.integers(10, size=32).astype(np.int32)
    return training(model, x, y)


def mlp_with_effects() -> Program:
    """The Keras step with Python in it: a list, a dict, a counter, and NumPy on the loss."""
    program = keras_mlp()
    losses: list[float] = []
    seen = {"steps": 0, "best": np.inf}

    def with_effects(x: tf.Tensor, y: tf.Tensor) -> float:
        loss = program.step(x, y)
        losses.append(float(loss))
        seen["steps"] += 1
        seen["best"] = min(seen["best"], float(np.mean(losses[-10:])))
        return losses[-1]

    return Program(with_effects, program.inputs)


def unrolled_lstm() -> Program:
    """A Keras LSTM cell of 64 units, called 20 times by a Python loop, on 16 rows."""
    keras.utils.set_random_seed(0)
    cell, head = keras.layers.LSTMCell(64), keras.layers.Dense(1)
    cell.build((16, 8))
    head.build((16, 64))
    variables = cell.trainable_variables + head.trainable_variables
    optimizer = keras.optimizers.Adam()
    optimizer.build(variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            state = [tf.zeros((16, 64)), tf.zeros((16, 64))]
            for time in range(20):
                hidden, state = cell(x[:, time], state)
            loss = tf.reduce_mean(tf.square(head(hidden) - y))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    numbers = np.random.default_rng(0)
    x = tf.constant(numbers.normal(size=(16, 20, 8)), tf.float32)
    y = tf.constant(numbers.normal(size=(16, 1)), tf.float32)
    return Program(step, forever(x, y))


class QLearning:
    """A DQN step: replay in a Python list, sampled by NumPy; two forward passes, an update."""

    def __init__(self) -> None:
        keras.utils.set_random_seed(0)
        self.online, self.target = self.network(), self.network()
        self.optimizer = keras.optimizers.Adam(1e-3)
        self.optimizer.build(self.online.trainable_variables)
        self.numbers = numbers = np.random.default_rng(0)
        self.replay = [
            (numbers.normal(size=4), numbers.integers(2), numbers.normal(), numbers.normal(size=4)) for _ in range(500)
        ]

    @staticmethod
    def network() -> keras.Model:
        """How good two actions are."""
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(64, "relu"), layers.Dense(64, "relu"), layers.Dense(2)]
        )

    def update(self, states: tf.Tensor, actions: tf.Tensor, rewards: tf.Tensor, following: tf.Tensor) -> tf.Tensor:
        """Learns from what was sampled; returns the loss."""
        wanted = rewards + 0.99 * tf.reduce_max(self.target(following), axis=1)
        with tf.GradientTape() as tape:
            chosen = tf.reduce_sum(self.online(states) * tf.one_hot(actions, 2), axis=1)
            loss = tf.reduce_mean(tf.square(wanted - chosen))
        variables = self.online.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def __call__(self) -> float:
        sample = [self.replay[i] for i in self.numbers.choice(len(self.replay), 32)]
        states, actions, rewards, following = (np.stack(part) for part in zip(*sample, strict=True))
        floats = [tf.constant(part, tf.float32) for part in (states, rewards, following)]
        loss = float(self.update(floats[0], tf.constant(actions), *floats[1:]))
        self.replay[int(self.numbers.integers(500))] = (states[0], actions[0], loss, following[0])
        return loss

    def rewritten(self, decorate: Callable) -> "QLearning":
        """The step as a graph needs it, which would sample once and for all: it gets only the update."""
        self.update = decorate(self.update)
        return self


Q_LEARNING = {
    "eager": lambda step: step,
    "coexec": coexec.function,
    "tf.function": lambda step: step.rewritten(tf.function),
    "jit": lambda step: step.rewritten(functools.partial(tf.function, jit_compile=True)),
}


def q_learning() -> Program:
    """A DQN step; graphs get its update."""
    return Program(QLearning(), forever())


def gpt() -> Program:
    """A training step of a small GPT, written as the Keras guides write it."""
    keras.utils.set_random_seed(0)
    return training(networks.gpt(), *networks.tokens())


def resnet() -> Program:
    """The same of a small ResNet."""
    keras.utils.set_random_seed(0)
    return training(networks.resnet(), *networks.images())


def bert_with_metric() -> Program:
    """A step of a BERT classifier, whose `call` is the user's; scikit-learn judges each batch."""
    keras.utils.set_random_seed(0)
    tokens, classes = networks.texts()
    model = networks.Classifier()
    model(tokens)
    program = training(model, tokens, classes.astype(np.int32))
    scores: list[float] = []

    def with_metric(tokens: tf.Tensor, classes: tf.Tensor) -> float:
        loss = program.step(tokens, classes)
        scores.append(accuracy_score(classes.numpy(), model(tokens).numpy().argmax(-1)))
        return float(loss) + scores[-1]

    return Program(with_metric, program.inputs)


def host_work() -> Program:
    """The Keras step, and some 10 ms of Python in it that need nothing of the device."""
    program = keras_mlp()
    words = [str(number * 7919 % 10007) for number in range(9_000)]
    shuffler = random.Random(0)

    def with_work(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        loss = program.step(x, y)
        shuffler.shuffle(words)
        return loss + float(words[0])

    return Program(with_work, program.inputs)


def many_sizes() -> Program:
    """The Keras step on batches of 200 sizes, in an order without a pattern."""
    program = keras_mlp()
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(264, 20)).astype(np.float32), numbers.integers(10, size=264).astype(np.int32)
    sizes = numbers.permutation(np.arange(64, 264))
    return Program(program.step, ((tf.constant(x[:n]), tf.constant(y[:n])) for n in itertools.cycle(sizes)))


def sliced_batches() -> Program:
    """The Keras step, which takes its batch from an array, at a place that Python says."""
    program = keras_mlp()
    numbers = np.random.default_rng(0)
    x = tf.constant(numbers.normal(size=(4096, 20)), tf.float32)
    y = tf.constant(numbers.integers(10, size=4096), tf.int32)

    def step(start: int) -> tf.Tensor:
        return program.step(x[start : start + 32], y[start : start + 32])

    return Program(step, ((start,) for start in itertools.cycle(range(0, 4096, 32))))


def rows_of_a_table() -> Program:
    """Looks up 256 of 200,000 rows, and changes them."""
    numbers = np.random.default_rng(0)
    table = tf.Variable(numbers.normal(size=(200_000, 64)).astype(np.float32))
    weight = tf.constant(numbers.normal(size=(64, 64)) / 8, tf.float32)

    def step(rows: tf.Tensor) -> tf.Tensor:
        values = tf.nn.embedding_lookup(table, rows)
        for _ in range(4):
            values = tf.tanh(values @ weight)
        table.scatter_sub(tf.IndexedSlices(0.1 * values, rows))
        return tf.reduce_mean(values)

    batches = [tf.constant(numbers.integers(200_000, size=256)) for _ in range(16)]
    return Program(step, ((rows,) for rows in itertools.cycle(batches)))


class Wanderer:
    """An object whose every call issues another sequence of 40 operations, picked by Python."""

    def __init__(self) -> None:
        self.picks = random.Random(0)

    def step(self, x: tf.Tensor) -> tf.Tensor:
        """Applies 40 of four operations in an order that was never seen before and never comes again."""
        for _ in range(40):
            pick = self.picks.randrange(4)
            if pick == 0:
                x = x + 0.5
            elif pick == 1:
                x = x * 0.75
            elif pick == 2:
                x = tf.math.tanh(x)
            else:
                x = tf.nn.relu(x)
        return x


def new_every_call() -> Program:
    """Nothing to gain: every call takes a path of its own."""
    return Program(Wanderer().step, forever(tf.ones((8, 8))))


def digits_step() -> Program:
    """The training step of `examples/digits.py`: lists, a schedule, scikit-learn, an early return."""
    trainer = digits.Trainer(seed=0)
    images, _, labels, _ = digits.digits(seed=0)
    return Program(trainer.step, digits.batches(images, labels, size=32, steps=10**9, seed=0))


def fit_mlp() -> Program:
    """Keras' own training step, in its own training loop."""
    return Program(fits.mlp(steps=40), forever())


def fit_lstm() -> Program:
    """The same with a Python loop in the model."""
    return Program(fits.lstm(steps=10), forever())


def hand_written_gradient() -> Program:
    """A dense layer, its tape and its update, without Keras: what the memory case calls 10,000 times."""
    numbers = np.random.default_rng(0)
    weights = tf.Variable(numbers.normal(size=(16, 4)), dtype=tf.float32)
    x = tf.constant(numbers.normal(size=(8, 16)), tf.float32)
    y = tf.constant(numbers.normal(size=(8, 4)), tf.float32)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(tf.matmul(x, weights)) - y))
        weights.assign_sub(0.01 * tape.gradient(loss, weights))
        return loss

    return Program(step, forever(x, y))


CASES = (
    Case("raw-ops", "40 small raw ops", raw_ops, calls=60, at_most=0.45),
    Case("keras-mlp", "Keras MLP step, Adam", keras_mlp, calls=20, at_most=0.025, of_graphs=0.5),
    Case("effects", "the same, with Python effects", mlp_with_effects, calls=20, at_most=0.03),
    Case("lstm", "LSTM cell, 20 steps in Python", unrolled_lstm, calls=10, at_most=0.04, of_graphs=0.9),
    Case("q-learning", "DQN step, replay in a list (graphs: its update)", q_learning, calls=20, at_most=0.05,
         of_graphs=0.6, wrappers=Q_LEARNING),
    Case("gpt", "GPT, 4 layers of 128, 8x64 tokens", gpt, calls=1, at_most=0.12, of_graphs=0.95),
    Case("resnet", "ResNet-18, a quarter as wide, 16 images", resnet, calls=1, at_most=0.7, of_graphs=1.0),
    Case("bert", "BERT, 2 layers of 128, scikit-learn's metric", bert_with_metric, calls=1, at_most=0.17),
    Case("host-work", "MLP step, 10 ms of other Python", host_work, calls=2, at_most=0.7),
    Case("sizes", "MLP step, batches of 200 sizes", many_sizes, calls=4, at_most=1.2, follows=False,
         no_graphs="left out: traces 200 times, which takes minutes"),
    Case("slices", "MLP step that slices its batch from an array", sliced_batches, calls=20, at_most=0.1,
         no_graphs="left out: traces for each place"),
    Case("rows", "256 rows of a table of 200,000, changed", rows_of_a_table, calls=20, at_most=0.8),
    Case("new-every-call", "new path on every call", new_every_call, calls=60, at_most=1.05, follows=False),
    Case("digits", "digits step, full of Python", digits_step, calls=10),
    Case("fit-mlp", "Keras fit, MLP, 40 steps", fit_mlp, 1, 0.1, 1.0, wrappers=fits.WRAPPERS),
    Case("fit-lstm", "Keras fit, LSTM cell, 10 steps", fit_lstm, 1, 0.3, 1.0, wrappers=fits.WRAPPERS),
    Case("while-loop", "`while` on a tensor, 100 rounds", decisions.while_loop, calls=20, at_most=0.04,
         of_function=0.35, wrappers=decisions.LOOPS),
    Case("decoding", "greedy decoding by a GRU, 50 letters", decisions.greedy_decoding, calls=4, at_most=0.1,
         wrappers=decisions.LOOPS),
    Case("tree", "TreeLSTM by recursion, one tree", decisions.one_tree, calls=4, at_most=0.3),
    Case("early-exit", "a classifier of four stages with exits", decisions.early_exits, calls=20, of_host=0.9,
         wrappers=decisions.BRANCHES),
    Case("gates", "eight residual blocks, each behind a gate", decisions.skipped_blocks, calls=20, of_host=0.9,
         wrappers=decisions.BRANCHES),
)
IN_README = frozenset(
    {"keras-mlp", "effects", "lstm", "q-learning", "gpt", "resnet", "bert", "fit-mlp", "while-loop"}
)
MEMORY = Case("memory", "a tape and an update, no Keras", hand_written_gradient, calls=10_000)
