"""Marks that several files of tests share."""

import sys

import pytest
import tensorflow as tf

from tracer import value_stack
from tracer.versions import TESTED

# What is found by an instruction's place in the source: which test it belongs to, which statement that decides.
needs_places = pytest.mark.skipif(sys.version_info < (3, 11), reason="instructions have no places before Python 3.11")

# Watched calls (`regions="all"`).
needs_watch = pytest.mark.skipif(not value_stack.available(), reason="the value stack is read on CPython 3.11 only")

# XLA's program as StableHLO, which `ir()` gives unless asked for another stage.
PRINTS_STABLEHLO = not tf.__version__.startswith("2.18.")
needs_stablehlo = pytest.mark.skipif(not PRINTS_STABLEHLO, reason="TensorFlow prints no StableHLO before 2.19")

# What the documentation says of the newest version only.
as_documented = pytest.mark.skipif(
    not tf.__version__.startswith(f"{TESTED[-1]}."), reason=f"is about TensorFlow {TESTED[-1]}"
)
