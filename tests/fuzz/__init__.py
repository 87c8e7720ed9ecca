"""A differential fuzzer: programs made up at random, eager and co-executed, must do the same.

`programs` writes them as source text, `state` is what they work on, `differential` runs and compares them and makes
those that fail small. `python -m tests.fuzz` runs thousands in processes of their own; `test_fuzz` runs some hundred,
`test_found` those that once failed.
"""
