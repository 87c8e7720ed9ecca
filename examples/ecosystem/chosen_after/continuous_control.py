"""Reinforcement learning with the environment, the replay memory and the returns in NumPy, after Spinning Up."""

import dataclasses
import random
from collections import deque

import keras
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example


class PointMass:
    """A mass on a line that is to be pushed to the origin."""

    def __init__(self, seed=0, limit=40):
        self.rng = np.random.default_rng(seed)
        self.limit = limit
        self.reset()

    def reset(self):
        self.position, self.velocity, self.time = self.rng.uniform(-1, 1), 0.0, 0
        return self.observation

    @property
    def observation(self):
        return np.array([self.position, self.velocity, np.sign(self.position)], np.float32)

    def step(self, force):
        force = float(np.clip(force, -1, 1))
        self.velocity += 0.1 * force
        self.position += 0.1 * self.velocity
        self.time += 1
        reward = -(self.position**2) - 0.01 * force**2
        return self.observation, reward, self.time >= self.limit or abs(self.position) > 2


class ReplayBuffer:
    """A first-in, first-out buffer of experience."""

    def __init__(self, obs_dim, act_dim, size):
        self.obs_buf = np.zeros((size, obs_dim), dtype=np.float32)
        self.obs2_buf = np.zeros((size, obs_dim), dtype=np.float32)
        self.act_buf = np.zeros((size, act_dim), dtype=np.float32)
        self.rew_buf = np.zeros(size, dtype=np.float32)
        self.done_buf = np.zeros(size, dtype=np.float32)
        self.ptr, self.size, self.max_size = 0, 0, size

    def store(self, obs, act, rew, next_obs, done):
        self.obs_buf[self.ptr] = obs
        self.obs2_buf[self.ptr] = next_obs
        self.act_buf[self.ptr] = act
        self.rew_buf[self.ptr] = rew
        self.done_buf[self.ptr] = done
        self.ptr = (self.ptr + 1) % self.max_size
        self.size = min(self.size + 1, self.max_size)

    def sample_batch(self, batch_size=32):
        idxs = np.random.randint(0, self.size, size=batch_size)
        return dict(obs=self.obs_buf[idxs], obs2=self.obs2_buf[idxs], act=self.act_buf[idxs], rew=self.rew_buf[idxs],
                    done=self.done_buf[idxs])  # fmt: skip


def mlp(sizes, activation="relu", output_activation=None):
    layers = [keras.layers.Dense(size, activation) for size in sizes[1:-1]]
    net = keras.Sequential([*layers, keras.layers.Dense(sizes[-1], output_activation)])
    net.build((None, sizes[0]))
    return net


LOG_STD_MIN, LOG_STD_MAX = -20, 2


