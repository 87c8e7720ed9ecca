"""Sizes: dimensions and numbers that differ between calls, as functions of the sizes of a segment's feeds.

On a path that is followed at any size (`dynamic_paths`), the specs of feeds leave dimensions open, and what depends on
these is a `Size`: a sum of products of them. Each call's tensors still have exact shapes, which are computed from its
feeds when they are made; a Python number that came from a size is compared with what it is at this call's sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tracer.graph import Step
from tracer.lazy import Output
from tracer.op import Const
from tracer.spec import Spec, intern_spec

# Of open dimensions: at 0 and 1, TensorFlow's and the program's code may do something else, such as broadcast.
LEAST = 2


class Size:
    """An integer: `constant` and, for each of `terms`, a coefficient times dimensions of feeds, by (feed, axis)."""

    __slots__ = ("constant", "terms")

    def __init__(self, constant: int, terms: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]) -> None:
        self.constant = constant
        self.terms = terms

    def at(self, feeds: Sequence[Any]) -> int:
        """Returns the integer at the sizes of these feeds."""
        total = self.constant
        for product, factors in self.terms:
            for feed, axis in factors:
                product *= feeds[feed]._shape_tuple()[axis]
            total += product
        return total

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and (other.constant, other.terms) == (self.constant, self.terms)

    def __hash__(self) -> int:
        return hash((self.constant, self.terms))

    def __repr__(self) -> str:
        products = ["*".join([str(k), *(f"size({f}, {axis})" for f, axis in factors)]) for k, factors in self.terms]
        return " + ".join([*products, str(self.constant)])


UNKNOWN = Size(-1, ())  # of a number that differs between calls, and is no function of sizes that is looked for

Dims = tuple["int | Size", ...]


def dims_at(dims: Dims, feeds: Sequence[Any]) -> tuple[int, ...]:
    """Returns a shape at the sizes of these feeds."""
    return tuple([d if d.__class__ is int else d.at(feeds) for d in dims])  # type: ignore[union-attr]


class Shaped:
    """Stands in for a feed of this shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def _shape_tuple(self) -> tuple[int, ...]:
        return self._shape


class DynamicSpec(Spec):
    """The spec of a feed some of whose dimensions are open; not interned.

    `dims` has an integer or a `Size` that a dimension must equal, or None for any size from `LEAST` on. `value`: what a
    number that Python passed was so far, as a function of sizes; it need not be. `fitted`: the shapes in the calls that
    sizes were fitted to.
    """

    __slots__ = ("dims", "fitted", "value")

    def __init__(
        self, enum: int, dims: tuple[int | Size | None, ...], value: Size | None = None,
        fitted: tuple[tuple[int, ...], ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(enum, tuple([d if isinstance(d, int) else None for d in dims]), None)
        self.dims = dims
        self.value = value
        self.fitted = fitted

    def admits(self, shape: tuple[int, ...], feeds: Sequence[Any]) -> bool:
        """Returns whether a feed may have this shape, given those before it."""
        if len(shape) != len(self.dims):
            return False
        for size, dim in zip(shape, self.dims, strict=True):
            if dim is None:
                if size < LEAST:
                    return False
            elif isinstance(dim, int):
                if size != dim:
                    return False
            elif size != dim.at([*feeds, Shaped(shape)]):  # it may follow from another one of the same feed
                return False
        return True

    def __reduce__(self) -> Any:
        return DynamicSpec, (self.enum, self.dims, self.value, self.fitted)


class SizedConst(Const):
    """A constant input whose value depends on sizes: an integer or float, a list or tuple of integers, or an array.

    `form` is the value with a `Size` in place of each number that differs; `value` is that of one call.
    """

    __slots__ = ("form",)

    def __init__(self, value: Any, form: Any) -> None:
        super().__init__(value)
        self.form = form
        self._key = ("sized", type(value), getattr(value, "dtype", None), np.shape(value), _frozen(form))

    def at(self, feeds: Sequence[Any]) -> Const:
        """Returns the constant at the sizes of these feeds."""
        value, form = self.value, self.form
        kind = type(value)
        if kind is int:
            return Const(form.at(feeds))
        if kind is float:
            return Const(float(form.at(feeds)))
        numbers = [n if n.__class__ is not Size else n.at(feeds) for n in form]
        if kind is np.ndarray:
            return Const(np.array(numbers, value.dtype).reshape(value.shape))
        return Const(kind(numbers))


def _frozen(form: Any) -> Any:
    return tuple(form) if isinstance(form, list) else form


class DynamicOutput(Output):
    """An output whose shape, or known value, depends on sizes; its spec leaves these dimensions open."""

    __slots__ = ("dims",)

    def __init__(self, enum: int, dims: Dims, const: Const | None, node: Any) -> None:
        super().__init__(_open_spec(enum, dims), const, node)
        self.dims = dims

    def at(self, feeds: Sequence[Any]) -> Output:
        """Returns the output at the sizes of these feeds."""
        const = None if self.const is None else const_at(self.const, feeds)
        return Output(intern_spec(self.spec.enum, dims_at(self.dims, feeds)), const, self.node)


def _open_spec(enum: int, dims: Dims) -> Spec:
    return intern_spec(enum, tuple([d if isinstance(d, int) else None for d in dims]))


def settled(out: Output, feeds: Sequence[Any]) -> Output:
    """Returns an output at the sizes of these feeds; most do not depend on any."""
    return out.at(feeds) if isinstance(out, DynamicOutput) else out


def const_at(const: Const, feeds: Sequence[Any]) -> Const:
    """Returns a constant at the sizes of these feeds; most do not depend on any."""
    return const.at(feeds) if isinstance(const, SizedConst) else const


def open_feeds(last: Step) -> list[int]:
    """Returns the numbers of the feeds whose sizes decide those of all tensors of a segment."""
    specs = [spec for step in last.chain() for spec in step.specs]
    return [k for k, spec in enumerate(specs) if isinstance(spec, DynamicSpec) and None in spec.dims]
