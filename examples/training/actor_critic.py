"""Actor-critic: an agent learns to walk to the end of a corridor, an environment written in plain Python.

python -m examples.training.actor_critic
"""

import random

import keras
import numpy as np
import tensorflow as tf

import coexec

LENGTH, STEPS = 6, 16


class Corridor:
    """Left or right; the goal is at the right end, and the floor is slippery."""

    def reset(self) -> int:
        """Goes to the left end."""
        self.at = 0
        return self.at

    def move(self, action: int) -> tuple[int, float, bool]:
        """Returns where that leads, the reward, and whether the goal is reached."""
        slip = random.random() < 0.1
        self.at = min(max(self.at + (1 if (action == 1) != slip else -1), 0), LENGTH - 1)
        done = self.at == LENGTH - 1
        return self.at, (1.0 if done else -0.05), done


class Agent:
    """A policy and a value for each place, learnt from the steps of the latest walk."""

    def __init__(self) -> None:
        layers = keras.layers
        inputs = keras.Input((LENGTH,))
        hidden = layers.Dense(32, "tanh")(inputs)
        self.network = keras.Model(inputs, [layers.Dense(2)(hidden), layers.Dense(1)(hidden)])
        self.optimizer = keras.optimizers.Adam(0.02)
        self.world, self.place, self.goals = Corridor(), 0, 0
        self.place = self.world.reset()

    @coexec.function
    def walk_and_learn(self) -> float:
        """Walks some steps, each chosen by reading the policy, and learns from them; returns the loss."""
        places, actions, rewards, ends = [], [], [], []
        for _ in range(STEPS):
            logits, _ = self.network(tf.one_hot([self.place], LENGTH))
            odds = tf.nn.softmax(logits[0]).numpy()
            action = int(random.random() < odds[1])
            after, reward, done = self.world.move(action)
            places, actions = [*places, self.place], [*actions, action]
            rewards, ends = [*rewards, reward], [*ends, done]
            self.goals += done
            self.place = self.world.reset() if done else after
        _, last = self.network(tf.one_hot([self.place], LENGTH))
        gains, gain = [], float(last[0, 0])
        for reward, end in zip(reversed(rewards), reversed(ends), strict=True):
            gain = reward + 0.9 * gain * (not end)
            gains.append(gain)
        returns = tf.constant(np.array(gains[::-1], np.float32))
        with tf.GradientTape() as tape:
            logits, values = self.network(tf.one_hot(places, LENGTH))
            advantage = returns - values[:, 0]
            chosen = tf.reduce_sum(tf.nn.log_softmax(logits) * tf.one_hot(actions, 2), axis=1)
            loss = tf.reduce_mean(advantage**2) - tf.reduce_mean(chosen * tf.stop_gradient(advantage))
        variables = self.network.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return float(loss)


def train(steps: int) -> list[float]:
    """Trains and returns the loss of each walk."""
    keras.utils.set_random_seed(0)
    agent = Agent()
    return [agent.walk_and_learn() for _ in range(steps)]


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in train(60)))
