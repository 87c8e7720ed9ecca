"""Programs that choose: two actions, a true or a sampled word, an image of this call or of an earlier one, to train."""

import random

import keras
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example


@example()
def episodes_of_two_actions():
    """REINFORCE: each of three to five steps picks one of two log-probabilities, by an environment in NumPy."""
    policy = keras.Sequential([keras.layers.Dense(16, "tanh"), keras.layers.Dense(2)])
    policy.build((None, 3))
    optimizer = keras.optimizers.Adam(1e-2)
    environment, dice, returns = np.random.RandomState(0), random.Random(1), []

    def episode(length):
        state, chosen, rewards = environment.normal(size=3), [], []
        for _ in range(length):
            logits = policy(state[None].astype("float32"))[0]
            action = int(dice.random() < tf.nn.softmax(logits).numpy()[1])
            chosen.append(tf.nn.log_softmax(logits)[action])
            rewards.append(float(state[action] - state[1 - action]))
            state = 0.9 * state + 0.1 * environment.normal(size=3)
            if rewards[-1] < -2.5:
                break
        return chosen, rewards

    def step(length):
        with tf.GradientTape() as tape:
            chosen, rewards = episode(length)
            future = np.cumsum(rewards[::-1])[::-1].astype("float32")
            baseline = np.mean(returns[-4:]) if returns else 0.0
            loss = -tf.reduce_sum(tf.stack(chosen) * (future - np.float32(baseline)))
        returns.append(future[0])
        gradients = tape.gradient(loss, policy.trainable_weights)
        optimizer.apply_gradients(zip(gradients, policy.trainable_weights))
        return loss, len(rewards)

    return Example(step, lambda: (policy.variables, optimizer.variables, returns), [(3,), (4,), (5,)])


@example()
def scheduled_sampling():
    """A decoder is given the true word or its own at each of six steps, whichever a coin says."""
    embedding, cell, head = keras.layers.Embedding(20, 16), keras.layers.GRUCell(24), keras.layers.Dense(20)
    embedding.build()
    cell.build((None, 16))
    head.build((None, 24))
    optimizer, coin = keras.optimizers.Adam(), random.Random(2)
    variables = [*embedding.trainable_variables, *cell.trainable_variables, *head.trainable_variables]

    def step(words):
        with tf.GradientTape() as tape:
            hidden, word, loss = tf.zeros([8, 24]), words[:, 0], 0.0
            for position in range(1, words.shape[1]):
                output, [hidden] = cell(embedding(word), [hidden])
                logits, truth = head(output), words[:, position]
                loss += tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=truth, logits=logits))
                word = truth if coin.random() < 0.7 else tf.argmax(logits, -1, output_type=tf.int32)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    rng = np.random.default_rng(3)
    arguments = [(tf.constant(rng.integers(0, 20, (8, 7)), tf.int32),) for _ in range(4)]
    return Example(step, lambda: (variables, optimizer.variables), arguments)


@example()
def critic_with_a_pool_of_images():
    """A GAN whose critic sees each image of this call, or one of an earlier call that it takes the place of."""
    layer = keras.layers.Dense
    generator = keras.Sequential([layer(64, "relu"), layer(64, "silu"), layer(36)])
    critic = keras.Sequential([layer(64, "silu"), layer(64), keras.layers.LeakyReLU(), layer(1)])
    generator.build((None, 8))
    critic.build((None, 36))
    optimizers = keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3)
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    pool, dice, losses = [], random.Random(5), []

    def mixed(images):
        for image in tf.unstack(images):
            if len(pool) < 20:
                pool.append(image)
            elif dice.random() < 0.5:
                place = dice.randrange(len(pool))
                pool[place], image = image, pool[place]
            yield image

    def train(optimizer, tape, loss, variables):
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    def step(real):
        with tf.GradientTape() as tape:
            fake = generator(tf.random.normal([8, 8]), training=True)
            judged = critic(fake, training=True)
            loss = entropy(tf.ones_like(judged), judged)
        train(optimizers[0], tape, loss, generator.trainable_variables)
        seen = tf.stack(list(mixed(fake)))
        with tf.GradientTape() as tape:
            true, false = critic(real, training=True), critic(seen, training=True)
            doubt = entropy(tf.ones_like(true), true) + entropy(tf.zeros_like(false), false)
        train(optimizers[1], tape, doubt, critic.trainable_variables)
        losses.append((float(loss), float(doubt)))
        return losses[-1]

    rng = np.random.default_rng(4)
    arguments = [(tf.constant(rng.normal(size=(8, 36)), tf.float32),) for _ in range(6)]
    return Example(step, lambda: (generator.variables, critic.variables, losses), arguments)


@example()
def agent_that_trains_every_fourth_call():
    """A deep Q network acts in each call, and learns from a replay buffer in one of four."""
    online = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(64, "relu"), keras.layers.Dense(3)])
    online.build((None, 6))
    target = keras.models.clone_model(online)
    target.build((None, 6))
    optimizer = keras.optimizers.Adam(1e-3)
    rng, buffer = np.random.default_rng(0), []

    def learn():
        batch = random.Random(len(buffer)).sample(buffer, 16)
        states, actions, rewards, following = map(np.array, zip(*batch))
        with tf.GradientTape() as tape:
            wanted = rewards.astype("float32") + 0.99 * tf.reduce_max(target(following), 1)
            values = tf.reduce_sum(online(states) * tf.one_hot(actions, 3), 1)
            loss = tf.reduce_mean((values - wanted) ** 2)
        gradients = tape.gradient(loss, online.trainable_variables)
        optimizer.apply_gradients(zip(gradients, online.trainable_variables))
        return float(loss)

    def step(state):
        action = int(rng.integers(3)) if rng.random() < 0.2 else int(tf.argmax(online(state[None])[0]))
        buffer.append((state, action, float(state.sum()), rng.normal(size=6).astype("float32")))
        loss = learn() if len(buffer) > 16 and len(buffer) % 4 == 0 else None
        if len(buffer) % 50 == 0:
            target.set_weights(online.get_weights())
        return action, loss

    arguments = [(state,) for state in np.random.default_rng(3).normal(size=(40, 6)).astype("float32")]
    return Example(step, lambda: (online.variables, optimizer.variables, len(buffer)), arguments)
