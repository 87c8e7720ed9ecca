"""Read guards: checks what a traced statement relies on before each use, by one generated function.

As with state guards (`guards/state`), a guard takes 20 to 100 ns that way; a loop over the reads took 400.
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import keras

from coexec.control_flow.trace.attribute_guards import Lookup, checks
from coexec.guards.codegen import CheckWriter
from coexec.guards.pure_calls import is_number
from tracer.lazy import LazyTensor
from tracer.op import freeze
from tracer.private import EagerTensor
from tracer.spec import Spec, spec_of

if TYPE_CHECKING:
    import tensorflow as tf

    from coexec.control_flow.program_types import Tensor, Value

    Key = Value  # by the kind of read: a name, an index, a namespace or cell and a name, a weak reference or None
    Guard = Spec | tuple[str, Value]  # a tensor's spec; or how a value is compared, and with what
    Check = Callable[[dict[str, Value]], list[Value] | None]  # of local variables: the arguments; None if a guard fails

LOCAL, GLOBAL, CELL, ATTRIBUTE, ITEM, LENGTH, VALUE, OBJECT, SHARED = range(9)

_MISSING = object()


class Read(NamedTuple):
    """One value that was read: the read of its owner, the kind of read, its key, and the guard on the value."""

    parent: int
    kind: int
    key: Key
    expected: Guard
    lookup: Lookup | None = None  # of an attribute: how it is found


class VariableRead(NamedTuple):
    """A variable's value when the statement begins: the handle to read it by, and the variable that tapes watch."""

    handle: Tensor
    variable: tf.Variable


def is_local_function(function: FunctionType) -> bool:
    """Returns whether a function is made inside another one, without keyword defaults or attributes."""
    return "<locals>" in function.__qualname__ and not function.__kwdefaults__ and not vars(function)


def written(
    reads: list[Read], alone: set[int], arguments: list[int | None], handles: dict[int, Spec],
    holds: Callable[[Tensor, Spec], bool],
) -> Check:
    """Generates the function that checks all guards, given the local variables; it returns the arguments, or None.

    `arguments` holds the read behind each argument, None for those supplied elsewhere. `alone` are reads whose value no
    other read may alias. `handles` knows variables whose value has the expected spec; `holds` checks all others.
    The generated function raises what a read raises if an attribute, item or name is gone.
    """
    names: dict[str, Any] = {
        "M": _MISSING, "B": vars(builtins), "V": keras.Variable, "F": FunctionType, "N": MethodType,
        "held": VariableRead, "handles": handles, "holds": holds, "is_spec": is_spec, "is_equal": _is_equal,
        "is_same": _is_same, "is_local_function": is_local_function,
    }  # fmt: skip
    lines = []
    for n, (parent, kind, key, expected, lookup) in enumerate(reads):
        names[f"k{n}"] = key
        if lookup is not None:
            lines += checks(n, f"v{parent}", key, lookup, names)
        if kind == VALUE:
            names[f"e{n}"] = expected
            lines += [
                f"u = v{parent}.value if issubclass(type(v{parent}), V) else v{parent}",
                "h = u.handle",
                f"if handles.get(h._id) is not e{n} and not holds(h, e{n}): return None",
                f"v{n} = held(h, u)",
            ]
        elif kind == OBJECT:  # a weak reference, alive or not
            lines += [f"v{n} = k{n}()", f"if v{n} is None: return None"]
        else:
            lines += [*_fetched(n, parent, kind, key), _checked(n, expected, names)]
    for place in sorted(alone):
        known = "alias", place
        others = [n for n, read in enumerate(reads) if n != place and read.expected != known]
        lines += [f"if v{place} is v{n}: return None" for n in others]
    writer = CheckWriter("local", **names)
    for line in lines:
        writer.do(line)
    return writer.written(f"[{', '.join('None' if n is None else f'v{n}' for n in arguments)}]")


def _fetched(n: int, parent: int, kind: int, key: Key) -> list[str]:
    if kind == LOCAL:
        return [f"v{n} = local[k{n}]"]
    if kind == GLOBAL:  # of a namespace, by name
        return [f"v{n} = k{n}[0].thing.get({key[1]!r}, M)", f"if v{n} is M: v{n} = B[{key[1]!r}]"]
    if kind == CELL:
        return [f"v{n} = k{n}.thing.cell_contents"]
    if kind == ATTRIBUTE:
        plain = key.isidentifier() and not keyword.iskeyword(key)
        return [f"v{n} = v{parent}.{key}" if plain else f"v{n} = getattr(v{parent}, k{n})"]
    if kind == ITEM:
        return [f"v{n} = v{parent}[k{n}]"]
    if kind == LENGTH:
        return [f"v{n} = len(v{parent})"]
    return [f"v{n} = v{parent}.__closure__[k{n}].cell_contents"]


def _checked(n: int, expected: Guard, names: dict[str, object]) -> str:
    """Returns the line of code that bails out if the guard on a read fails; adds what it refers to to `names`."""
    value = f"v{n}"
    if type(expected) is Spec:
        names[f"e{n}"] = expected
        return f"if not is_spec({value}, e{n}): return None"
    how, what = expected  # type: ignore[misc]  # a pair: no spec
    if how == "method":
        names[f"f{n}"], names[f"s{n}"] = what
        same = f"type({value}) is N and {value}.__func__ is f{n}() and {value}.__self__ is s{n}()"
        return f"if not ({same}): return None"
    names[f"e{n}"] = what
    if how == "same":
        return f"if ({value} is not e{n}() or {value} is None) and not is_same({value}, e{n}()): return None"
    if how == "equal":
        return f"if not is_equal({value}, e{n}): return None"
    if how == "made":
        names[f"e{n}"], names[f"g{n}"] = what
        same = f"{value}.__code__ is e{n} and {value}.__globals__ is g{n}"
        return f"if not (type({value}) is F and {same} and is_local_function({value})): return None"
    if how == "alias":
        return f"if {value} is not v{what}: return None"
    return f"if type({value}) is not e{n}: return None"


def is_tensor(value: Value) -> bool:
    """Returns whether a value is an eager or lazy tensor, by its type: `isinstance` may run code of its class."""
    return type(value) is LazyTensor or issubclass(type(value), EagerTensor)


def is_spec(value: Value, spec: Spec) -> bool:
    """Returns whether a value is a tensor of this spec."""
    if type(value) is LazyTensor:
        return bool(value._out.spec is spec) or spec_of(value) is spec
    return issubclass(type(value), EagerTensor) and spec_of(value) is spec


def _is_equal(value: Value, frozen: object) -> bool:
    return is_number(value) and bool(freeze(value) == frozen)


def _is_same(value: Value, known: tf.Variable | None) -> bool:
    """Returns whether this is a Keras variable that wraps the known `tf.Variable`."""
    return issubclass(type(value), keras.Variable) and known is not None and value.value is known
