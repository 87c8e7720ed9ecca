"""Old generation: what is learnt is handed to the garbage collector's oldest generation, without counting as new there.

CPython collects everything (0.2 to 0.4 s once TensorFlow is loaded) when the objects that have survived two collections
since the last time are a quarter of all. An eager step leaves none behind; what its first followed calls leave, some
ten thousand, would often bring that about, and cost as much as ten steps. Relies on `gc.freeze` and `gc.unfreeze`
moving all objects to the oldest generation and not counting them.
"""

from __future__ import annotations

import gc
import itertools

MAX_TIMES = 400  # in a process; a function takes some fifty

_times = itertools.count()
_managed = False  # whether the program has frozen objects itself


def hand_over() -> None:
    """Moves all young objects that are alive to the oldest generation; never again once the program manages that.

    Nor after some times: the program's own cyclic garbage may be among them, which has to be collected one day.
    """
    global _managed
    if _managed or not gc.isenabled() or next(_times) >= MAX_TIMES:
        return
    _managed = gc.get_freeze_count() > 0  # it counts one by one: 40 ms for what TensorFlow has
    if not _managed:
        gc.collect(0)  # so that young garbage does not wait for the oldest generation's turn
        gc.freeze()
        gc.unfreeze()
