"""Philox: random operations, lowered so that graphs and XLA draw the numbers that eager kernels draw.

TensorFlow's kernels use Philox: ten rounds turn a key and a counter into 128 bits. XLA produces the same bits for the
same key and counter, but maps them to other numbers (TensorFlow 2.21), so for XLA the kernels' arithmetic is emitted: a
uniform float is the low bits of a word as the mantissa of a number in [1, 2), minus 1; two uniforms make two normals
(Box-Muller). Measured on a million numbers: uniforms and integers are bit-identical; normals are within 3e-7 relative,
as XLA has its own logarithm, sine and cosine.

A word is drawn as half of a 64-bit integer: XLA draws those in a third of the time of 32-bit ones, and in 0.9 of the
kernel's time on two cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from coexec.lowering.function_body import Body
from coexec.lowering.xla.rewrites import barrier
from tracer.inputs import natural_enum
from tracer.nodedef import Symbol
from tracer.private import types_pb2
from tracer.seeds import Pair, settled
from tracer.spec import Spec, intern_spec

UINT16, UINT32, UINT64 = (int(getattr(types_pb2, f"DT_{name}")) for name in ("UINT16", "UINT32", "UINT64"))
INT32, INT64 = int(types_pb2.DT_INT32), int(types_pb2.DT_INT64)
HALF, BFLOAT16 = int(types_pb2.DT_HALF), int(types_pb2.DT_BFLOAT16)
FLOAT, DOUBLE = int(types_pb2.DT_FLOAT), int(types_pb2.DT_DOUBLE)

PHILOX, AUTO_SELECT = 1, 3  # TensorFlow's algorithm ids; the second selects Philox on CPUs and GPUs
SCRAMBLER = 0x02461E293EC8F720


class _Float(NamedTuple):
    """A float's bit layout: dtype of the word, mask of the mantissa, and the bits of the exponent of 1."""

    word: int
    mantissa: int
    exponent: int


_FLOATS = {
    HALF: _Float(UINT16, 0x3FF, 0xF << 10),
    BFLOAT16: _Float(UINT16, 0x7F, 0x7F << 7),
    FLOAT: _Float(UINT32, 0x7FFFFF, 0x7F << 23),
    DOUBLE: _Float(UINT64, 0xFFFFFFFFFFFFF, 0x3FF << 52),
}

# The stateless operation that draws the same numbers as the seeded one, with the first seed as its key and the second
# as the upper half of its counter.
STATELESS = {
    "RandomUniform": "StatelessRandomUniformV2",
    "RandomUniformInt": "StatelessRandomUniformIntV2",
    "RandomStandardNormal": "StatelessRandomNormalV2",
    "TruncatedNormal": "StatelessTruncatedNormalV2",
}
WORDS = 3  # fed per random operation


def words_of(pairs: list[Pair]) -> np.ndarray[Any, Any]:
    """Returns the feed for pairs of seeds: a flat uint64 array of keys and counters, random where no seed is set."""
    words = [word for one, other in settled(pairs) for word in (int(one) % 2**64, 0, int(other) % 2**64)]
    return np.array(words, np.uint64)


def seeded(body: Body, op: str, inputs: list[Any], spec: Spec, words: Symbol, draw: int, by_xla: bool) -> Symbol:
    """Emits a seeded random operation, whose seeds are number `draw` of the fed `words`; returns its output."""
    key = body.make("Slice", [words, [WORDS * draw], [1]], UINT64, (1,))
    counter = body.make("Slice", [words, [WORDS * draw + 1], [2]], UINT64, (2,))
    given = [inputs[0], key, counter, PHILOX, *inputs[1:]]
    if by_xla:
        drawn = as_drawn(body, STATELESS[op], given, [spec])
        if drawn is None:
            raise NotImplementedError(f"{op} under XLA")
        return drawn[0]
    if op == "RandomUniformInt":
        given[4:] = [body.symbol(v, spec.enum) for v in given[4:]]
        return body.make(STATELESS[op], given, spec.enum, spec.shape)
    return body.make(STATELESS[op], given, spec.enum, spec.shape, dtype=spec.enum)


