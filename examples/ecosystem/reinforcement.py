"""Gymnasium: episodes in Python, updates in TensorFlow."""

import gymnasium
import keras
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example


@example()
def policy_gradient():
    """REINFORCE on the cart pole: the step plays ten moves, and learns from them."""
    env = gymnasium.make("CartPole-v1")
    observation = [env.reset(seed=0)[0]]
    rng = np.random.default_rng(0)
    policy = keras.Sequential([keras.layers.Dense(32, "tanh"), keras.layers.Dense(2)])
    policy(observation[0][None])
    optimizer = keras.optimizers.Adam(1e-2)
    lengths = [0]

    def step():
        states, actions, rewards = [], [], []
        for _ in range(10):
            logits = policy(tf.constant(observation[0][None]))
            chances = tf.nn.softmax(logits).numpy()[0]
            action = int(rng.random() < chances[1])
            states.append(observation[0])
            actions.append(action)
            observation[0], reward, ended, cut, _ = env.step(action)
            rewards.append(reward)
            lengths[-1] += 1
            if ended or cut:
                observation[0] = env.reset()[0]
                lengths.append(0)
                rewards[-1] = -5.0
        returns, total = [], 0.0
        for reward in reversed(rewards):
            total = reward + 0.95 * total
            returns.insert(0, total)
        returns = np.asarray(returns, np.float32)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(actions, policy(np.stack(states)))
            loss = tf.reduce_mean(losses * returns)
        gradients = tape.gradient(loss, policy.trainable_variables)
        optimizer.apply_gradients(zip(gradients, policy.trainable_variables))
        return loss

    return Example(step, lambda: (policy.variables, lengths), [()])


@example()
def actor_critic_pendulum():
    """Advantage actor-critic with a normal policy on the pendulum, five moves a step."""
    env = gymnasium.make("Pendulum-v1")
    observation = [env.reset(seed=1)[0]]
    shared = keras.layers.Dense(64, "relu")
    mean, value = keras.layers.Dense(1), keras.layers.Dense(1)
    log_std = tf.Variable([0.0])
    for head in (mean, value):
        head(shared(observation[0][None]))
    optimizer = keras.optimizers.RMSprop(1e-3)
    earned = []

    def step():
        log_probs, values, rewards = [], [], []
        with tf.GradientTape() as tape:
            for _ in range(5):
                features = shared(tf.convert_to_tensor(observation[0][None]))
                centre, spread = mean(features), tf.exp(log_std)
                action = tf.stop_gradient(centre + spread * tf.random.normal([1, 1]))
                log_probs.append(-0.5 * tf.square((action - centre) / spread) - log_std)
                values.append(value(features)[0, 0])
                move = np.clip(action.numpy()[0], -2.0, 2.0)
                observation[0], reward, ended, cut, _ = env.step(move)
                rewards.append(reward / 10.0)
                if ended or cut:
                    observation[0] = env.reset()[0]
            target, targets = 0.0, []
            for reward in rewards[::-1]:
                target = reward + 0.9 * target
                targets.append(target)
            targets = tf.constant(targets[::-1], tf.float32)
            advantage = targets - tf.stack(values)
            actor = -tf.reduce_mean(tf.concat(log_probs, 0)[:, 0] * tf.stop_gradient(advantage))
            loss = actor + 0.5 * tf.reduce_mean(tf.square(advantage))
        variables = [*shared.trainable_variables, *mean.trainable_variables, *value.trainable_variables, log_std]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        earned.append(float(sum(rewards)))
        return loss

    return Example(step, lambda: (shared.variables, mean.variables, value.variables, log_std, len(earned)), [()])
