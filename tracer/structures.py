"""Structures: TensorFlow's helpers for nested structures, modules and types, giving the same in less Python.

Libraries ask them thousands of times in a step: whether something is a tensor, what a structure holds, which variables
a `tf.Module` has. Most of what they are asked about is no structure at all, for which the answer follows without
walking it: the functions here look for that first, and leave the rest to the originals, as without a handler.

Relies on: `tensor_util.is_tf_type`, `nest_util` and `module` look these names up in their own module on each use; what
`IsNested` denies is one leaf to all of `nest`; `typing._get_protocol_attrs`, the names of a protocol, all of methods
here. Before Python 3.12, `isinstance` collects them anew on each use, in 6 to 7 us; here it takes 0.8.
"""

from __future__ import annotations

import abc
import operator
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

from tracer.faults import absorbs, passes
from tracer.hooks import installing
from tracer.intercept import add_hook, current_handler
from tracer.private import (
    CompositeTensor,
    EagerTensor,
    ResourceVariable,
    is_nested,
    is_nested_or_composite,
    nest,
    nest_util,
    tensor_util,
    tf_module,
)

_flatten_with_paths = nest.flatten_with_tuple_paths
_map_structure = nest_util._tf_core_map_structure
_map_up_to = nest_util._tf_core_map_structure_with_tuple_paths_up_to
_flatten_module = tf_module._flatten_module
_flatten_composites = tf_module._flatten_non_variable_composites_with_tuple_path

# Values of these types are leaves, whatever they are asked for.
_LEAVES = frozenset({int, float, bool, str, bytes, complex, type(None), FunctionType, ResourceVariable, EagerTensor})
_SEQUENCES = frozenset({list, tuple})


def _is_handled() -> bool:
    """Returns whether a handler answers this thread's operations."""
    try:
        return current_handler() is not None
    except Exception as error:
        if not absorbs(error):
            raise
    return False


class Protocol:
    """Stands for a protocol of methods in `isinstance`, or for classes that end in one: has the same instances."""

    def __init__(self, protocol: Any, classes: tuple[Any, ...] = ()) -> None:
        self._protocol, self._classes = protocol, classes
        # In the order of `typing`'s set: an object may compute its attributes, and is asked for them in that order.
        self._names = tuple(typing._get_protocol_attrs(protocol))  # type: ignore[attr-defined]

    @passes
    def __instancecheck__(self, value: Any) -> bool:
        protocol = self._protocol
        if isinstance(value, self._classes):
            return True
        if not _is_handled():
            return isinstance(value, protocol)
        kind = value.__class__
        if issubclass(kind, protocol):
            return True
        for name in self._names:
            if not hasattr(value, name) or getattr(value, name) is None:
                break
        else:
            return True
        return kind is not type(value) and abc.ABCMeta.__instancecheck__(protocol, value)


@passes
def flatten_with_tuple_paths(structure: Any, expand_composites: bool = False) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns the leaves of a structure, each with its path, like `nest.flatten_with_tuple_paths`."""
    if not _is_handled():
        return _flatten_with_paths(structure, expand_composites)  # type: ignore[no-any-return]
    nests = is_nested_or_composite if expand_composites else is_nested
    if not nests(structure):
        return [((), structure)]
    if type(structure) not in _SEQUENCES or any(map(nests, structure)):
        return _flatten_with_paths(structure, expand_composites)  # type: ignore[no-any-return]
    return [((number,), leaf) for number, leaf in enumerate(structure)]


@passes
def map_structure(func: Any, *structure: Any, **kwargs: Any) -> Any:
    """Applies a function to the leaves of structures, like `tf.nest.map_structure`."""
    if not kwargs and callable(func) and _is_handled():
        if len(structure) == 1:
            (only,) = structure
            if not is_nested(only):
                return func(only)
            if (kind := type(only)) in _SEQUENCES and not any(map(is_nested, only)):
                leaves = list(only)
                results = [func(leaf) for leaf in leaves]
                if len(only) == len(leaves) and all(map(operator.is_, only, leaves)):
                    return kind(results)
                return nest_util._tf_core_pack_sequence_as(only, results, False)  # `func` has changed it
        elif structure and not any(map(is_nested, structure)):
            return func(*structure)
    return _map_structure(func, *structure, **kwargs)


@passes
def map_structure_up_to(shallow_tree: Any, func: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Applies a function to what is at the leaves of a shallower structure, and to their paths."""
    if inputs and not kwargs and _is_handled() and not is_nested(shallow_tree):
        return func((), *inputs)
    return _map_up_to(shallow_tree, func, *inputs, **kwargs)


