"""Training: Keras models, loops of the user's own, checkpoints, on top of co-executed functions."""
