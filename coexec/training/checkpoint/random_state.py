"""Random state: captures and restores the random number generators of Python, NumPy, TensorFlow and Keras.

Not covered are TensorFlow operations with a seed of their own (`tf.random.normal(..., seed=1)`), whose counters are
hidden in kernels, and generators that the program holds: pass those to the checkpoint as objects to save.
"""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tracer import seeds
from tracer.private import context, global_state

_KERAS = "global_seed_generator"  # Keras' name for its default generator


def capture() -> dict[str, Any]:
    """Returns the states of all global generators."""
    numbers = seeds.generator()
    generator = global_state.get_global_attribute(_KERAS)
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "tensorflow": None if numbers is None else (context.global_seed(), numbers.getstate()),
        "keras": None if generator is None else generator.state.numpy(),
    }


def restore(states: dict[str, Any]) -> None:
    """Restores what `capture` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if states["tensorflow"] is not None:
        seed, state = states["tensorflow"]
        tf.random.set_seed(seed)  # also releases kernels that have already drawn
        seeds.generator().setstate(state)
    if states["keras"] is not None:
        generator = global_state.get_global_attribute(_KERAS)
        if generator is None:
            generator = keras.random.SeedGenerator(0)
            global_state.set_global_attribute(_KERAS, generator)
        generator.state.assign(states["keras"])