@example(rtol=1e-2, atol=1e-3)
def soft_actor_critic():
    """SAC: a squashed normal policy, two critics, a temperature that is learnt, targets that follow slowly."""
    env, memory = PointMass(), ReplayBuffer(3, 1, 1000)
    policy, q1, q2 = mlp([3, 64, 64, 2]), mlp([4, 64, 64, 1]), mlp([4, 64, 64, 1])
    q1_target, q2_target = keras.models.clone_model(q1), keras.models.clone_model(q2)
    q1_target.set_weights(q1.get_weights())
    q2_target.set_weights(q2.get_weights())
    log_alpha = tf.Variable(0.0)
    target_entropy = -1.0
    pi_optimizer, q_optimizer, alpha_optimizer = (keras.optimizers.Adam(3e-4) for _ in range(3))
    gamma, polyak = 0.99, 0.995
    o = [env.reset()]
    for _ in range(64):
        a = np.random.uniform(-1, 1, 1)
        o2, r, d = env.step(a[0])
        memory.store(o[0], a, r, o2, d)
        o[0] = env.reset() if d else o2

    def pi(obs):
        mu, log_std = tf.split(policy(obs), 2, axis=-1)
        log_std = tf.clip_by_value(log_std, LOG_STD_MIN, LOG_STD_MAX)
        std = tf.exp(log_std)
        u = mu + tf.random.normal(tf.shape(mu)) * std
        logp = tf.reduce_sum(-0.5 * (((u - mu) / (std + 1e-8)) ** 2 + 2 * log_std + np.log(2 * np.pi)), axis=1)
        logp -= tf.reduce_sum(2 * (np.log(2) - u - tf.nn.softplus(-2 * u)), axis=1)
        return tf.tanh(u), logp

    def step():
        a, _ = pi(tf.constant(o[0][None]))
        o2, r, d = env.step(a.numpy()[0, 0])
        memory.store(o[0], a.numpy()[0], r, o2, d)
        o[0] = env.reset() if d else o2

        batch = memory.sample_batch(64)
        obs, act = tf.convert_to_tensor(batch["obs"]), tf.convert_to_tensor(batch["act"])
        alpha = tf.exp(log_alpha)
        a2, logp_a2 = pi(batch["obs2"])
        q_pi_targ = tf.minimum(
            q1_target(tf.concat([batch["obs2"], a2], -1)), q2_target(tf.concat([batch["obs2"], a2], -1))
        )
        backup = batch["rew"] + gamma * (1 - batch["done"]) * (tf.squeeze(q_pi_targ, 1) - alpha * logp_a2)
        with tf.GradientTape() as tape:
            x = tf.concat([obs, act], axis=-1)
            loss_q = tf.reduce_mean((tf.squeeze(q1(x), 1) - backup) ** 2) + tf.reduce_mean(
                (tf.squeeze(q2(x), 1) - backup) ** 2
            )
        q_params = q1.trainable_variables + q2.trainable_variables
        q_optimizer.apply_gradients(zip(tape.gradient(loss_q, q_params), q_params))

        with tf.GradientTape() as tape:
            a_new, logp = pi(obs)
            x = tf.concat([obs, a_new], axis=-1)
            loss_pi = tf.reduce_mean(alpha * logp - tf.squeeze(tf.minimum(q1(x), q2(x)), 1))
        pi_optimizer.apply_gradients(
            zip(tape.gradient(loss_pi, policy.trainable_variables), policy.trainable_variables)
        )

        with tf.GradientTape() as tape:
            loss_alpha = -tf.reduce_mean(log_alpha * tf.stop_gradient(logp + target_entropy))
        alpha_optimizer.apply_gradients([(tape.gradient(loss_alpha, log_alpha), log_alpha)])

        for source, target in [(q1, q1_target), (q2, q2_target)]:
            for v, v_targ in zip(source.variables, target.variables):
                v_targ.assign(polyak * v_targ + (1 - polyak) * v)
        return {"q": loss_q, "pi": loss_pi, "alpha": alpha.numpy()}

    return Example(step, lambda: (policy.variables, q1.variables, q2.variables, q1_target.variables, log_alpha), [()])


def discount_cumsum(x, discount):
    out, running = np.zeros_like(x), 0.0
    for t in reversed(range(len(x))):
        running = x[t] + discount * running
        out[t] = running
    return out


@example(rtol=1e-2, atol=1e-3)
def proximal_policy_optimization():
    """PPO: a rollout, generalised advantages in NumPy, four epochs of minibatches, unless the policy moves too far."""
    env = PointMass(seed=3)
    actor, critic = mlp([3, 32, 32, 1], "tanh"), mlp([3, 32, 32, 1], "tanh")
    log_std = tf.Variable(-0.5 * np.ones(1, dtype=np.float32), name="log_std")
    actor_optimizer, critic_optimizer = keras.optimizers.Adam(3e-3), keras.optimizers.Adam(1e-2)
    clip_ratio, gamma, lam, target_kl = 0.2, 0.99, 0.95, 0.015
    state = {"o": env.reset(), "epochs": []}

    def log_prob(mu, action):
        return tf.reduce_sum(-0.5 * (((action - mu) / tf.exp(log_std)) ** 2 + 2 * log_std + tf.math.log(2 * np.pi)), -1)

    def step():
        obs, acts, rews, vals, logps = [], [], [], [], []
        for _ in range(16):
            o = state["o"][np.newaxis]
            mu = actor(o)
            action = mu + tf.exp(log_std) * tf.random.normal(mu.shape)
            obs.append(state["o"])
            acts.append(action.numpy()[0])
            vals.append(float(critic(o)[0, 0]))
            logps.append(log_prob(mu, action).numpy()[0])
            state["o"], reward, done = env.step(acts[-1][0])
            rews.append(reward)
            if done:
                state["o"] = env.reset()
        last = critic(state["o"][np.newaxis]).numpy()[0, 0]
        rewards, values = np.append(rews, last), np.append(vals, last)
        deltas = rewards[:-1] + gamma * values[1:] - values[:-1]
        advantages = discount_cumsum(deltas, gamma * lam).astype(np.float32)
        returns = discount_cumsum(rewards, gamma)[:-1].astype(np.float32)
        advantages = (advantages - np.mean(advantages)) / (np.std(advantages) + 1e-8)
        obs, acts, logps = np.stack(obs), np.stack(acts), np.array(logps, np.float32)

        for epoch in range(4):
            order = np.random.permutation(len(obs))
            kl = 0.0
            for start in range(0, len(obs), 8):
                index = order[start : start + 8]
                with tf.GradientTape() as tape:
                    logp = log_prob(actor(obs[index]), acts[index])
                    ratio = tf.exp(logp - logps[index])
                    clipped = tf.clip_by_value(ratio, 1 - clip_ratio, 1 + clip_ratio)
                    loss = -tf.reduce_mean(tf.minimum(ratio * advantages[index], clipped * advantages[index]))
                variables = [*actor.trainable_variables, log_std]
                actor_optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
                with tf.GradientTape() as tape:
                    value_loss = tf.reduce_mean((returns[index] - tf.squeeze(critic(obs[index]), -1)) ** 2)
                critic_optimizer.apply_gradients(
                    zip(tape.gradient(value_loss, critic.trainable_variables), critic.trainable_variables)
                )
                kl += float(tf.reduce_mean(logps[index] - logp))
            if kl > 1.5 * target_kl:
                break
        state["epochs"].append(epoch)
        return loss, value_loss

    return Example(step, lambda: (actor.variables, critic.variables, log_std, state["epochs"]), [()])


