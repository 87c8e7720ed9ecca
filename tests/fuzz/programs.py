"""Random programs as source text: a tree of statements, which can be made smaller, and the grammar that grows it.

The programs work on `S` (see `state`), on floats `a`, `b`, `c` and whole numbers `i`, `j` of one shape, and on `call`,
the number of the call. Whole numbers are exact in every backend, and so they, or floats compared with a number that no
sum comes out at, decide what the program does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

FLOATS, WHOLES = ("a", "b", "c"), ("i", "j")
TAPES = ("tape", "upper", "third", "fourth", "fifth")  # by how many others are around

FLOAT = """
F + F | F - F | F * 0.5 + F * 0.25 | tf.tanh(F * F) | tf.clip_by_value(F * F, -9.0, 9.0) | tf.maximum(F, F) | -F
tf.where(F > 0.2371, F, F) | tf.sin(F) | tf.sqrt(tf.abs(F) + 1.0) | tf.nn.softmax(F) | tf.reduce_sum(F) * 0.25 + F
tf.reverse(F, [0]) | tf.roll(F, 1, 0) | tf.concat([F[1:], F[:1]], 0) | tf.stack(tf.unstack(F)[::-1])
tf.cast(I, tf.float32) * 0.01 | tf.linalg.matvec(S.matrix, F) * 0.25 | F + S.v | S.v * F | tf.sort(F) | F / 4.0
tf.cumsum(F) * 0.5 | tf.reshape(tf.tile(F, [2]), [2, -1])[1] | tf.gather(F, tf.argsort(I, stable=True)) | F + call
tf.exp(-tf.abs(F)) | tf.math.log1p(tf.abs(F)) | tf.nn.relu(F) | S.bent(F) | tf.add_n([F, F]) * 0.5 | F * S.rate
tf.reduce_max(F) - F | tf.math.divide_no_nan(F, F) * 0.01 | np.float32(0.5) * F | tf.ones_like(F) - F
(F if B else F) | tf.math.l2_normalize(F + 2.0) | tf.stop_gradient(F) + F | tf.map_fn(lambda t: t * 0.5, F)
tf.identity(F) | tf.where(I > 40, F, 0.0) | tf.cast(F > 0.2371, tf.float32) | tf.pad(F, [[1, 0]])[:-1]
tf.einsum("x,x->x", F, F) * 0.1 | tf.concat([F, F], 0)[call % 4 : call % 4 + 3]
tf.tile(F, [3])[call % 5 : call % 5 + 3] | tf.stack([F, F, F])[call % 3, :] | tf.nn.silu(F) * 0.5
tf.stack([F, F, F])[:, call % 2 : call % 2 + 1][:, 0] | F * tf.reshape(S.v, [3]) | F + S.v[call % 3] | S.v[None][0] * F
tf.concat([F[:1], S.v[1:]], 0) | tf.reduce_sum(S.v) * 0.1 + F | tf.transpose(S.v) - F | tf.where(S.v > 0.2371, S.v, F)
F + S.array | S.array * F | S.array - S.v | F * np.float64(0.3) | F / np.sqrt(2.0) | np.float32(2.0) - F
S.v * np.int64(2) | F - S.v * np.float32(0.3)
tf.where(F == F[::-1], F, S.v) | tf.add_n([F, S.v]) * 0.5 | tf.nn.l2_loss(S.v) * 0.1 + F | tf.cumsum(S.v) * 0.5 + F
tf.identity(S.v) + F | tf.cast(S.m, tf.float32) * 0.01 + F | F + np.float32(call % 2)
tf.tanh((F, F, F)[call // 5 % 3]) | (F, S.held)[call // 7 % 2] * 0.5 | F * (S.v, S.alias)[call // 6 % 2]
"""

WHOLE = """
(I + I) % 97 | (I * I) % 97 | I // 3 | tf.maximum(I, I) | tf.cast(F * 7.0 + 0.2371, tf.int32) % 97 | (I + call) % 97
tf.where(I > 40, I, I) | tf.roll(I, 1, 0) | tf.cumsum(I) % 97 | tf.bitwise.bitwise_xor(I, I) % 97 | tf.abs(I - I)
tf.cast(I > 5, tf.int32) | tf.reduce_sum(I) % 97 + I * 0 | tf.sort(I) | tf.reverse(I, [0]) | (I + 1) % 97
tf.cast(I == I[::-1], tf.int32) | tf.cast(I != 3, tf.int32) | tf.where(I == S.m, I, 7) | tf.reshape(S.m, [3]) % 97
tf.cast(tf.argmax(F), tf.int32) + I * 0 | tf.shape(F)[0] + I % 50 | tf.minimum(I, 60) | tf.math.floormod(I, 7)
"""

# What may fail, in some calls.
RISKY = """
F = tf.gather(F, I % 4) | I = I // (I % 3) | I = I % (I % 4) | F = F + F[N] | F = tf.gather(S.v, I % 4)
F = tf.debugging.check_numerics(F / tf.cast(I % 3, tf.float32), "made") | F = tf.ensure_shape(F, [3])
tf.debugging.assert_less(I, 60, "too large") | tf.debugging.Assert(tf.reduce_sum(I) < 150, [I])
tf.debugging.assert_equal(I[0] % 4 == 3, False) | tf.debugging.assert_all_finite(F / tf.cast(I, tf.float32), "made")
F = tf.tensor_scatter_nd_update(F, [[N]], [0.5]) | F = F + tf.gather_nd(F, [[N]]) * 0.5
F = tf.math.unsorted_segment_sum(F, I % 4, 3) | F = S.root(F + 1.2371)
S.v.scatter_update(tf.IndexedSlices(F[:1], [N])) | S.v.scatter_nd_add([[N]], F[:1]) | S.v[M].assign(F[0])
S.v.scatter_add(tf.IndexedSlices(F[:2], I[:2] % 4)) | S.v.scatter_nd_update([[N]], F[:1]) | S.v[N].assign(F[1])
S.v.scatter_sub(tf.IndexedSlices(F * 0.1, tf.range(3))) | F = F + 0.1 * tf.nn.embedding_lookup(S.v, I % 3)
S.add_rows(F, I % 3) | S.add_rows(F, I % 4) | S.v[:2].assign(F[1:]) | S.momentum(F[:2], I[1:] % 4)
F = tf.linalg.inv(tf.linalg.diag(tf.cast(I % 5, tf.float32)))[0] | F = S.embed(I % 4) | F = F[N:] + F
F = tf.reshape(F, [N, -1])[0] + F * 0 | F = tf.stack(tf.split(F, 3))[:, 0] | F = F + tf.math.truediv(call, call % 4)
F = S.first(F, I) | F = S.graph(F, I % 4) | F = F + tf.cast(S.table.lookup(I), tf.float32) * 0.01
tf.debugging.assert_none_equal(I[0], I[1], message=f"in {call}") | tf.debugging.assert_non_negative(I - 3, summarize=1)
tf.Assert(I[1] < 80, ["in words", I, call]) | tf.debugging.assert_near(tf.cast(I, tf.half), tf.cast(I % 90, tf.half))
tf.debugging.assert_shapes([(F, ("n",)), (I, ("n",))]) | tf.compat.v1.assert_greater(I, 2, data=["call", call, I, S.m])
S.checked(F, I, call) | F = F + 0.0 * S.checked(F, I, call) | tf.debugging.assert_greater_equal(I, I - call % 2)
tf.debugging.assert_positive(tf.reduce_sum(I) - 30) | I = tf.math.floormod(100, I % 5) | I = tf.truncatediv(I, I % 4)
"""

RANDOM = """
F = tf.random.uniform([3]) | F = F + tf.random.normal([3]) * 0.1 | F = tf.nn.dropout(F, 0.4)
I = tf.random.shuffle(I) | I = tf.random.uniform([3], 0, 90, tf.int32) | F = S.generator.uniform([3])
F = F * S.generator.normal([3]) * 0.1 | F = tf.random.stateless_uniform([3], I[:2])
F = keras.random.normal((3,), seed=S.seeds) | F = S.dropout(F) | F = tf.random.uniform([3], seed=5)
F = tf.random.truncated_normal([3]) | tf.random.set_seed(call)
I = tf.random.uniform([3], tf.reduce_min(I), 30, tf.int32) | F = keras.random.dropout(F, 0.3, seed=S.seeds)
F = F + float(np.random.random()) | F = tf.cast(tf.random.categorical([F], 3)[0], tf.float32)
"""

STATE = """
S.v.assign(F) | S.v.assign_add(F * 0.1) | S.v.assign_sub(F * 0.1) | S.m.assign(I) | S.m.assign_add(I % 3)
I = S.m % 97 | F = S.v * 1.0 | F = S.v.read_value() | S.made("late", F) | S.late("late", F).assign_add(F * 0.1)
F = S.late("x", F) + F | F = tf.Variable(F) * 0.5 | S.kept.append(F) | F = S.kept.pop() if S.kept else F
S.count += 1 | S.rate = 0.5 + call % 3 | S.table.insert(I, I + 1) | F = F + next(S.numbers) | S.queue.enqueue([F])
F = S.queue.dequeue() if S.queue.size() else F | S.named[call % 3] = F | F = S.named.get(call % 2, F)
F = F + S.alias | S.alias.assign(F * 0.5) | S.v = S.alias | S.v.assign(S.array) | S.v.assign_sub(S.array * 0.1)
F = F + S.v.assign_add(F * 0.1) | S.kept.append(S.v[1:]) | S.v[call % 3].assign(0.5)
S.v.assign(S.v) | S.m.assign(I * 2)
F = S.by_copy(S.v) * 0.5 | S.by_copy(S.own[call % 2], F * 0.1) | F = S.by_copy(S.alias, F) + S.alias
"""

READ = """
S.log.append(I.numpy().tolist()) | S.log.append(int(I[0])) | S.log.append(str(I)) | S.log.append(F)
S.log.append(call) | S.log.append(F.numpy()) | S.log.append([int(k) for k in I]) | S.log.append(f"{I[1]:d}")
S.log.append(I.shape) | print(int(I[2]), file=S.out) | S.log.append(np.asarray(F)) | S.log.append(I[0] == I[1])
S.log.append(repr(I.dtype)) | S.log.append(bool(tf.reduce_any(I > 70))) | S.log.append((S.v.shape, S.count))
S.log.append({"a": F, "i": [I, I]}) | S.log.append(tf.numpy_function(lambda z: z * 2, [F], tf.float32))
F = tf.py_function(S.callback, [F], tf.float32) | S.log.append(tf.constant(b"a" + bytes(call % 3)))
S.log.append(tf.strings.length(tf.constant([bytes(call % 3), "a"]))) | S.log.append(tf.constant(S.numpy(call)))
S.log.append(tf.constant([1, 1.0, True][call % 3])) | S.log.append(tf.stack([S.numpy(call), S.numpy(call)]))
S.log.append(1.0 / tf.constant([0.0, -0.0, 1][call % 3], tf.float64)) | S.log.append(tf.constant([S.numpy(call // 3)]))
"""

KERAS = """
F = S.layer("dense")(F[None])[0] | F = S.layer("norm")(F[None])[0] | F = S.layer("drop")(F[None], training=True)[0]
F = S.layer("model")(F[None])[0] | F = F * keras.losses.mean_squared_error(F, F) | S.layer("metric").update_state(F)
S.log.append(S.layer("metric").result()) | F = keras.ops.softmax(F) | F = S.layer("own")(F[None])[0] | S.train(F)
"""

# Library calls that are followed as one: what they are given may be what they hold, or made of data in the call.
LIBRARY = """
F = S.layer("leaky")(F) | F = S.layer("holding")(F) | F = S.shared(F) | F = S.layer("add")([F, F])
F = S.layer("multiply")([F, F]) | F = S.layer("dense")(F[None])[0] | F = S.layer("model")(F[None], training=call > 9)[0]
F = tf.clip_by_value(F, -1.0, 1.0) | F = F * S.layer("huber")(F, F) | F = S.held | S.held = tf.tanh(F)
S.layer("holding").held = tf.tanh(F) | F = F * S.held | F = tf.constant([0.5, -1.0, 2.0]) | F = tf.constant(S.array)
F = tf.constant(np.full(3, call % 2, np.float32)) | S.array[call % 3] = call % 5 | F = tf.tanh(F) * S.v
S.layer("dense").trainable = call % 7 < 4
"""

# Python of every kind; `B` stands for a condition.
PYTHON = """
F, F = F, F | F = sum([F, F, F]) * 0.3 | items = [F, F]; items.append(F); F = tf.stack(items)[call % 3]
F = (lambda: F)() | F, I = helper(F, I, call) | F = [F * k for k in (1, 2)][-1] * 0.5
I, F = (I, F) if B else (I, F * 0.5) | F = {"x": F, **S.named}["x"] | F = [*stream(F, I)][-1] | F = next(stream(F, I))
assert not B or B, "never mind" | F = S.in_thread(I, lambda: tf.sin(F) + S.v)
S.in_thread(I, lambda: S.v.assign_add(F * 0.1)) | del c; c = F | F = S.in_thread(I, lambda: tf.gather(F, I % 4))
F = S.in_thread(I, lambda: tf.tanh(S.v)) | F = S.in_thread(I, lambda: tf.concat([F[:1], S.v[1:]], 0) * S.v)
F = coexec.opaque(lambda z: z * 0.5 + S.v)(F) | F = max(F, F, key=S.size) | F = S.inner(F, I)
F = functools.reduce(tf.add, [F, F, F]) * 0.3 | x = F; x *= 0.5; F = x
"""

# What reaches TensorFlow by other ways: bytes, NumPy's scalars, modules imported on the spot, functions of Python's
# inside of operations, generators, and threads that work at the same time as others.
FOREIGN = """
S.log.append(tf.constant(S.bytes(call)).numpy()) | S.log.append(tf.strings.length([S.bytes(call), b"", S.bytes(0)]))
S.log.append(tf.io.parse_tensor(tf.io.serialize_tensor(I % 2).numpy(), tf.int32))
S.log.append(tf.constant(S.word(call))) | S.log.append(tf.strings.join([S.bytes(call), S.bytes(2)]))
S.kept.append(tf.io.decode_raw(S.bytes(1), tf.uint8)) | F = F + float(S.scalar(call) == S.scalar(0))
S.log.append(tf.constant(S.scalar(call))) | S.log.append(S.scalar(call) + 0)
S.log.append(tf.cast(S.scalar(call), tf.float32)) | F = F * tf.cast(tf.constant(S.scalar(call)), tf.float32)
F = F + np.float32(call % 3) | F = F * np.float16(0.5).astype(np.float32) | I = I + np.int32(call % 4)
F = F - np.float64(0.5) | import tensorflow as tensors; F = tensors.tanh(F) * tensors.constant(0.5)
from tensorflow import math as m; F = m.sin(F) | import numpy as numbers; F = F + numbers.float32(0.25)
import keras as k3; F = k3.ops.relu(F) | F = tf.py_function(lambda z: z + S.v, [F], tf.float32)
S.log.append(tf.py_function(S.describe, [F, I], tf.string))
F = tf.py_function(lambda z: S.first(z, I), [F], tf.float32) | F = tf.numpy_function(np.tanh, [F], tf.float32)
F = sum((z * 0.5 for z in S.halves(F, I)), F) | F = list(S.halves(F, I))[call % 2] | F = S.sent(F, I)
F = S.paused(F, call) | F = S.at_once(I, lambda: tf.sin(F), lambda: F * 2.0)
F = S.at_once(I, lambda: S.v + F, lambda: tf.gather(F, I % 4))
"""

CONDITION = """
call % 3 == 1 | call > 4 | I[0] > 40 | tf.reduce_sum(I) % 2 == 0 | tf.reduce_sum(F) > 0.2371 | len(S.kept) % 2
bool(tf.reduce_any(I > 70)) | float(F[0]) > 0.2371 | S.count % 4 == 2 | I[0] == I[1] | int(I[1]) in (3, 5, 7, 11)
not tf.reduce_all(I > 3) | call % 2 and I[1] > 10 | tf.reduce_max(I) - 50 > 0 or call == 3 | F.shape[0] == 3
"""

RAISED = """
raise Planned(int(I[0])) | raise KeyError("key") | raise S.planned | raise Planned(call) from S.planned | assert B
raise tf.errors.InvalidArgumentError(None, None, "mine") | raise StopIteration(call) | {}[call] | raise Planned(I)
"""

CAUGHT = (
    "Planned", "tf.errors.InvalidArgumentError", "Exception", "(Planned, LookupError)", "tf.errors.OpError",
    "(ArithmeticError, AssertionError)", "BaseException", "StopIteration",
)  # fmt: skip

MANAGERS = (
    "contextlib.suppress(Planned)", "contextlib.suppress(tf.errors.InvalidArgumentError)", "S.scope(F)",
    "tf.name_scope('scope')", "tf.GradientTape() as other", "S.lock", "contextlib.nullcontext()",
)  # fmt: skip

LOOPS = (
    "for k in range(int(I[0]) % 4):", "for k in range(2):", "for b in tf.unstack(F):\n    b = b + F",
    "for a in [F, F]:",
    "for k, c in enumerate([F, F]):", "for a in stream(F, I):", "for k in range(call % 3):", "for k in I % 3:",
)  # fmt: skip

# How often each kind comes: in most programs, and in those that are about library calls and tapes.
KINDS = {
    "float": (FLOAT, 20, 10), "whole": (WHOLE, 8, 2), "risky": (RISKY, 14, 1), "random": (RANDOM, 8, 1),
    "state": (STATE, 14, 3), "read": (READ, 6, 2), "keras": (KERAS, 4, 4), "library": (LIBRARY, 4, 30),
    "python": (PYTHON, 8, 2), "foreign": (FOREIGN, 8, 2),
}  # fmt: skip
COMPOUND = {
    "if": (5, 5), "loop": (3, 1), "while": (1, 0), "try": (6, 1), "with": (2, 1), "tape": (3, 9), "yield": (1, 0),
}  # fmt: skip


def alternatives(text: str) -> list[str]:
    """The alternatives of a grammar's rule."""
    return [part.strip() for line in text.strip().splitlines() for part in line.split(" | ")]


RULES = {kind: alternatives(text) for kind, (text, *_) in KINDS.items()}
CONDITIONS, RAISES = alternatives(CONDITION), alternatives(RAISED)


@dataclass
class Statement:
    """One statement: its clauses, each a head and, where it has one, a block."""

    clauses: list[tuple[str, list[Statement] | None]]

    def lines(self, indent: str) -> Iterator[str]:
        for head, body in self.clauses:
            yield from (indent + line for line in head.splitlines())
            if body is not None:
                yield from lines(body, indent + "    ")


def lines(block: list[Statement], indent: str) -> Iterator[str]:
    """The lines of a block."""
    if not block:
        yield indent + "pass"
    for statement in block:
        yield from statement.lines(indent)


HEAD = {
    "helper": "def helper(a, i, call):\n    b, c, j = a * 0.5, a + 1.0, i",
    "stream": "def stream(a, i, call=0):\n    b, c, j = a - 1.0, a * 2.0, i + 1",
    "step": "def step(a, i, call):\n    b, c, j = a * 0.5, a + 1.0, (i * 3 + 1) % 97",
}
TAIL = {"helper": "return a, i", "stream": "yield a", "step": "return {'a': a, 'others': [b, (c, j)]}, i"}


@dataclass
class Program:
    """The functions of a program by their names, and what its calls are given."""

    functions: dict[str, list[Statement]]
    inputs: list[int]  # for each call the number of what it is given; see `state.arguments`
    seed: int = 0
    ways: dict[str, int] = field(default_factory=dict)  # call and event at which a followed call is made to diverge

    @property
    def source(self) -> str:
        parts = []
        for name, block in self.functions.items():
            if name == "step" or any(f"{name}(" in part for part in self._texts(name)):
                parts.append("\n".join([HEAD[name], *lines(block, "    "), "    " + TAIL[name]]))
        return "\n\n".join(parts) + "\n"

    def _texts(self, but: str) -> list[str]:
        return ["\n".join(lines(block, "")) for name, block in self.functions.items() if name != but]


class Maker:
    """Writes random programs."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.about_tapes = self.random.random() < 0.3
        self.inside: list[str] = []  # the compound statements around
        self.function = "step"

    def program(self) -> Program:
        """Returns a program; the same for the same seed."""
        functions = {}
        for name, most in (("helper", 3), ("stream", 2), ("step", 9)):
            self.function = name
            functions[name] = self.block(most, least=2 if name == "step" else 1)
        shapes = 3 if self.random.random() < (0.95 if self.about_tapes else 0.8) else 5
        # What a library call does is known after some calls, and told from other things that it may do.
        inputs = [0, 0, *(self.random.randrange(shapes) for _ in range(18 if self.about_tapes else 6))]
        ways = {"call": self.random.randrange(2, 8), "event": self.random.randrange(12)}
        return Program(functions, inputs, self.seed, ways if self.random.random() < 0.25 else {})

    def block(self, most: int, least: int = 1) -> list[Statement]:
        return [self.statement() for _ in range(self.random.randint(least, most))]

    def statement(self) -> Statement:
        if self.random.random() < (0.3 if len(self.inside) < 3 else 0.0):
            return self.compound()
        if self.inside and self.random.random() < 0.12:
            return self.leaving()
        if "tape" in self.inside and self.random.random() < (0.25 if self.about_tapes else 0.1):
            return self.watching()
        kinds = [kind for kind in KINDS if self.function == "step" or kind != "python"]
        kind = self.random.choices(kinds, [KINDS[k][1 + self.about_tapes] for k in kinds])[0]
        text = self.random.choice(RULES[kind])
        if kind == "float":
            text = f"F = {text}"
        elif kind == "whole":
            text = f"I = {text}"
        return Statement([(self.filled(text), None)])

    def leaving(self) -> Statement:
        """A statement that leaves its block: always, or under a condition."""
        texts = [self.random.choice(RAISES)] * 3
        if self.function != "stream":
            texts.append(f"return {self.random.choice(('F, I', '(F, I)', 'F * 2.0, I'))}")
        if "loop" in self.inside:
            texts += ["break", "continue"]
        if "except" in self.inside:
            texts += ["raise", "raise KeyError(call) from None"]
        leaving = Statement([(self.filled(self.random.choice(texts)), None)])
        if self.random.random() < 0.15:
            return leaving
        return Statement([(self.filled("if B:"), [leaving])])

    def watching(self) -> Statement:
        """Has one of the tapes around watch something from here on: always, or under a condition."""
        tape = self.random.choice(TAPES[: self.inside.count("tape")])
        watching = Statement([(f"{tape}.watch({self.random.choice((*FLOATS, 'S.v', 'S.held'))})", None)])
        return watching if self.random.random() < 0.5 else Statement([(self.filled("if B:"), [watching])])

    def compound(self) -> Statement:
        kind = self.random.choices(list(COMPOUND), [often[self.about_tapes] for often in COMPOUND.values()])[0]
        self.inside.append(kind)
        try:
            return getattr(self, f"_{kind}")()
        finally:
            self.inside.pop()

    def _if(self) -> Statement:
        clauses = [(self.filled("if B:"), self.block(3))]
        if self.random.random() < 0.2:
            clauses.append((self.filled("elif B:"), self.block(2)))
        if self.random.random() < 0.6:
            clauses.append(("else:", self.block(3)))
        return Statement(clauses)

    def _loop(self) -> Statement:
        loops = [loop for loop in LOOPS if self.function != "stream" or "stream(" not in loop]  # else without an end
        head, _, first = self.filled(self.random.choice(loops)).partition("\n")
        body = self.block(3)
        if first:
            body.insert(0, Statement([(first.strip(), None)]))
        clauses = [(head, body)]
        if self.random.random() < 0.15:
            self.inside[-1] = "else"  # which is no part of the loop
            clauses.append(("else:", self.block(1)))
        return Statement(clauses)

    def _while(self) -> Statement:
        self.inside[-1] = "loop"
        turn = f"t{len(self.inside)}"  # an inner loop must not begin this one anew
        count = Statement([(f"{turn} += 1", None)])
        # In parentheses: an `or` in the condition would outvote the bound.
        head = f"{turn} = 0\nwhile {turn} < {self.random.randint(2, 5)} and ({self.filled(self.condition())}):"
        return Statement([(head, [count, *self.block(3)])])

    def _try(self) -> Statement:
        clauses = [("try:", self.block(3))]
        for _ in range(self.random.choice((0, 1, 1, 1, 2))):
            name = self.random.choice(CAUGHT)
            self.inside[-1] = "except"
            body = [Statement([("S.log.append(type(error).__name__)", None)]), *self.block(2)]
            self.inside[-1] = "try"
            clauses.append((f"except {name} as error:", body))
        if len(clauses) > 1 and self.random.random() < 0.2:
            clauses.append(("else:", self.block(1)))
        if len(clauses) == 1 or self.random.random() < 0.3:
            clauses.append(("finally:", self.block(2)))
        return Statement(clauses)

    def _with(self) -> Statement:
        return Statement([(self.filled(f"with {self.random.choice(MANAGERS)}:"), self.block(3))])

    def _tape(self) -> Statement:
        choice, chance, tape = self.random.choice, self.random.random, TAPES[self.inside.count("tape") - 1]
        kept, source, result = chance() < 0.3, choice(FLOATS), choice(FLOATS)
        others = [choice((*FLOATS, "S.held", "S.alias", '*S.layer("dense").trainable_variables')) for _ in range(2)]
        options = f"persistent={kept}" + (", watch_accessed_variables=False" if chance() < 0.2 else "")
        watch = f"\n    {tape}.watch({source})" if chance() < 0.7 else ""
        loss = Statement([(self.filled("loss = tf.reduce_sum(F * F)"), None)])
        target = self.filled(choice(("loss", "loss", "loss", "F", "[loss, F]", "F, output_gradients=F")))
        target, _, given = target.partition(", output")
        ask = f"found = {tape}.gradient({target}, [S.v, {source}, {', '.join(others)}]{given and f', output{given}'})"
        uses = "S.update(found[0])", f"{result} = S.bounded(found[1], {result})", "S.optimize(found)"
        uses += f"{result} = S.gathered(found, {result})", f"{result} = S.gathered(found, {result})"
        again = [Statement([(f"S.update({tape}.gradient(loss, [{others[0]}, S.v])[-1])", None)])] if kept else []
        between = self.block(2) if chance() < 0.5 else []
        if chance() < 0.4:  # what comes behind is launched apart from what the tape has recorded
            between.insert(0, Statement([("S.log.append(float(loss))", None)]))
        used = [*between, Statement([(ask, None)]), Statement([(choice(uses), None)]), *again]
        head = f"with tf.GradientTape({options}) as {tape}:{watch}"
        return Statement([(head, [*self.block(3), loss]), ("if True:", used)])

    def _yield(self) -> Statement:
        if self.function == "stream":
            return Statement([("yield a", None)])
        return self._if()

    def condition(self) -> str:
        return self.random.choice(CONDITIONS)

    def filled(self, text: str) -> str:
        """Replaces the symbols of the grammar: floats, whole numbers, an index that may be too large, conditions."""
        out, rest = "", text
        while rest:
            symbol, alone = rest[0], not out[-1:].isalnum() and not rest[1:2].isalnum()
            alone = alone and out[-1:] not in ("_", ".", "'", '"') and rest[1:2] not in ("_",)
            if symbol == "S" or not alone:
                out += symbol
            elif symbol == "F":
                one, other = self.random.choice(FLOATS), self.random.choice(FLOATS)
                # An argument that is another one for some calls: what was learnt with one is used with the other.
                turns = out.endswith("(") and self.about_tapes and self.random.random() < 0.15
                out += f"({one}, {other})[call // 6 % 2]" if turns else one
            elif symbol == "I":
                out += self.random.choice(WHOLES)
            elif symbol == "N":
                out += f"tf.reduce_sum({self.random.choice(WHOLES)}) % 4"
            elif symbol == "M":
                out += f"int({self.random.choice(WHOLES)}[0] % 4)"
            elif symbol == "B":
                out += self.filled(self.condition())
            else:
                out += symbol
            rest = rest[1:]
        return out


def smaller(block: list[Statement]) -> Iterator[list[Statement]]:
    """The block with a little less: without some statements, or with one replaced by what is inside of it."""
    size = len(block)
    step = size
    while step >= 1:
        for start in range(0, size, step):
            yield block[:start] + block[start + step :]
        step //= 2
    for n, statement in enumerate(block):
        for body in (body for _, body in statement.clauses if body):
            yield [*block[:n], *body, *block[n + 1 :]]
        if len(statement.clauses) > 1:
            for k in range(1, len(statement.clauses)):
                fewer = statement.clauses[:k] + statement.clauses[k + 1 :]
                yield [*block[:n], Statement(fewer), *block[n + 1 :]]
        for k, (head, body) in enumerate(statement.clauses):
            for less in smaller(body) if body else ():
                clauses = [*statement.clauses[:k], (head, less), *statement.clauses[k + 1 :]]
                yield [*block[:n], Statement(clauses), *block[n + 1 :]]