@passes
def flatten_module(*args: Any, **kwargs: Any) -> Iterator[Any]:
    """Yields what a module and those in it hold, in the order, and at the time, that `tf.Module._flatten` does."""
    return (_flatten_module if not _is_handled() else walk_module)(*args, **kwargs)


@passes
def walk_module(
    module: Any,
    recursive: bool,
    predicate: Callable[[Any], Any],
    attribute_traversal_key: Any,
    attributes_to_ignore: Any,
    with_path: bool,
    expand_composites: bool,
    module_path: tuple[Any, ...] = (),
    seen: set[int] | None = None,
    recursion_stack: list[int] | None = None,
) -> Iterator[Any]:
    """Yields the same as `_flatten_module`, without asking `nest` about what is a leaf by itself."""
    module_id = id(module)
    if seen is None:
        seen = {module_id}
    held = vars(module)
    modules: list[tuple[tuple[Any, ...], Any]] = []
    if recursion_stack is None:
        recursion_stack = []
    if module_id in recursion_stack:
        recursive = False
    for key in sorted(held, key=attribute_traversal_key):
        if key in attributes_to_ignore:
            continue
        prop = held[key]
        for path, leaf in _leaves(key, prop, expand_composites):
            if not with_path:
                if id(leaf) in seen:
                    continue
                seen.add(id(leaf))
            if predicate(leaf):
                yield ((*module_path, key, *path), leaf) if with_path else leaf
            if recursive and isinstance(leaf, tf_module.Module):
                modules.append(((*module_path, key, *path), leaf))
    recursion_stack.append(module_id)
    for path, inner in modules:
        ignored = inner._TF_MODULE_IGNORED_PROPERTIES
        yield from walk_module(
            inner, recursive, predicate, attribute_traversal_key, ignored, with_path, expand_composites, path, seen,
            recursion_stack,
        )  # fmt: skip
    recursion_stack.pop()


@passes
def _leaves(key: str, prop: Any, expands: bool) -> Iterable[tuple[tuple[Any, ...], Any]]:
    """Returns the leaves of a module's attribute, each with its path in it."""
    if type(prop) in _LEAVES:
        return (((), prop),)
    try:
        if expands:
            if not is_nested(prop) and not isinstance(prop, CompositeTensor):
                return (((), prop),)
            return list(_flatten_composites(prop))
        return flatten_with_tuple_paths(prop)
    except Exception as cause:
        raise ValueError(f"Error processing property {key!r} of {prop!r}") from cause


_installed = False


def install() -> None:
    """Adds the hooks to those that stay while a call is recorded or followed; once."""
    global _installed
    with installing:
        if _installed:
            return
        _installed = True
    add_hook(nest, "flatten_with_tuple_paths", flatten_with_tuple_paths)
    add_hook(nest_util, "_tf_core_map_structure", map_structure)
    add_hook(nest_util, "_tf_core_map_structure_with_tuple_paths_up_to", map_structure_up_to)
    add_hook(tf_module, "_flatten_module", flatten_module)
    if sys.version_info < (3, 12):
        add_hook(nest_util, "CustomNestProtocol", Protocol(nest_util.CustomNestProtocol))
        *classes, protocol = tensor_util.tf_type_classes
        add_hook(tensor_util, "tf_type_classes", Protocol(protocol, tuple(classes)))
