"""Sequences that are written token by token: attention with a cache, beams, tapes to write on, blanks."""

import heapq
import math

import keras
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example


def positional_encoding(length, depth):
    depth = depth / 2
    positions = np.arange(length)[:, np.newaxis]
    depths = np.arange(depth)[np.newaxis, :] / depth
    angle_rads = positions * (1 / (10000**depths))
    return tf.cast(np.concatenate([np.sin(angle_rads), np.cos(angle_rads)], axis=-1), dtype=tf.float32)


class CausalSelfAttention(keras.layers.Layer):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head, self.n_embd = n_head, n_embd
        self.c_attn = keras.layers.Dense(3 * n_embd)
        self.c_proj = keras.layers.Dense(n_embd)

    def call(self, x, past=None):
        b, t = tf.shape(x)[0], x.shape[1]
        q, k, v = tf.split(self.c_attn(x), 3, axis=-1)
        q, k, v = (
            tf.transpose(tf.reshape(z, (b, t, self.n_head, self.n_embd // self.n_head)), (0, 2, 1, 3))
            for z in (q, k, v)
        )
        if past is not None:
            k, v = tf.concat([past[0], k], axis=-2), tf.concat([past[1], v], axis=-2)
        present = (k, v)
        att = tf.matmul(q, k, transpose_b=True) * (1.0 / math.sqrt(k.shape[-1]))
        mask = tf.linalg.band_part(tf.ones((t, k.shape[2])), -1, k.shape[2] - t)
        att = tf.where(mask == 0, float("-inf"), att)
        y = tf.matmul(tf.nn.softmax(att, axis=-1), v)
        y = tf.reshape(tf.transpose(y, (0, 2, 1, 3)), (b, t, self.n_embd))
        return self.c_proj(y), present


class Block(keras.layers.Layer):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1, self.ln_2 = keras.layers.LayerNormalization(), keras.layers.LayerNormalization()
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.mlp = keras.Sequential([keras.layers.Dense(4 * n_embd, "gelu"), keras.layers.Dense(n_embd)])

    def call(self, x, past=None):
        y, present = self.attn(self.ln_1(x), past=past)
        x = x + y
        return x + self.mlp(self.ln_2(x)), present


@example()
def transformer_sampling():
    """A decoder written after nanoGPT that samples eight tokens with a cache of keys and values, by top-k."""
    vocab, n_embd = 50, 32
    wte = tf.Variable(tf.random.normal([vocab, n_embd], stddev=0.5))
    pe = positional_encoding(32, n_embd)
    blocks = [Block(n_embd, 4) for _ in range(2)]
    ln_f = keras.layers.LayerNormalization()
    rng = np.random.default_rng(0)
    texts = []

    def forward(tokens, pasts):
        start = 0 if pasts is None else pasts[0][0].shape[2]
        x = tf.nn.embedding_lookup(wte, tokens) + pe[start : start + tokens.shape[1]]
        presents = []
        for i, block in enumerate(blocks):
            x, present = block(x, past=None if pasts is None else pasts[i])
            presents.append(present)
        return tf.matmul(ln_f(x), wte, transpose_b=True), presents

    forward(tf.zeros([1, 2], tf.int32), None)

    def step(prompt, temperature):
        out, pasts, tokens = prompt, None, prompt
        for _ in range(8):
            logits, pasts = forward(tokens, pasts)
            logits = logits[:, -1, :] / temperature
            v, _ = tf.math.top_k(logits, 10)
            logits = tf.where(logits < v[:, -1:], -float("inf"), logits)
            tokens = tf.random.categorical(logits, num_samples=1, dtype=tf.int32)
            out = tf.concat([out, tokens], axis=1)
        texts.append(" ".join(map(str, out.numpy()[0].tolist())))
        return out

    arguments = [(tf.constant(rng.integers(0, vocab, (2, 5)), tf.int32), 0.8) for _ in range(4)]
    return Example(step, lambda: texts, arguments)


@example()
def translation_beam_search():
    """A GRU decoder with Bahdanau's attention, whose beams Python keeps in a heap until they end."""
    rng = np.random.default_rng(1)
    vocab, units, end = 20, 24, 1
    embedding, encoder = (
        keras.layers.Embedding(vocab, 16),
        keras.layers.GRU(units, return_sequences=True, return_state=True),
    )
    cell, head = keras.layers.GRUCell(units), keras.layers.Dense(vocab)
    w1, w2, v = keras.layers.Dense(units), keras.layers.Dense(units), keras.layers.Dense(1)

    def decode_one(token, state, memory):
        score = v(tf.nn.tanh(w1(tf.expand_dims(state, 1)) + w2(memory)))
        weights = tf.nn.softmax(score, axis=1)
        context = tf.reduce_sum(weights * memory, axis=1)
        x = tf.concat([context, embedding(tf.constant([token]))], axis=-1)
        out, (state,) = cell(x, [state])
        return tf.nn.log_softmax(head(out))[0], state

    def step(sentence):
        memory, state = encoder(embedding(sentence))
        beams, finished = [(0.0, [0], state)], []
        for _ in range(6):
            candidates = []
            for score, tokens, state in beams:
                log_probs, new_state = decode_one(tokens[-1], state, memory)
                log_probs = log_probs.numpy()
                for token in np.argsort(-log_probs, kind="stable")[:3]:
                    candidates.append((score + float(log_probs[token]), [*tokens, int(token)], new_state))
            beams = []
            for candidate in heapq.nlargest(3, candidates, key=lambda c: c[0]):
                (finished if candidate[1][-1] == end else beams).append(candidate)
            if not beams:
                break
        best = max(finished + beams, key=lambda c: c[0] / len(c[1]))
        return best[0], best[1]

    arguments = [(tf.constant(rng.integers(2, vocab, (1, n))),) for n in (7, 5, 7, 9)]
    step(arguments[0][0])
    return Example(step, lambda: head.variables, arguments)


@example(rtol=1e-2, atol=1e-3)
def neural_turing_machine():
    """A controller that reads and writes a memory by content and by shifting, trained to copy."""
    rng = np.random.default_rng(2)
    n, m, width = 12, 8, 4
    controller = keras.layers.LSTMCell(32)
    head_params, out_layer = keras.layers.Dense((m + 1 + 1 + 3 + 1) * 2 + 2 * m), keras.layers.Dense(width)
    optimizer = keras.optimizers.RMSprop(1e-3, momentum=0.9)
    bias = tf.constant(np.random.default_rng(0).normal(0, 0.1, (n, m)), tf.float32)

    def address(params, w_prev, memory):
        k, beta, g, s, gamma = tf.split(params, [m, 1, 1, 3, 1], axis=1)
        k, beta, g = tf.tanh(k), tf.nn.softplus(beta), tf.sigmoid(g)
        s, gamma = tf.nn.softmax(s), 1 + tf.nn.softplus(gamma)
        inner = tf.squeeze(tf.matmul(memory, tf.expand_dims(k, 2)), 2)
        norms = tf.norm(memory, axis=2) * tf.norm(k, axis=1, keepdims=True)
        w_c = tf.nn.softmax(beta * inner / (norms + 1e-8))
        w_g = g * w_c + (1 - g) * w_prev
        w_s = s[:, 0:1] * tf.roll(w_g, 1, axis=1) + s[:, 1:2] * w_g + s[:, 2:3] * tf.roll(w_g, -1, axis=1)
        w = tf.pow(w_s + 1e-8, gamma)
        return w / tf.reduce_sum(w, axis=1, keepdims=True)

    def run(x):
        batch = x.shape[0]
        memory = tf.tile(bias[None], [batch, 1, 1])
        w_r = w_w = tf.one_hot(tf.zeros([batch], tf.int32), n)
        read, state, outputs = tf.zeros([batch, m]), [tf.zeros([batch, 32])] * 2, []
        for t in range(x.shape[1]):
            h, state = controller(tf.concat([x[:, t], read], 1), state)
            params = head_params(h)
            width_ = m + 6
            w_r = address(params[:, :width_], w_r, memory)
            w_w = address(params[:, width_ : 2 * width_], w_w, memory)
            erase, add = tf.split(params[:, 2 * width_ :], 2, axis=1)
            memory *= 1 - tf.einsum("bn,bm->bnm", w_w, tf.sigmoid(erase))
            memory += tf.einsum("bn,bm->bnm", w_w, tf.tanh(add))
            read = tf.reduce_sum(tf.expand_dims(w_r, 2) * memory, 1)
            outputs.append(out_layer(tf.concat([h, read], 1)))
        return tf.stack(outputs, 1)

    def sequence(length=3):
        bits = rng.integers(0, 2, (4, length, width)).astype(np.float32)
        blank = np.zeros_like(bits)
        return tf.constant(np.concatenate([bits, blank], 1)), tf.constant(bits)

    arguments = [sequence() for _ in range(4)]
    run(arguments[0][0])

    def step(x, y):
        with tf.GradientTape() as tape:
            logits = run(x)[:, -y.shape[1] :]
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=logits))
        variables = controller.trainable_variables + head_params.trainable_variables + out_layer.trainable_variables
        grads = [tf.clip_by_value(g, -10, 10) for g in tape.gradient(loss, variables)]
        optimizer.apply_gradients(zip(grads, variables))
        errors = np.abs((tf.sigmoid(logits).numpy() > 0.5) - y.numpy()).sum()
        return loss, errors

    return Example(step, lambda: (controller.variables, out_layer.variables), arguments)


@example(rtol=1e-2, atol=1e-3)
def ctc_speech():
    """A small recogniser under CTC; its greedy path and edit distance are reported every fifth step."""
    rng = np.random.default_rng(3)
    alphabet = "abcdefgh"
    model = keras.Sequential(
        [keras.layers.Conv1D(24, 5, strides=2, padding="same", activation="relu"),
         keras.layers.Bidirectional(keras.layers.GRU(16, return_sequences=True)), keras.layers.Dense(len(alphabet) + 1)]
    )  # fmt: skip
    optimizer = keras.optimizers.Adam(3e-3)

    def batch():
        lengths = rng.integers(2, 5, 4)
        labels = np.zeros((4, 4), np.int32)
        for row, length in zip(labels, lengths):
            row[:length] = rng.integers(0, len(alphabet), length)
        return tf.constant(rng.normal(size=(4, 30, 8)), tf.float32), tf.constant(labels), tf.constant(lengths, tf.int32)

    arguments = [batch() for _ in range(4)]
    model(arguments[0][0])
    seen, distances = [0], []

    def step(audio, labels, lengths):
        with tf.GradientTape() as tape:
            logits = model(audio, training=True)
            time = tf.fill([tf.shape(logits)[0]], tf.shape(logits)[1])
            loss = tf.reduce_mean(
                tf.nn.ctc_loss(labels, logits, lengths, time, logits_time_major=False, blank_index=-1)
            )
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 5.0)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        seen[0] += 1
        if seen[0] % 5 == 0:
            (decoded,), _ = tf.nn.ctc_greedy_decoder(tf.transpose(logits, [1, 0, 2]), time)
            truth = tf.sparse.from_dense(labels + 1)
            guess = tf.sparse.SparseTensor(decoded.indices, tf.cast(decoded.values, tf.int32) + 1, decoded.dense_shape)
            distances.append(float(tf.reduce_mean(tf.edit_distance(guess, truth))))
            text = tf.sparse.to_dense(decoded, default_value=-1).numpy()
            print("".join(alphabet[c] for c in text[0] if c >= 0), file=open("/dev/null", "w"))
        return loss

    return Example(step, lambda: (model.variables, len(distances)), arguments)


