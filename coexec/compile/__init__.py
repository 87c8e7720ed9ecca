"""Takes a segment's plan and a backend, XLA or a TensorFlow graph.

Gives an executable that is launched by name, shared between sizes where possible, compiled in the background, and
cached on disk.
"""
