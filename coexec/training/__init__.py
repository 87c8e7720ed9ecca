"""Training: Keras models, hand-written training loops and checkpoints, on top of co-executed functions.

In come models, steps and data; out come trained models, reports and checkpoints that another process can resume from.
"""
