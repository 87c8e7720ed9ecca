"""Literals: values as text that reads back as the same values, and a reader for lines of such text.

The syntax is that of Python for numbers, strings, lists and tuples, plus `tf.float32`, `TensorShape([2, None])`,
`array('int32', [2], [1, 0])`, `scalar('float16', [0.5])`, `complex(0.0, 1.0)`, `float(bits='...')` for a NaN with a
sign or a payload, and `float32[2,3]` for a spec.
"""

from __future__ import annotations

import ast
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from tensorflow import DType, TensorShape, as_dtype

from tracer.errors import ParseError
from tracer.spec import Spec, intern_spec

# Names that need no quotes, and the literals that `repr` prints.
_WORD = re.compile(r"[\w.<>:/]+")
_TEXT = re.compile(
    r"""(?:'(?:[^'\\\x00-\x1f]|\\[\\'nrt]|\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8})*')"""
    r"""|(?:"(?:[^"\\\x00-\x1f]|\\[\\'nrt]|\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8})*")"""
)
_BYTES = re.compile(
    r"""b(?:'(?:[ -&(-\[\]-~]|\\[\\'nrt]|\\x[0-9a-f]{2})*'|"(?:[ !#-\[\]-~]|\\[\\'nrt]|\\x[0-9a-f]{2})*")"""
)
_NUMBER = re.compile(r"-?(?:inf|nan|\d{1,999}(?:\.\d+)?(?:e[+-]?\d+)?)\b")
_INTEGER = re.compile(r"-?\d{1,18}\b")
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)

_DOUBLE = struct.Struct("<d")
_NAN = _DOUBLE.pack(float("nan"))  # the NaN that `nan` denotes


