"""Environments: what a process may be like in which co-executed programs run, and programs to run there.

`python -m tests.environments ENVIRONMENT PROGRAM...` runs programs in one of `inside` (or in the plain interpreter) and
fails if they do anything that eager does not. It is apart from the tests, which are about what that process says.
"""
