"""Loop: hand-written training loops, and the `Trainer`.

In come a step or a loop body, data and callbacks; out come the batches of all epochs, resumed where a checkpoint ended.
"""
