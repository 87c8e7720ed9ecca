"""Keras: accelerated models.

In comes a compiled model; out comes the same model, whose steps run co-executed and several to a launch.
"""
