"""Loop: hand-written training loops, and the `Trainer`.

Takes a step or a loop body, data and callbacks; yields the batches of all epochs, resuming after the last checkpoint.
"""
