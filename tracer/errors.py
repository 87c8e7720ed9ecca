"""Errors: the tracer's exceptions, each derived from the built-in that a caller would catch."""

from __future__ import annotations


class TracerError(Exception):
    """Base of all errors raised by the tracer itself."""


class MalformedGraph(TracerError, ValueError):
    """A trace graph breaks one of its invariants; the message names the node and the rule."""


class ParseError(TracerError, ValueError):
    """Text is not a printed trace graph; the message names the line and what was expected there."""


class FailedTensor(TracerError, RuntimeError):
    """A tensor was read whose operation failed; the first failure is the cause."""


class Refused(BaseException):
    """Something cannot be staged as a block. A `BaseException`, so that no `except Exception` in between swallows it.

    It never leaves the runtime: refused code runs as Python.
    """
