"""Checkpoint: the state of a training run, saved and restored.

In come the objects of a training loop; out come files from which another process resumes exactly, random numbers
included.
"""
