"""Programs as tutorials have them: a captioner, a cellular automaton, a world model, a radiance field, games."""

import collections
import dataclasses
import math
import random

import keras
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example


class Attention(keras.Model):
    def __init__(self, units):
        super().__init__()
        self.W1, self.W2 = keras.layers.Dense(units), keras.layers.Dense(units)
        self.V = keras.layers.Dense(1)

    def call(self, features, hidden):
        score = tf.nn.tanh(self.W1(features) + self.W2(tf.expand_dims(hidden, 1)))
        weights = tf.nn.softmax(self.V(score), axis=1)
        return tf.reduce_sum(weights * features, axis=1), weights


class Decoder(keras.Model):
    def __init__(self, vocabulary, units):
        super().__init__()
        self.embedding = keras.layers.Embedding(vocabulary, units)
        self.gru = keras.layers.GRU(units, return_sequences=True, return_state=True)
        self.fc1, self.fc2 = keras.layers.Dense(units), keras.layers.Dense(vocabulary)
        self.attention = Attention(units)
        self.units = units

    def call(self, x, features, hidden):
        context, weights = self.attention(features, hidden)
        x = tf.concat([tf.expand_dims(context, 1), self.embedding(x)], axis=-1)
        output, state = self.gru(x)
        x = self.fc1(output)
        x = tf.reshape(x, (-1, x.shape[2]))
        return self.fc2(x), state, weights

    def reset_state(self, batch_size):
        return tf.zeros((batch_size, self.units))


@example()
def image_captioning():
    """An encoder of features and a decoder with attention, which is taught word by word."""
    decoder, encoder = Decoder(50, 32), keras.layers.Dense(32, activation="relu")
    optimizer = keras.optimizers.Adam()
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def loss_function(real, pred):
        mask = tf.math.logical_not(tf.math.equal(real, 0))
        loss = loss_object(real, pred)
        return tf.reduce_mean(loss * tf.cast(mask, dtype=loss.dtype))

    def step(images, target):
        loss = 0
        hidden = decoder.reset_state(batch_size=target.shape[0])
        words = tf.expand_dims([1] * target.shape[0], 1)
        with tf.GradientTape() as tape:
            features = encoder(images)
            for i in range(1, target.shape[1]):
                predictions, hidden, _ = decoder(words, features, hidden)
                loss += loss_function(target[:, i], predictions)
                words = tf.expand_dims(target[:, i], 1)
        total_loss = loss / int(target.shape[1])
        variables = encoder.trainable_variables + decoder.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss, total_loss

    rng = np.random.default_rng(0)
    images = rng.normal(size=(8, 16, 9, 24)).astype("float32")
    captions = rng.integers(0, 50, size=(8, 16, 12))
    arguments = [(tf.constant(i), tf.constant(c)) for i, c in zip(images, captions)]
    return Example(step, lambda: (encoder.variables, decoder.variables, optimizer.variables), arguments)


@example()
def neural_cellular_automaton():
    """Cells that learn to grow a picture, from a pool that keeps what they have become."""
    channels = 8
    identity, dx = np.zeros((3, 3), np.float32), np.outer([1, 2, 1], [-1, 0, 1]).astype(np.float32) / 8
    identity[1, 1] = 1.0
    kernel = np.repeat(np.stack([identity, dx, dx.T], -1)[:, :, None, :], channels, 2)
    update = keras.Sequential(
        [keras.layers.Conv2D(32, 1, activation="relu"), keras.layers.Conv2D(channels, 1, kernel_initializer="zeros")]
    )
    optimizer = keras.optimizers.Adam(2e-3)
    target = tf.constant(np.random.default_rng(1).random((16, 16, 4)), tf.float32)
    pool = np.zeros((20, 16, 16, channels), np.float32)
    pool[:, 8, 8, 3:] = 1.0
    rng = np.random.RandomState(0)

    def alive(x):
        return tf.nn.max_pool2d(x[..., 3:4], 3, 1, "SAME") > 0.1

    def grow(x, fire_rate=0.5):
        before = alive(x)
        change = update(tf.nn.depthwise_conv2d(x, kernel, [1, 1, 1, 1], "SAME"))
        fires = tf.random.uniform(tf.shape(x[:, :, :, :1])) <= fire_rate
        x = x + change * tf.cast(fires, tf.float32)
        return x * tf.cast(before & alive(x), tf.float32)

    def step():
        chosen = rng.choice(len(pool), 4, replace=False)
        x = tf.constant(pool[chosen])
        with tf.GradientTape() as tape:
            for _ in range(rng.randint(6, 10)):
                x = grow(x)
            loss = tf.reduce_mean(tf.square(x[..., :4] - target))
        gradients = [g / (tf.norm(g) + 1e-8) for g in tape.gradient(loss, update.weights)]
        optimizer.apply_gradients(zip(gradients, update.weights))
        pool[chosen] = x.numpy()
        return loss

    return Example(step, lambda: (update.variables, optimizer.variables, pool.copy()), [()])


