"""The errors of the tracer: each derives from what a caller would catch."""

from __future__ import annotations


class TracerError(Exception):
    """Base of all errors raised by the tracer itself."""


class MalformedGraph(TracerError, ValueError):
    """A trace graph breaks one of its own rules; the message names the node and the rule."""


class ParseError(TracerError, ValueError):
    """Text is not a printed trace graph; the message names the line and what was expected there."""


class FailedTensor(TracerError, RuntimeError):
    """A tensor is read whose operation failed: the first failure is the cause of this one."""


class Refused(BaseException):
    """Something cannot be written down as a block; no `except Exception` on the way may take it for its own.

    It never leaves the runtime: what was refused runs as Python.
    """
