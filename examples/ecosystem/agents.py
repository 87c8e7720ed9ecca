"""TF-Agents: the update of a DQN agent, as `agent.train` makes it."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # TF-Agents' networks are of Keras 2

import numpy as np
import tensorflow as tf
from tf_agents.agents.dqn import dqn_agent
from tf_agents.networks import q_network
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import time_step, trajectory

from examples.ecosystem import Example, example


@example()
def tf_agents_dqn():
    """Learns from pairs of steps with a target network that is updated now and then."""
    rng = np.random.default_rng(0)
    observation = tensor_spec.TensorSpec([4], tf.float32)
    action = tensor_spec.BoundedTensorSpec([], tf.int32, 0, 1)
    network = q_network.QNetwork(observation, action, fc_layer_params=(64, 32))
    agent = dqn_agent.DqnAgent(
        time_step.time_step_spec(observation),
        action,
        q_network=network,
        optimizer=tf.keras.optimizers.legacy.Adam(1e-3),
        target_update_period=10,
        td_errors_loss_fn=dqn_agent.common.element_wise_squared_loss,
    )
    agent.initialize()

    def experience():
        return trajectory.Trajectory(
            step_type=tf.ones([32, 2], tf.int32),
            observation=tf.constant(rng.normal(size=(32, 2, 4)), tf.float32),
            action=tf.constant(rng.integers(0, 2, (32, 2)), tf.int32),
            policy_info=(),
            next_step_type=tf.ones([32, 2], tf.int32),
            reward=tf.constant(rng.normal(size=(32, 2)), tf.float32),
            discount=tf.ones([32, 2]),
        )

    def step(experience):
        return agent._train(experience, weights=None).loss  # what `agent.train` wraps in a tf.function

    return Example(step, lambda: network.variables, [(experience(),) for _ in range(4)])
