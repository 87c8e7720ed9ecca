"""Training: Keras models, hand-written training loops and checkpoints, on top of co-executed functions.

Takes models, steps and data; returns trained models, reports, and checkpoints that another process can resume from.
"""
