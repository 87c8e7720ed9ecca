"""Peers: the same small training steps in TensorFlow, PyTorch and JAX, for the table that sets them side by side.

Sizes, batch, optimizer (Adam) and what is read (the loss, every step) are the same; initial weights are each
library's own, so results are not compared between libraries. The extra `peers` installs what this needs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable

from examples.bench.case import Program
from examples.bench.cases import CASES as ALL

# What each library's module has: by the name of a case, what builds its variants.
LIBRARIES = {"torch": "examples.bench.peers.in_torch", "jax": "examples.bench.peers.in_jax"}

NAMES = ("keras-mlp", "lstm", "gpt", "resnet", "while-loop")
CASES = tuple(case for case in ALL if case.name in NAMES)


def variants(case: str) -> dict[str, Callable[[], Program]]:
    """What else can run a case, by name; raises ImportError, saying what to do, if the libraries are not there."""
    found: dict[str, Callable[[], Program]] = {}
    for library, module in LIBRARIES.items():
        try:
            found.update(importlib.import_module(module).variants(case))
        except ImportError as error:
            raise ImportError(f"{library} is not there ({error}); install it: pip install -e '.[peers]'") from error
    return found


def versions() -> str:
    """Which versions of the libraries there are, in words."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "jax", "flax", "optax"))
