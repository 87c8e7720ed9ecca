"""Backward functions: the program's own on tapes (`tf.custom_gradient`), and the tape entries of their operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coexec.follow.tape_entry import TapeEntry
from tracer.faults import passes
from tracer.intercept import current_handler
from tracer.private import EagerTensor
from tracer.spec import spec_of


class Backward:
    """A backward function: its Python runs in every gradient, even where the rest of the gradient is memoized."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @passes
    def __call__(self, *cotangents: Any) -> Any:
        """Calls the function, through the tapes' `around` if one is set for the running gradient."""
        handler = current_handler()
        around = None if handler is None or handler.tapes is None else handler.tapes.around
        return self.function(*cotangents) if around is None else around(self, cotangents)


class FunctionEntry(TapeEntry):
    """The entry of an operation with its own backward function: inputs, outputs and that function."""

    __slots__ = ("_forward", "_inputs", "_original", "backward", "op", "outputs", "tapes")

    def __init__(
        self,
        original: Callable[..., Any],
        op: str,
        outputs: Any,
        inputs: Any,
        backward: Backward,
        forward: tuple[Any, ...],
        tapes: tuple[int, ...],
    ) -> None:
        self._original = original
        self.op = op
        self.outputs = list(outputs)
        self._inputs = list(inputs)
        self.backward = backward
        self._forward = forward
        self.tapes = tapes

    def identity(self, origin: int) -> Any:
        """Returns a key of the operation, apart from its tensors.

        The backward function is not part of it, as it runs each time.
        """
        return self.op, len(self.outputs), tuple([spec_of(v) for v in self.given()])

    def given(self) -> list[Any]:
        """Returns its input and output tensors."""
        return [v for v in self._tensors() if isinstance(v, EagerTensor)]

    def _tensors(self) -> list[Any]:
        return [*self._inputs, *self.outputs]

    def record(self, constant: Callable[[Any, Any], Any]) -> None:
        """Puts the operation on the active tapes."""
        self._original(self.op, self.outputs, self._inputs, self.backward, *self._forward)
