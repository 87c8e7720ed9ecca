"""Keras' own tests as a suite: what passes eagerly three times passes three times in one decorated function.

`bodies` finds the tests in the installed package and runs one of them; `python -m tests.keras_suite` runs them all in
worker processes and prints a table; `test_keras_suite` runs a sample.
"""
