"""Checkpoint: the state of a training run, saved and restored.

Takes the objects of a training loop; writes files from which another process resumes exactly, random numbers included.
"""