State = collections.namedtuple("State", "mean std stoch deter")


@example()
def world_model():
    """A recurrent state-space model of sequences, after Dreamer's."""
    stoch, deter, batch = 8, 24, 6
    cell = keras.layers.GRUCell(deter)
    prior, posterior, decoder = (
        keras.Sequential([keras.layers.Dense(24, "elu"), keras.layers.Dense(size)]) for size in (16, 16, 10)
    )
    reward = keras.layers.Dense(1)
    optimizer = keras.optimizers.Adam(1e-3)
    modules = [cell, prior, posterior, decoder, reward]

    def distribution(h):
        mean, std = tf.split(h, 2, -1)
        std = tf.nn.softplus(std) + 0.1
        return mean, std, mean + std * tf.random.normal(tf.shape(mean))

    def imagine(state, action):
        hidden, _ = cell(tf.concat([state.stoch, action], -1), [state.deter])
        return State(*distribution(prior(hidden)), hidden)

    def observe(state, action, embedded):
        imagined = imagine(state, action)
        seen = State(*distribution(posterior(tf.concat([imagined.deter, embedded], -1))), imagined.deter)
        return seen, imagined

    def divergence(p, q):
        variance = (p.std**2 + (p.mean - q.mean) ** 2) / (2 * q.std**2)
        return tf.reduce_sum(tf.math.log(q.std / p.std) + variance - 0.5, -1)

    def step(observations, actions, rewards):
        with tf.GradientTape() as tape:
            state = State(*[tf.zeros([batch, n]) for n in (stoch, stoch, stoch, deter)])
            divergences, features = [], []
            for t in range(observations.shape[1]):
                state, imagined = observe(state, actions[:, t], observations[:, t])
                divergences.append(divergence(state, imagined))
                features.append(tf.concat([state.stoch, state.deter], -1))
            features = tf.stack(features, 1)
            reconstruction = tf.reduce_mean((decoder(features) - observations) ** 2)
            rewarded = tf.reduce_mean((reward(features)[..., 0] - rewards) ** 2)
            free = tf.maximum(tf.reduce_mean(tf.stack(divergences, 1)), 1.0)
            loss = reconstruction + rewarded + free
        variables = [v for module in modules for v in module.trainable_weights]
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, variables), 100.0)
        optimizer.apply_gradients(zip(gradients, variables))
        return {"reconstruction": reconstruction, "divergence": free, "norm": norm}

    rng = np.random.default_rng(0)
    shapes = [(batch, 7, 10), (batch, 7, 2), (batch, 7)]
    arguments = [tuple(rng.normal(size=s).astype("float32") for s in shapes) for _ in range(5)]
    return Example(step, lambda: ([m.variables for m in modules], optimizer.variables), arguments)


