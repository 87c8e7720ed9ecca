"""Thresholds: when a segment is worth an executable."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """When a segment is worth an executable; before, its operations run one by one. Visits are calls that came by.

    Measured on two cores: an eager operation takes 6-10 us; a launch of a TensorFlow graph 80 us, most of it for waking
    TensorFlow's threads; one of an XLA executable 16 us, but its compilation 30 ms and up to 20 ms an operation.
    """

    visits: int = 2
    small: int = 8  # operations: fewer are never launched as a graph
    price: float = 2e-3  # seconds for each operation: what a segment must have taken before XLA is asked
    at_once: bool = False  # XLA is asked first, and waited for