class Opaque:
    """Stands for an attribute that has no text form; prints as the original did."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def word(text: str) -> str:
    """Returns a name, quoted if `Line.word` could not find its end."""
    return text if _WORD.fullmatch(text) else repr(text)


def literal(value: Any) -> str:
    """Returns a literal that reads back as a value of the same type and bits."""
    kind = value.__class__
    if value is None or kind in (bool, int, str, bytes):
        return repr(value)
    if kind is float:
        bits = _DOUBLE.pack(value)
        return repr(value) if value == value or bits == _NAN else f"float(bits={bits.hex()!r})"
    if kind is complex:
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if kind is list:
        return "[" + ", ".join(map(literal, value)) + "]"
    if kind is tuple:
        return "(" + ", ".join(map(literal, value)) + (",)" if len(value) == 1 else ")")
    if isinstance(value, DType):
        return f"tf.{value.name}"
    if isinstance(value, TensorShape):
        return f"TensorShape({None if value.rank is None else value.as_list()})"
    if kind is np.ndarray or isinstance(value, np.generic):
        name = _numpy_name(value.dtype)
        if name is not None:
            return _array(value, name)
    return f"opaque({repr(value)!r})"


def _numpy_name(dtype: np.dtype[Any]) -> str | None:
    """Returns a name from which NumPy makes this very dtype; `dtype.name` may denote a sibling."""
    for name in (dtype.name, dtype.str, dtype.char):
        try:
            found = np.dtype(name)
        except TypeError:
            continue
        if found == dtype and found.type is dtype.type:
            return name
    return None


def _array(value: Any, name: str) -> str:
    head, shape = ("array", f", {list(value.shape)}") if isinstance(value, np.ndarray) else ("scalar", "")
    if isinstance(value, (bytes, str)):  # array items would lose trailing NULs
        items = [value[:]]
    else:
        items = np.asarray(value).ravel().tolist()
    if value.dtype == object or _same_bits(items, value):
        content = ", ".join(map(literal, items))
    else:
        content = f"bits={value.tobytes().hex()!r}"
    return f"{head}({name!r}{shape}, [{content}])"


def _same_bits(items: list[Any], value: Any) -> bool:
    if any(i.__class__ not in (bool, int, float, complex, str, bytes) for i in items):
        return False
    # There is a literal for one NaN only.
    items = [float("nan") if i.__class__ is float and i != i else i for i in items]
    return bool(_make_array(value.dtype, [len(items)], items, None).tobytes() == value.tobytes())


class Line:
    """Reads a line of text from left to right; raises `ParseError` on anything unexpected."""

    def __init__(self, number: int, text: str | None) -> None:
        self.number = number
        self.text = text or ""
        self.missing = text is None  # the text ended before this line
        self.at = 0

    def fail(self, expected: str) -> ParseError:
        """Returns the error for something other than `expected` at this position."""
        seen = "the end of the text" if self.missing else repr(self.text)
        return ParseError(f"line {self.number}, column {self.at + 1}: expected {expected} in {seen}")

    def accept(self, token: str) -> bool:
        """Skips `token` if it comes next; returns whether it did."""
        if self.text.startswith(token, self.at):
            self.at += len(token)
            return True
        return False

    def take(self, token: str) -> None:
        """Skips `token`, which must come next."""
        if not self.accept(token):
            raise self.fail(repr(token))

    def match(self, pattern: re.Pattern[str], expected: str) -> str:
        """Skips and returns the text that `pattern` matches here."""
        found = pattern.match(self.text, self.at)
        if found is None:
            raise self.fail(expected)
        self.at = found.end()
        return found.group()

    def end(self) -> None:
        """Checks that the whole line has been read."""
        if self.at != len(self.text) or self.missing:
            raise self.fail("the end of the line")

    def integer(self) -> int:
        """Reads an integer."""
        return int(self.match(_INTEGER, "a whole number"))

    def string(self) -> str:
        """Reads a quoted string."""
        return str(self._evaluated(_TEXT, "a string"))

    def _evaluated(self, pattern: re.Pattern[str], expected: str) -> Any:
        start = self.at
        quoted = self.match(pattern, expected)
        try:
            return ast.literal_eval(quoted)
        except SyntaxError:  # a code point beyond Unicode
            self.at = start
            raise self.fail(expected) from None

    def word(self, expected: str) -> str:
        """Reads a name, quoted or not."""
        quoted = self.text[self.at : self.at + 1] in ("'", '"')
        return self.string() if quoted else self.match(_WORD, expected)

    def sequence(self, item: Callable[[], Any], close: str = "") -> list[Any]:
        """Reads items separated by commas, at least one; with `close`, up to and including it, possibly none."""
        items: list[Any] = []
        if close and self.accept(close):
            return items
        while True:
            items.append(item())
            if not self.accept(", "):
                break
        if close:
            self.take(close)
        return items

    # Specs.

    def spec(self) -> Spec:
        """Reads a spec as `repr` prints it."""
        start = self.at
        enum = self._enum()
        handle = None
        if self.accept("<"):
            behind: list[tuple[int, tuple[int, ...] | None]] = []
            while not self.accept(">"):
                if behind:
                    self.take(" ")
                behind.append((self._enum(), self._shape()))
            handle = tuple(behind)
        shape = self._shape()
        if shape is None or any(size < 0 for size in shape):
            self.at = start
            raise self.fail("a spec with a known shape")
        return intern_spec(enum, shape, handle)

    def _enum(self) -> int:
        name = self.match(NAME, "a dtype")
        try:
            return int(as_dtype(name).as_datatype_enum)
        except TypeError:
            self.at -= len(name)
            raise self.fail("a dtype") from None

    def _shape(self) -> tuple[int, ...] | None:
        if self.accept("[?]"):
            return None
        self.take("[")
        sizes: list[int] = []
        while not self.accept("]"):
            if sizes:
                self.take(",")
            sizes.append(self.integer())
        return tuple(sizes)

    # Values.

    def value(self) -> Any:
        """Reads a value as `literal` prints it."""
        for text, constant in (("None", None), ("True", True), ("False", False)):
            if self.accept(text):
                return constant
        for opening, read in _READERS.items():
            if self.accept(opening):
                return read(self)
        if self.text.startswith("b", self.at):
            return self._evaluated(_BYTES, "a value")
        if self.text[self.at : self.at + 1] in ("'", '"'):
            return self.string()
        return self._number()

    def _number(self) -> Any:
        text = self.match(_NUMBER, "a value")
        return float(text) if any(c in text for c in ".en") else int(text)

    def tuple_rest(self) -> tuple[Any, ...]:
        """Reads the rest of a tuple after its opening parenthesis."""
        items: list[Any] = []
        while not self.accept(")"):
            if items and self.accept(",)"):
                break
            if items:
                self.take(", ")
            items.append(self.value())
        return tuple(items)

    def _complex(self) -> complex:
        start = self.at
        real = self.value()
        self.take(", ")
        imaginary = self.value()
        self.take(")")
        if not all(part.__class__ in (int, float) for part in (real, imaginary)):
            self.at = start
            raise self.fail("two numbers")
        return complex(real, imaginary)

    def _float(self) -> float:
        start = self.at
        bits = self.string()
        self.take(")")
        try:
            return float(_DOUBLE.unpack(bytes.fromhex(bits))[0])
        except (ValueError, struct.error):
            self.at = start
            raise self.fail("the bits of a float") from None

    def _opaque(self) -> Opaque:
        value = Opaque(self.string())
        self.take(")")
        return value

    def _tensor_shape(self) -> Any:
        start = self.at
        value = self.value()
        self.take(")")
        try:
            return TensorShape(value)
        except (TypeError, ValueError, OverflowError):
            self.at = start
            raise self.fail("None or a list of sizes") from None

    def _array(self, scalar: bool = False) -> Any:
        start = self.at
        name = self.string()
        self.take(", ")
        shape: list[int] = []
        if not scalar:
            self.take("[")
            shape = self.sequence(self.integer, "]")
            self.take(", ")
        items: list[Any] = []
        bits = None
        if self.accept("[bits="):
            bits = self.string()
            self.take("]")
        else:
            self.take("[")
            items = self.sequence(self.value, "]")
        self.take(")")
        try:
            dtype = np.dtype(name)
            if scalar and dtype.kind in "SU":
                (text,) = items
                return dtype.type(text)
            array = _make_array(dtype, shape, items, bits)
        except Exception:  # NumPy raises many kinds, and warnings may be errors
            self.at = start
            raise self.fail("a dtype, a shape and values that fit them") from None
        return array[()] if scalar else array


_READERS: dict[str, Callable[[Line], Any]] = {
    "[": lambda line: line.sequence(line.value, "]"),
    "(": Line.tuple_rest,
    "tf.": lambda line: as_dtype(line._enum()),
    "TensorShape(": Line._tensor_shape,
    "array(": Line._array,
    "scalar(": lambda line: line._array(scalar=True),
    "complex(": Line._complex,
    "float(bits=": Line._float,
    "opaque(": Line._opaque,
}


def _make_array(dtype: np.dtype[Any], shape: list[int], items: Any, bits: str | None) -> Any:
    if bits is not None:
        return np.frombuffer(bytes.fromhex(bits), dtype).reshape(shape).copy()
    flat = np.empty(len(items), dtype)
    for i, item in enumerate(items):  # one by one: NumPy would turn lists in an object array into dimensions
        flat[i] = item
    return flat.reshape(shape)