@example()
def radiance_field():
    """Rays are rendered through a network, in chunks; the error is noted in decibels."""
    network = keras.Sequential(
        [keras.Input((27,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(64, "relu"), keras.layers.Dense(4)]
    )
    optimizer = keras.optimizers.Adam(5e-4)
    noted = []

    def encode(x):
        return tf.concat([x] + [f(x * 2.0**k) for k in range(4) for f in (tf.sin, tf.cos)], -1)

    def render(origins, directions, near, far, samples):
        z = tf.linspace(near, far, samples)
        z = z + tf.random.uniform([*origins.shape[:-1], samples]) * (far - near) / samples
        points = origins[..., None, :] + directions[..., None, :] * z[..., :, None]
        flat = tf.reshape(points, [-1, 3])
        raw = tf.concat([network(encode(flat[i : i + 256])) for i in range(0, flat.shape[0], 256)], 0)
        raw = tf.reshape(raw, [*points.shape[:-1], 4])
        distances = tf.concat([z[..., 1:] - z[..., :-1], tf.broadcast_to([1e10], z[..., :1].shape)], -1)
        alpha = 1.0 - tf.exp(-tf.nn.relu(raw[..., 3]) * distances)
        weights = alpha * tf.math.cumprod(1.0 - alpha + 1e-10, -1, exclusive=True)
        return tf.reduce_sum(weights[..., None] * tf.sigmoid(raw[..., :3]), -2)

    def step(origins, directions, colours):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(render(origins, directions, 2.0, 6.0, 32) - colours))
        gradients = tape.gradient(loss, network.trainable_variables)
        optimizer.apply_gradients(zip(gradients, network.trainable_variables))
        noted.append(-10.0 * math.log10(float(loss)))
        return loss, noted[-1]

    rng = np.random.default_rng(0)
    arguments = [tuple(rng.random((32, 3)).astype("float32") for _ in range(3)) for _ in range(6)]
    return Example(step, lambda: (network.variables, optimizer.variables, list(noted)), arguments)


@dataclasses.dataclass
class Node:
    prior: float
    visits: int = 0
    value: float = 0.0
    children: dict = dataclasses.field(default_factory=dict)

    def mean(self):
        return self.value / self.visits if self.visits else 0.0


LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def winner(board):
    for a, b, c in LINES:
        if board[a] and board[a] == board[b] == board[c]:
            return board[a]
    return 0 if all(board) else None


@example()
def tree_search():
    """Noughts and crosses played by a search guided by a network, which learns from each game."""
    network = keras.Sequential([keras.Input((9,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
    optimizer, rng, games = keras.optimizers.SGD(0.01), random.Random(3), collections.deque(maxlen=200)

    def evaluate(board, player):
        out = network(tf.constant([[float(cell * player) for cell in board]]))[0]
        return tf.nn.softmax(out[:9]).numpy(), float(tf.tanh(out[9]))

    def search(start, first, simulations=6):
        root = Node(1.0)
        for _ in range(simulations):
            node, board, player, path = root, list(start), first, [root]
            while node.children:
                parent = node
                move, node = max(
                    parent.children.items(),
                    key=lambda c: c[1].mean() + 1.5 * c[1].prior * math.sqrt(parent.visits + 1) / (1 + c[1].visits),
                )
                board[move], player = player, -player
                path.append(node)
            won = winner(board)
            if won is None:
                priors, value = evaluate(board, player)
                node.children = {m: Node(float(priors[m])) for m in range(9) if not board[m]}
            else:
                value = won * player
            for node in reversed(path):
                value = -value
                node.visits, node.value = node.visits + 1, node.value + value
        return {move: child.visits for move, child in root.children.items()}

    def step():
        board, player, moves = [0] * 9, 1, []
        while winner(board) is None:
            visits = search(board, player)
            total = sum(visits.values()) or 1
            moves.append(([c * player for c in board], [visits.get(m, 0) / total for m in range(9)], player))
            board[rng.choices(list(visits), [v + 1e-3 for v in visits.values()])[0]] = player
            player = -player
        games.extend((seen, policy, float(winner(board) * by)) for seen, policy, by in moves)
        boards, policies, values = zip(*rng.sample(list(games), min(16, len(games))))
        with tf.GradientTape() as tape:
            out = network(tf.constant(boards, tf.float32), training=True)
            policy_loss = tf.nn.softmax_cross_entropy_with_logits(tf.constant(policies, tf.float32), out[:, :9])
            loss = tf.reduce_mean(policy_loss) + tf.reduce_mean((tf.tanh(out[:, 9]) - tf.constant(values)) ** 2)
        gradients = tape.gradient(loss, network.trainable_variables)
        optimizer.apply_gradients(zip(gradients, network.trainable_variables))
        return float(loss)

    return Example(step, lambda: (network.variables, optimizer.variables, len(games)), [()])


@example()
def contextual_bandit():
    """An arm is drawn by a policy that is a few operations long, and its gradient is clipped where it is large."""
    weights = tf.Variable(tf.zeros([5, 6]))
    rng, counts = np.random.default_rng(0), collections.Counter()
    truth = rng.normal(size=(5, 6))

    def step(x):
        with tf.GradientTape() as tape:
            logits = tf.linalg.matvec(weights, x)
            probabilities = np.asarray(tf.nn.softmax(logits), dtype=np.float64)
            arm = int(rng.choice(5, p=probabilities / probabilities.sum()))
            log_probabilities = tf.nn.log_softmax(logits)
            entropy = -tf.reduce_sum(tf.exp(log_probabilities) * log_probabilities)
            loss = -log_probabilities[arm] * float(truth[arm] @ np.asarray(x)) - 0.01 * entropy
        gradient = tape.gradient(loss, weights)
        if tf.norm(gradient) > 1.0:
            gradient = gradient / tf.norm(gradient)
            counts["clipped"] += 1
        weights.assign_sub(0.1 * gradient)
        counts[arm] += 1
        return loss

    arguments = [(tf.constant(x),) for x in rng.normal(size=(40, 6)).astype("float32")]
    return Example(step, lambda: (weights, sorted(map(str, counts.items()))), arguments)
