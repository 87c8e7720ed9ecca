"""Marks that several files of tests share."""

import sys

import pytest

# What is found by an instruction's place in the source: which test it belongs to, which statement that decides.
needs_places = pytest.mark.skipif(sys.version_info < (3, 11), reason="instructions have no places before Python 3.11")