@example()
def curriculum_of_lengths():
    """An adding problem whose sequences grow when the loss has fallen; a GRU of raw variables over them."""
    rng = np.random.default_rng(4)
    units = 16
    names = ["wz", "wr", "wh"]
    p = {name: tf.Variable(tf.random.normal([units + 2, units], stddev=0.3), name=name) for name in names}
    p["out"] = tf.Variable(tf.random.normal([units, 1], stddev=0.3))
    optimizer = keras.optimizers.Adam(1e-2)
    progress = {"length": 3, "losses": [], "since": 0}

    def batch(length):
        values, marks = rng.uniform(size=(16, length)), np.zeros((16, length))
        for row in marks:
            row[rng.choice(length, 2, replace=False)] = 1
        return np.stack([values, marks], -1).astype(np.float32), (values * marks).sum(1, keepdims=True).astype(
            np.float32
        )

    def cell(x, h):
        xh = tf.concat([x, h], 1)
        z, r = tf.sigmoid(xh @ p["wz"]), tf.sigmoid(xh @ p["wr"])
        candidate = tf.tanh(tf.concat([x, r * h], 1) @ p["wh"])
        return (1 - z) * h + z * candidate

    def step():
        x, y = batch(progress["length"])
        with tf.GradientTape() as tape:
            h = tf.zeros([16, units])
            for x_t in tf.unstack(tf.constant(x), axis=1):
                h = cell(x_t, h)
            loss = tf.reduce_mean((h @ p["out"] - y) ** 2)
        variables = list(p.values())
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        progress["losses"].append(float(loss))
        progress["since"] += 1
        if progress["since"] >= 12:
            progress["length"] = min(progress["length"] + 1, 7)
            progress["since"] = 0
        return progress["losses"][-1]

    return Example(step, lambda: (p, progress["length"]), [()])
