"""Tracing: a statement that branches or loops on a tensor, evaluated on tensors without values.

In come the statement's syntax and the variables of a running frame; out come blocks of operations, and guards for
every Python value that was read.
"""
