"""Tracing: a statement that branches or loops on a tensor, evaluated on symbolic tensors.

Takes the statement's syntax tree and the variables of a running frame; returns blocks of operations, and guards on
every Python value read.
"""