@dataclasses.dataclass
class Transition:
    state: np.ndarray
    action: np.ndarray
    reward: float
    next_state: np.ndarray


class OUActionNoise:
    """Noise that returns to its mean, as in Keras' DDPG example."""

    def __init__(self, mean, std_deviation, theta=0.15, dt=1e-2, x_initial=None):
        self.theta, self.mean, self.std_dev, self.dt, self.x_initial = theta, mean, std_deviation, dt, x_initial
        self.reset()

    def __call__(self):
        x = (
            self.x_prev
            + self.theta * (self.mean - self.x_prev) * self.dt
            + self.std_dev * np.sqrt(self.dt) * np.random.normal(size=self.mean.shape)
        )
        self.x_prev = x
        return x

    def reset(self):
        self.x_prev = self.x_initial if self.x_initial is not None else np.zeros_like(self.mean)


@example(rtol=1e-2, atol=1e-3)
def deep_deterministic_policy_gradient():
    """DDPG with a deque of transitions, noise of Ornstein and Uhlenbeck, and soft updates by `set_weights`."""
    env, noise, memory = PointMass(seed=5), OUActionNoise(np.zeros(1), 0.2 * np.ones(1)), deque(maxlen=500)
    actor, critic = mlp([3, 64, 64, 1], output_activation="tanh"), mlp([4, 64, 64, 1])
    target_actor, target_critic = keras.models.clone_model(actor), keras.models.clone_model(critic)
    target_actor.set_weights(actor.get_weights())
    target_critic.set_weights(critic.get_weights())
    actor_optimizer, critic_optimizer = keras.optimizers.Adam(1e-3), keras.optimizers.Adam(2e-3)
    mse = keras.losses.MeanSquaredError()
    state = [env.reset()]

    def act():
        action = tf.squeeze(actor(tf.expand_dims(tf.convert_to_tensor(state[0]), 0))).numpy() + noise()
        legal = np.clip(action, -1.0, 1.0)
        following, reward, done = env.step(legal[0])
        memory.append(Transition(state[0], legal.astype(np.float32), reward, following))
        state[0] = env.reset() if done else following

    for _ in range(32):
        act()

    def update_target(target, original, tau):
        target_weights, original_weights = target.get_weights(), original.get_weights()
        for i in range(len(target_weights)):
            target_weights[i] = original_weights[i] * tau + target_weights[i] * (1 - tau)
        target.set_weights(target_weights)

    def step():
        act()
        batch = random.sample(memory, 16)
        states = tf.convert_to_tensor(np.stack([t.state for t in batch]))
        actions = tf.convert_to_tensor(np.stack([t.action for t in batch]))
        rewards = tf.cast(tf.convert_to_tensor([[t.reward] for t in batch]), tf.float32)
        next_states = tf.convert_to_tensor(np.stack([t.next_state for t in batch]))
        with tf.GradientTape() as tape:
            target_actions = target_actor(next_states, training=True)
            y = rewards + 0.99 * target_critic(tf.concat([next_states, target_actions], 1), training=True)
            critic_loss = mse(y, critic(tf.concat([states, actions], 1), training=True))
        critic_grad = tape.gradient(critic_loss, critic.trainable_variables)
        critic_optimizer.apply_gradients(zip(critic_grad, critic.trainable_variables))
        with tf.GradientTape() as tape:
            critic_value = critic(tf.concat([states, actor(states, training=True)], 1), training=True)
            actor_loss = -tf.math.reduce_mean(critic_value)
        actor_grad = tape.gradient(actor_loss, actor.trainable_variables)
        actor_optimizer.apply_gradients(zip(actor_grad, actor.trainable_variables))
        update_target(target_actor, actor, 0.005)
        update_target(target_critic, critic, 0.005)
        return critic_loss, actor_loss

    return Example(
        step, lambda: (actor.variables, critic.variables, target_actor.variables, target_critic.variables), [()]
    )
