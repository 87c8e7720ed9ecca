"""Marks that several files of tests share."""

import sys

import pytest
import tensorflow as tf

from tracer.versions import TESTED

# What is found by an instruction's place in the source: which test it belongs to, which statement that decides.
needs_places = pytest.mark.skipif(sys.version_info < (3, 11), reason="instructions have no places before Python 3.11")

# XLA's program as StableHLO, which `ir()` gives unless asked for another stage.
PRINTS_STABLEHLO = not tf.__version__.startswith("2.18.")
needs_stablehlo = pytest.mark.skipif(not PRINTS_STABLEHLO, reason="TensorFlow prints no StableHLO before 2.19")

# What the documentation says of the newest version only.
as_documented = pytest.mark.skipif(
    not tf.__version__.startswith(f"{TESTED[-1]}."), reason=f"is about TensorFlow {TESTED[-1]}"
)
