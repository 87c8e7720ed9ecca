"""Compile: turns plans into executables.

Takes a segment's plan and a backend, XLA or a TensorFlow graph; returns an executable that is launched by name. Graphs
are shared between sizes where possible; XLA compiles in the background, and its code is cached on disk.
"""
