"""Program types: names for what the program and TensorFlow compute, whose types nothing here knows."""

from __future__ import annotations

from typing import Any

Value = Any  # whatever the program computes: a number, a container, a function, an object of any class, or a tensor
Tensor = Any  # one of TensorFlow's, which has no types: eager, symbolic or lazy
Truth = bool | Tensor  # known, or a tensor with one bool
