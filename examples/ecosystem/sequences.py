"""Plain TensorFlow on sequences: recurrences and attention by hand, a filter, a random field, text."""

import keras
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example


@example()
def einsum_attention():
    """Attention with many heads in Einstein sums, and a mask by `tf.linalg.band_part`."""
    rng, heads, size = np.random.default_rng(0), 4, 16
    draw = lambda *shape: tf.Variable(tf.random.normal(shape, stddev=0.05))  # noqa: E731
    wq, wk, wv, wo = draw(64, heads, size), draw(64, heads, size), draw(64, heads, size), draw(heads, size, 64)
    w1, w2 = draw(64, 128), draw(128, 64)
    weights = [wq, wk, wv, wo, w1, w2]
    optimizer = keras.optimizers.Adam(1e-3)
    arguments = [(tf.constant(rng.normal(size=(8, 24, 64)), tf.float32),) for _ in range(4)]

    def norm(x):
        mean, variance = tf.nn.moments(x, axes=[-1], keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + 1e-5)

    def block(x):
        q, k, v = (tf.einsum("bte,ehd->bhtd", norm(x), w) for w in (wq, wk, wv))
        scores = tf.einsum("bhtd,bhsd->bhts", q, k) / size**0.5
        length = tf.shape(x)[1]
        mask = tf.linalg.band_part(tf.ones((length, length)), -1, 0)
        attention = tf.nn.softmax(tf.where(mask > 0, scores, -1e9))
        x = x + tf.einsum("bhtd,hde->bte", tf.einsum("bhts,bhsd->bhtd", attention, v), wo)
        return x + tf.nn.gelu(norm(x) @ w1) @ w2

    def step(x):
        with tf.GradientTape() as tape:
            y = x
            for _ in range(2):
                y = block(y)
            loss = tf.reduce_mean((y[:, :-1] - x[:, 1:]) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    return Example(step, lambda: (weights, optimizer.variables), arguments)


@example()
def gru_by_hand():
    """A recurrent cell of raw operations over twelve steps, its states kept in a list."""
    rng, hidden = np.random.default_rng(0), 32
    draw = lambda *shape: tf.Variable(tf.random.normal(shape, stddev=0.1))  # noqa: E731
    wz, wr, wh, out = draw(8 + hidden, hidden), draw(8 + hidden, hidden), draw(8 + hidden, hidden), draw(hidden, 1)
    weights = [wz, wr, wh, out]
    optimizer = keras.optimizers.Adam(1e-3)
    arguments = [
        (tf.constant(rng.normal(size=(16, 12, 8)), tf.float32), tf.constant(rng.normal(size=(16, 12)), tf.float32))
        for _ in range(4)
    ]

    def step(x, y):
        with tf.GradientTape() as tape:
            state, outputs = tf.zeros([x.shape[0], hidden]), []
            for t in range(x.shape[1]):
                both = tf.concat([x[:, t], state], axis=1)
                update, reset = tf.sigmoid(both @ wz), tf.sigmoid(both @ wr)
                candidate = tf.tanh(tf.concat([x[:, t], reset * state], axis=1) @ wh)
                state = (1 - update) * state + update * candidate
                outputs.append(state)
            predicted = tf.squeeze(tf.stack(outputs, axis=1) @ out, -1)
            loss = tf.reduce_mean(tf.square(predicted - y))
        gradients = tape.gradient(loss, weights)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        optimizer.apply_gradients(zip(gradients, weights))
        return loss.numpy()

    return Example(step, lambda: (weights, optimizer.variables), arguments)


@example()
def kalman_filter():
    """A filter that tracks a point through twenty noisy observations; Python keeps the path."""
    rng = np.random.default_rng(0)
    move = tf.constant([[1.0, 0, 0.1, 0], [0, 1, 0, 0.1], [0, 0, 1, 0], [0, 0, 0, 1]])
    see = tf.constant([[1.0, 0, 0, 0], [0, 1, 0, 0]])
    process, noise = 0.01 * tf.eye(4), 0.1 * tf.eye(2)
    arguments = [(tf.constant(np.cumsum(rng.normal(size=(20, 2)), 0), tf.float32),) for _ in range(4)]
    ends = []

    def step(observations):
        mean, covariance = tf.zeros([4, 1]), tf.eye(4)
        likelihood, path = 0.0, []
        for seen in tf.unstack(observations):
            mean, covariance = move @ mean, move @ covariance @ tf.transpose(move) + process
            surprise = seen[:, None] - see @ mean
            spread = see @ covariance @ tf.transpose(see) + noise
            gain = covariance @ tf.transpose(see) @ tf.linalg.inv(spread)
            mean, covariance = mean + gain @ surprise, (tf.eye(4) - gain @ see) @ covariance
            quadratic = tf.squeeze(tf.transpose(surprise) @ tf.linalg.solve(spread, surprise))
            likelihood -= 0.5 * (quadratic + tf.linalg.logdet(spread))
            path.append(mean[:2, 0])
        ends.append(path[-1].numpy().tolist())
        return likelihood, tf.stack(path)

    return Example(step, lambda: ends, arguments)


@example()
def conditional_random_field():
    """A tagger: the log partition by a forward recursion, and Viterbi's best path in NumPy."""
    rng, tags, length = np.random.default_rng(0), 5, 10
    encoder = keras.layers.Dense(tags)
    transitions = tf.Variable(tf.random.normal([tags, tags], stddev=0.1))
    optimizer = keras.optimizers.Adam(1e-2)
    arguments = [
        (tf.constant(rng.normal(size=(8, length, 12)), tf.float32), tf.constant(rng.integers(0, tags, (8, length))))
        for _ in range(4)
    ]
    encoder(arguments[0][0])
    right = []

    def score(unary, labels):
        emitted = tf.reduce_sum(tf.gather(unary, labels, batch_dims=2), axis=1)
        pairs = tf.stack([labels[:, :-1], labels[:, 1:]], axis=-1)
        return emitted + tf.reduce_sum(tf.gather_nd(transitions, pairs), axis=1)

    def log_partition(unary):
        alpha = unary[:, 0]
        for t in range(1, unary.shape[1]):
            alpha = tf.reduce_logsumexp(alpha[:, :, None] + transitions[None], axis=1) + unary[:, t]
        return tf.reduce_logsumexp(alpha, axis=1)

    def viterbi(unary, moves):
        trellis, back = unary[0], []
        for row in unary[1:]:
            reached = trellis[:, None] + moves
            back.append(reached.argmax(0))
            trellis = reached.max(0) + row
        best = [int(trellis.argmax())]
        for row in reversed(back):
            best.append(int(row[best[-1]]))
        return best[::-1]

    def step(features, labels):
        with tf.GradientTape() as tape:
            unary = encoder(features)
            loss = tf.reduce_mean(log_partition(unary) - score(unary, labels))
        variables = [*encoder.trainable_variables, transitions]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        best = viterbi(unary[0].numpy(), transitions.numpy())
        right.append(sum(a == b for a, b in zip(best, labels[0].numpy())))
        return loss

    return Example(step, lambda: (encoder.variables, transitions, right), arguments)


@example()
def text_with_tables():
    """Sentences are split and looked up in a table, ragged, averaged and classified."""
    words = "the a good bad film was not very plot actor boring great".split()
    rng = np.random.default_rng(0)
    table = tf.lookup.StaticVocabularyTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant(words), tf.range(len(words), dtype=tf.int64)), 4
    )
    embedding = tf.Variable(tf.random.normal([len(words) + 4, 16], stddev=0.1))
    head = keras.layers.Dense(1)
    optimizer = keras.optimizers.Adagrad(0.05)
    sentences = [[" ".join(rng.choice([*words, "Zebra", "Film!"], 7)) for _ in range(16)] for _ in range(4)]
    arguments = [(tf.constant(s), tf.constant([[float("good" in t)] for t in s])) for s in sentences]
    head(tf.zeros([1, 16]))
    accuracy = keras.metrics.BinaryAccuracy(threshold=0.0)

    def step(text, labels):
        clean = tf.strings.regex_replace(tf.strings.lower(text), r"[^a-z ]", "")
        tokens = tf.strings.split(clean)
        numbers = table.lookup(tokens.to_tensor(""))
        mask = tf.cast(tf.sequence_mask(tokens.row_lengths()), tf.float32)[..., None]
        with tf.GradientTape() as tape:
            vectors = tf.nn.embedding_lookup(embedding, numbers)
            mean = tf.reduce_sum(vectors * mask, axis=1) / tf.reduce_sum(mask, axis=1)
            logits = head(mean)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
        variables = [embedding, *head.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        accuracy.update_state(labels, logits)
        return loss, accuracy.result()

    return Example(step, lambda: (embedding, head.variables, accuracy.variables), arguments)