def skipped(body: Body, state: Symbol, algorithm: Any, count: Any) -> Symbol:
    """Returns the state (counter and key, shape [3]) of a `tf.random.Generator` after drawing `count` numbers."""
    if isinstance(algorithm, Symbol) or int(algorithm) != PHILOX or state.spec.shape != (3,):
        raise NotImplementedError("the generator has another algorithm than Philox")
    words = body.make("Bitcast", [state], UINT64, (3,), type=UINT64)
    low, high, key = (body.make("Slice", [words, [n], [1]], UINT64, (1,)) for n in range(3))
    moved = body.make("AddV2", [low, body.make("Mul", [body.symbol(count, UINT64), 256], UINT64, ())], UINT64, (1,))
    carry = body.make("Cast", [body.compare("Less", moved, low)], UINT64, (1,), DstT=UINT64)
    after = [moved, body.make("AddV2", [high, carry], UINT64, (1,)), key]
    words = body.make("ConcatV2", [after, 0], UINT64, (3,))
    return body.make("Bitcast", [words], state.spec.enum, (3,), type=state.spec.enum)


def as_drawn(body: Body, op: str, inputs: list[Any], specs: list[Spec]) -> list[Symbol] | None:
    """Emits a stateless random operation for XLA as its kernel's arithmetic; returns None for other operations.

    Raises `NotImplementedError` if the algorithm is not known to be Philox.
    """
    if op == "StatelessRandomGetKeyCounter":
        return list(_scrambled(body, inputs[0]))
    make = _DRAWS.get(op)
    if make is None:
        return None
    _, key, counter, algorithm, *rest = inputs
    if isinstance(algorithm, Symbol):
        if algorithm.op != "StatelessRandomGetAlg":
            raise NotImplementedError(f"the algorithm of {op} is not known")
    elif int(algorithm) not in (PHILOX, AUTO_SELECT):
        raise NotImplementedError(f"{op} has another algorithm than Philox")
    (spec,) = specs
    if 0 in spec.shape:
        return [body.make("Fill", [list(spec.shape), body.constant(0, spec.enum)], spec.enum, spec.shape)]
    # With a known key XLA would constant-fold the draw, number by number.
    stream = _Stream(body, *(barrier(body, body.symbol(v, UINT64)) for v in (key, counter)))
    return [body.make("Reshape", [make(body, stream, rest, spec), list(spec.shape)], spec.enum, spec.shape)]


def _scrambled(body: Body, seed: Any) -> tuple[Symbol, Symbol]:
    """Returns the key and counter derived from two seeds: 128 bits of Philox under a fixed key of TensorFlow's.

    XLA's own lowering treats negative seeds differently.
    """
    seed = body.symbol(seed, natural_enum(seed) if not isinstance(seed, Symbol) else INT32)
    wide = body.make("Cast", [seed], INT64, (2,), DstT=INT64)
    counter = body.make("Bitcast", [wide], UINT64, (2,), type=UINT64)
    mixed = _Stream(body, body.constant([SCRAMBLER], UINT64), barrier(body, counter)).long_words(2)
    key, upper = (body.make("Slice", [mixed, [n], [1]], UINT64, (1,)) for n in range(2))
    return key, body.make("ConcatV2", [[body.constant([0], UINT64), upper], 0], UINT64, (2,))


