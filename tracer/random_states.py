"""Random states: whether the global random numbers of Python and NumPy have been drawn or seeded in between.

Both generators keep 624 words. Their public functions make a number of Python's of each, or an array in a dict, and
take 0.17 ms together, before and after each library call that is observed. Their memory is read in 5 us instead, where
it is laid out as expected, which is tested at import.

Relies on `random._inst`, whose methods the functions of `random` are, on its layout in CPython 3.10 to 3.13, and on
`numpy.random.mtrand._rand`, whose bit generator says where its state is.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np

_AT = 16  # offset of the state in Python's generator: where the next word is, and the words
_WORDS = 624
_SIZE = 4 * (_WORDS + 1)


def states() -> Any:
    """Returns the states of the global generators; equal ones mean that nothing was drawn."""
    return (_of_python() if KNOWN else random.getstate()), _of_numpy()


def _of_python() -> Any:
    own: Any = random._inst
    return _memory_of(own), own.gauss_next


def _of_numpy() -> Any:
    generator = np.random.mtrand._rand._bit_generator
    if KNOWN and type(generator) is np.random.MT19937:
        return generator, ctypes.string_at(generator.ctypes.state_address, _SIZE)
    held = np.random.get_state(legacy=False)["state"]
    return {name: part.tobytes() if isinstance(part, np.ndarray) else part for name, part in held.items()}


def _is_known() -> bool:
    """Returns whether both generators' memory says what their public functions say."""
    own = getattr(random, "_inst", None)
    if type(own) is not random.Random or getattr(random.getstate, "__self__", None) is not own:
        return False
    if random.Random.__basicsize__ < _AT + _SIZE:
        return False
    _, (*words, index), _ = random.getstate()
    if np.array([index, *words], np.uint32).tobytes() != _memory_of(own):
        return False
    probe = np.random.MT19937(7)
    for _ in range(2):
        held: Any = probe.state["state"]
        address = probe.ctypes.state_address
        said = held["key"].astype(np.uint32).tobytes() + np.int32(held["pos"]).tobytes()
        if said != ctypes.string_at(address, _SIZE):
            return False
        probe.random_raw()
    return True


def _memory_of(generator: Any) -> bytes:
    return ctypes.string_at(id(generator) + _AT, _SIZE)


KNOWN = _is_known()
