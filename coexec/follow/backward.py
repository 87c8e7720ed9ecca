"""Backward functions of the program's on tapes, as `tf.custom_gradient` puts them there, and what is noted of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from coexec.follow.tape_entry import identities
from tracer.faults import passes
from tracer.intercept import current_handler
from tracer.private import EagerTensor
from tracer.spec import spec_of


class Backward:
    """A backward function: its Python runs in every gradient, also where that of the rest is skipped."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @passes
    def __call__(self, *cotangents: Any) -> Any:
        """Calls the function, through whoever makes such calls in the gradient that is being asked for."""
        handler = current_handler()
        around = None if handler is None or handler.tapes is None else handler.tapes.around
        return self.function(*cotangents) if around is None else around(self, cotangents)


class FunctionEntry:
    """An operation with a backward function of its own: what went in and came out, and that function."""

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

    def identity(self) -> Any:
        """Returns what this did, as far as it does not follow from the tensors given.

        What its function does is not part of it: that runs each time.
        """
        return self.op, len(self.outputs), tuple([spec_of(v) for v in self.given()])

    def brief(self, origin: int) -> Any:
        """Returns None: other operations have made what came out."""

    def goes_into(self, region: Any) -> None:
        """Operations never end."""

    def given(self) -> list[Any]:
        """Returns the tensors that went in and came out."""
        return [v for v in self._tensors() if isinstance(v, EagerTensor)]

    def constants(self) -> list[Any]:
        """None: each is one of those given."""
        return []

    def places(self) -> Iterator[tuple[Any, Any]]:
        """Gives each tensor that is known here, with what `get` finds it by."""
        for number, tensor in enumerate(self._tensors()):
            yield from ((v, number) for v in identities(tensor))

    def get(self, number: Any) -> Any:
        """Returns a tensor that went in or came out."""
        return self._tensors()[number]

    def _tensors(self) -> list[Any]:
        return [*self._inputs, *self.outputs]

    def record(self, constant: Callable[[Any, Any], Any]) -> None:
        """Puts the operation on the active tapes."""
        self._original(self.op, self.outputs, self._inputs, self.backward, *self._forward)