class _Stream:
    """The bits that Philox produces for a key and a counter."""

    def __init__(self, body: Body, key: Symbol, counter: Symbol) -> None:
        self._body = body
        self._key = key
        self._counter = counter

    def long_words(self, count: int) -> Symbol:
        """Returns `count` 64-bit words."""
        given = [[count], self._key, self._counter, PHILOX]
        return self._body.make("StatelessRandomUniformFullIntV2", given, UINT64, (count,), dtype=UINT64)

    def swapped_words(self, count: int) -> Symbol:
        """Returns `count` 64-bit words with the half drawn first as the upper one."""
        body, words = self._body, self.long_words(count)
        up, down = (body.make(op, [words, 32], UINT64, (count,)) for op in ("LeftShift", "RightShift"))
        return body.make("BitwiseOr", [up, down], UINT64, (count,))

    def halves(self, count: int) -> tuple[Symbol, Symbol]:
        """Returns the first `count` even-numbered 32-bit words, and the odd-numbered ones."""
        body, long = self._body, self.long_words(count)
        upper = body.make("RightShift", [long, 32], UINT64, (count,))
        low, high = (body.make("Cast", [v], UINT32, (count,), DstT=UINT32) for v in (long, upper))
        return low, high

    def words(self, count: int) -> Symbol:
        """Returns `count` 32-bit words."""
        half = -(-count // 2)
        return _first(self._body, self._body.make("Pack", [list(self.halves(half))], UINT32, (half, 2), axis=1), count)


def _uniform(body: Body, stream: _Stream, inputs: list[Any], spec: Spec) -> Symbol:
    count = math.prod(spec.shape)
    if spec.enum == DOUBLE:
        return _unit(body, stream.swapped_words(count), DOUBLE)
    return _unit(body, stream.words(count), spec.enum)


def _unit(body: Body, words: Symbol, enum: int) -> Symbol:
    """Returns floats in [0, 1), one per word."""
    form, shape = _FLOATS[enum], words.spec.shape
    if form.word != words.spec.enum:
        words = body.make("Cast", [words], form.word, shape, DstT=form.word)
    mantissa = body.make("BitwiseAnd", [words, form.mantissa], form.word, shape)
    bits = body.make("BitwiseOr", [mantissa, form.exponent], form.word, shape)
    return body.make("Sub", [body.make("Bitcast", [bits], enum, shape, type=enum), 1.0], enum, shape)


def _integers(body: Body, stream: _Stream, inputs: list[Any], spec: Spec) -> Symbol:
    count, least, limit = math.prod(spec.shape), inputs[0], inputs[1]
    words, enum = (stream.long_words(count), UINT64) if spec.enum == INT64 else (stream.words(count), UINT32)
    least, limit = (body.make("Bitcast", [body.symbol(v, spec.enum)], enum, (), type=enum) for v in (least, limit))
    span = body.make("Sub", [limit, least], enum, ())
    within = body.make("FloorMod", [words, span], enum, words.spec.shape)
    numbers = body.make("AddV2", [within, least], enum, words.spec.shape)
    return body.make("Bitcast", [numbers], spec.enum, words.spec.shape, type=spec.enum)


def _full_integers(body: Body, stream: _Stream, inputs: list[Any], spec: Spec) -> Symbol:
    count = math.prod(spec.shape)
    words = stream.long_words(count) if spec.enum in (INT64, UINT64) else stream.words(count)
    return body.make("Bitcast", [words], spec.enum, words.spec.shape, type=spec.enum)


def _normal(body: Body, stream: _Stream, inputs: list[Any], spec: Spec) -> Symbol:
    """Box-Muller: two uniforms determine the radius and the angle of a pair of normals."""
    count = math.prod(spec.shape)
    half = -(-count // 2)
    enum = DOUBLE if spec.enum == DOUBLE else FLOAT

    def on_each(op: str, *values: Any) -> Symbol:
        return body.make(op, list(values), values[0].spec.enum, values[0].spec.shape)

    if enum == DOUBLE:
        words = body.make("Reshape", [stream.swapped_words(2 * half), [half, 2]], UINT64, (half, 2))
        first, second = body.add("Unpack", [words], ("num", 2, "axis", 1), [_like(words, (half,))] * 2)
    else:
        first, second = stream.halves(half)
    distance = on_each("Maximum", _unit(body, first, enum), 1e-7)
    distance = on_each("Sqrt", on_each("Mul", on_each("Log", distance), -2.0))
    # The kernel multiplies by 2 pi in double precision, and rounds afterwards.
    turn = body.make("Cast", [_unit(body, second, enum)], DOUBLE, (half,), DstT=DOUBLE)
    angle = body.make("Cast", [on_each("Mul", turn, 2 * math.pi)], enum, (half,), DstT=enum)
    pair = [on_each("Mul", on_each(op, angle), distance) for op in ("Sin", "Cos")]
    numbers = _first(body, body.make("Pack", [pair], enum, (half, 2), axis=1), count)
    return numbers if enum == spec.enum else body.make("Cast", [numbers], spec.enum, (count,), DstT=spec.enum)


def _first(body: Body, values: Symbol, count: int) -> Symbol:
    """Returns the first `count` elements of a flattened tensor."""
    size = math.prod(values.spec.shape)
    flat = body.make("Reshape", [values, [size]], values.spec.enum, (size,))
    return flat if size == count else body.make("Slice", [flat, [0], [count]], values.spec.enum, (count,))


def _like(symbol: Symbol, shape: tuple[int, ...]) -> Spec:
    return intern_spec(symbol.spec.enum, shape)


_Arithmetic = Callable[[Body, _Stream, list[Any], Spec], Symbol]

# By operation, how the bits become numbers.
_DRAWS: dict[str, _Arithmetic] = {
    "StatelessRandomUniformV2": _uniform,
    "StatelessRandomUniformIntV2": _integers,
    "StatelessRandomUniformFullIntV2": _full_integers,
    "StatelessRandomNormalV2": _normal,
}
