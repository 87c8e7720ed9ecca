"""A DQN's update, with a target network."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training


def dqn(function):
    keras.utils.set_random_seed(0)
    numbers = np.random.default_rng(0)
    layers = keras.layers
    online = keras.Sequential([keras.Input((4,)), layers.Dense(32, "relu"), layers.Dense(2)])
    target = keras.Sequential([keras.Input((4,)), layers.Dense(32, "relu"), layers.Dense(2)])
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(online.trainable_variables)
    states = tf.constant(numbers.normal(size=(32, 4)), tf.float32)
    actions = tf.constant(numbers.integers(2, size=32), tf.int32)
    rewards = tf.constant(numbers.normal(size=32), tf.float32)
    following = tf.constant(numbers.normal(size=(32, 4)), tf.float32)
    gamma = 0.99

    @function
    def train(states, actions, rewards, following):
        wanted = rewards + gamma * tf.reduce_max(target(following), axis=1)
        with tf.GradientTape() as tape:
            chosen = tf.reduce_sum(online(states) * tf.one_hot(actions, 2), axis=1)
            loss = tf.reduce_mean(tf.square(wanted - chosen))
        variables = online.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return float(loss)

    return Training(
        step=lambda: train(states, actions, rewards, following),
        state=lambda: (online.variables, target.variables, optimizer.variables),
    )
