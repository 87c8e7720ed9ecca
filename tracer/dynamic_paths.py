"""Dynamic paths: steps for any size, derived from those of two calls that did the same at other sizes.

Each combination of sizes has steps of its own: operations are wired, shapes inferred and library calls learnt for it
anew, which takes several times as long as running it eagerly. That never pays where sizes keep changing, as of a mask's
elements, graphs, or sequences. So once an operation has come in three sizes, the steps of two calls that are alike but
for sizes are replaced by ones in which those dimensions are open. A number or dimension that differs between the two
calls has to be a function of the open ones (`sizes.Size`): the shapes that this gives are compared with what
TensorFlow's shape functions infer for small and large sizes, and numbers that Python passes are compared on each call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tracer.cursor import MAX_STEPS
from tracer.derive import folded_variant, inferred_variant
from tracer.graph import CONST, LIST, Node, Step, TraceGraph, Variant
from tracer.inputs import shape_like
from tracer.lazy import Output
from tracer.op import Const, array_in, freeze
from tracer.shape_rules import BY_NUMBERS, shape_of
from tracer.sizes import (
    LEAST,
    UNKNOWN,
    DynamicOutput,
    DynamicSpec,
    Shaped,
    Size,
    SizedConst,
    const_at,
    dims_at,
    settled,
)
from tracer.spec import RESOURCE, VARIANT, Spec, intern_spec

MIN_SIZES = 3  # of an operation, before its path is made dynamic: a program that has but two is best off with two paths
MAX_FAMILIES = 64
MAX_ATTEMPTS = 3  # to make a path dynamic; beyond these, something else than sizes differs between its calls
MAX_SIZES = 10  # open dimensions of a path
_LARGEST = 2**31 - 1  # a size beyond the integers in which TensorFlow holds shapes cannot be compared
# Sizes at which shapes are compared, one for each open dimension: a few, tens, hundreds, thousands, a million.
_SAMPLES = (
    range(LEAST, LEAST + MAX_SIZES),
    range(LEAST + MAX_SIZES, LEAST, -1),
    (37, 41, 43, 47, 53, 59, 61, 67, 71, 73),
    (313, 317, 331, 337, 347, 349, 353, 359, 367, 373),
    (5003, 5009, 5011, 5021, 5023, 5039, 5051, 5059, 5077, 5081),
    (1000003, 1000033, 1000037, 1000039, 1000081, 1000099, 1000117, 1000121, 1000133, 1000151),
)


class _Differ(Exception):
    """Two segments differ in something else than sizes; never leaves this module."""


class _TooSmall(_Differ):
    """A size of one of them is 0 or 1, at which operations do something else: others may do."""


class _Member:
    """A segment of one call: its last step, and the values of the feeds that were Python numbers, by feed."""

    def __init__(self, last: Step, numbers: dict[int, Any]) -> None:
        self.last = last
        self.numbers = {k: tensor for k, tensor in numbers.items() if not _is_data(tensor)}
        self.steps = last.chain()
        # The place of each feed among those that are no numbers: a constant may have become a feed between two calls.
        ranks, rank = [], 0
        for k in range(last.external):
            ranks.append(rank)
            rank += k not in self.numbers
        self.ranks = ranks

    def outline(self) -> Any:
        """Returns what segments have in common that differ only in sizes and numbers."""
        return tuple([(id(s.node), s.host, self.named(s.slots), tuple(
            [(i, self.named(slots)) for i, (slots, _) in s.lists.items()])) for s in self.steps])  # fmt: skip

    def named(self, slots: tuple[int, ...]) -> tuple[Any, ...]:
        """Returns slots with feeds by their places, and None for constants and numbers."""
        return tuple([s if s >= 0 or s == LIST else None if s == CONST or -1 - s in self.numbers
                      else -1 - self.ranks[-1 - s] for s in slots])  # fmt: skip


class DynamicPaths:
    """The dynamic paths of one function, and the segments that may become some."""

    def __init__(self, is_kept: Callable[[Step], bool]) -> None:
        """`is_kept`: whether to keep a path beside the dynamic one, given its first step: it may be compiled."""
        self._is_kept = is_kept
        self._families: dict[Any, list[_Member]] = {}
        self._attempts: dict[Any, int] = {}
        self.made = 0  # how many there are

    def note(self, graph: TraceGraph, last: Step, numbers: dict[int, Any]) -> None:
        """Notes a segment that had new wiring; makes its path dynamic if it is the same as another but for sizes."""
        if last.dynamic or last.opened or last.op is None or (last.variant is None and not last.host):
            return
        member = _Member(last, numbers)
        key = id(last.root()), member.outline()
        if self._attempts.get(key, 0) >= MAX_ATTEMPTS:
            return
        if len(self._families) >= MAX_FAMILIES:
            self._families.clear()
            self._attempts.clear()
        family = self._families.setdefault(key, [])
        family[:] = [other for other in family[-2:] if other.last is not last and other.last.root() is last.root()]
        for other in family:
            split = _split(other, member)
            if split is None or len(member.steps[split].node.variants) < MIN_SIZES:  # type: ignore[union-attr]
                continue
            try:
                first, count = _Generalised(other, member, split).build()
            except _TooSmall:
                continue
            except _Differ:
                self._attempts[key] = self._attempts.get(key, 0) + 1
                break
            before = first.parent
            assert before is not None
            old = other.steps[split], member.steps[split]
            before.next = [step for step in before.next if step not in old or self._is_kept(step)]
            before.add(first, MAX_STEPS)
            graph.steps += count
            self.made += 1
            del self._families[key]
            return
        family.append(member)


def _split(one: _Member, other: _Member) -> int | None:
    """Returns the place of the first step that two segments do not share; None if there is none."""
    for n, (a, b) in enumerate(zip(one.steps, other.steps, strict=True)):
        if a is not b:
            return n
    return None


class _Generalised:
    """Builds the steps for any size from those of two segments, `one` and `other`, from the place `split` on."""

    def __init__(self, one: _Member, other: _Member, split: int) -> None:
        self._one, self._other, self._split = one, other, split
        self._symbols: dict[tuple[int, int], Size] = {}  # by their values in the two segments
        self._specs: list[Spec] = []  # of the feeds
        self._feeds: dict[int, int] = {}  # of the other segment: their numbers here
        self._dims: list[tuple[Any, ...]] = []  # of the feeds, with sizes for open dimensions
        self._parts: list[Any] = []  # the segment's tensors, as outputs of its steps
        self._checks: list[tuple[Node, tuple[Any, ...], tuple[Output, ...]]] = []

    def build(self) -> tuple[Step, int]:
        """Returns the first step, and how many there are; raises `_Differ`."""
        before = self._other.steps[self._split].parent
        assert before is not None
        for step in self._other.steps[: self._split]:
            for k in range(step.external - len(step.specs), step.external):
                self._add_feed(k, step.specs[k - step.external + len(step.specs)])
            self._parts += step.outputs
        first, parent, count = None, before, 0
        pairs = list(zip(self._one.steps, self._other.steps, strict=True))[self._split :]
        for a, b in pairs:
            step = self._step(a, b, parent)
            step.dynamic = True
            if first is None:
                first = step
            else:
                parent.next, parent.hot = [step], step
            parent = step
            count += 1
        assert first is not None
        if not self._symbols:
            raise _Differ
        self._check()
        return first, count

    def _add_feed(self, k: int, spec: Spec, dims: tuple[Any, ...] | None = None) -> None:
        self._feeds[k] = len(self._specs)
        self._specs.append(spec)
        self._dims.append(spec.shape if dims is None else dims)

    def _step(self, a: Step, b: Step, parent: Step) -> Step:
        if b.variant is None:
            if a.variant is not None or b.join:
                raise _Differ
            step = Step(parent, b.op, b.node, None, (), {}, {}, ())
            if not step.host:
                raise _Differ
            return step
        if b.node is None or b.node.callee is not None:  # a graph function may be another one at another size
            raise _Differ
        if a.variant is None or a.variant.template != b.variant.template or a.seeded != b.seeded or b.window:
            raise _Differ
        held = len(self._specs)
        self._take_feeds(a, b)
        slots, consts, parts = self._inputs(a.slots, b.slots, a.consts, b.consts, a.variant.key, b.variant.key)
        lists: dict[int, Any] = {}
        for i, (its, known) in b.lists.items():
            mine, others = a.lists[i]
            found, more, part = self._inputs(mine, its, others, known, a.variant.key[i], b.variant.key[i])
            lists[i] = found, more
            parts[i] = tuple(part)
        key = tuple(map(self._key_part, parts))
        outputs = tuple([self._output(x, y) for x, y in zip(a.outputs, b.outputs, strict=True)])
        # An input of one shape whose known value depends on sizes decides what an output's is: `size(x) % 2`.
        same = (
            all(x is y for x, y in zip(outputs, b.outputs, strict=True))
            and all(map(_is_same, key, b.variant.key))
            and not any(map(_is_dynamic, parts))
        )
        variant = b.variant if same else Variant(key, outputs, b.variant.template)
        if not same:
            self._checks.append((b.node, tuple(parts), outputs))
        self._parts += outputs
        return Step(parent, b.op, b.node, variant, slots, consts, lists, tuple(self._specs[held:]))

    def _key_part(self, part: Any) -> Any:
        """Returns an input's part of a variant key; see `_inputs`."""
        if isinstance(part, tuple):
            return tuple(map(self._key_part, part))
        return part.spec if isinstance(part, Output) else self._specs[part] if isinstance(part, int) else part

    def _part_at(self, part: Any, feeds: list[Shaped]) -> Any:
        """Returns an input's part of a variant key at the sizes of these feeds; see `_inputs`."""
        if isinstance(part, tuple):
            return tuple([self._part_at(item, feeds) for item in part])
        if isinstance(part, Output):
            return settled(part, feeds).spec
        if isinstance(part, int):
            spec = self._specs[part]
            return intern_spec(spec.enum, feeds[part]._shape_tuple()) if isinstance(spec, DynamicSpec) else spec
        return const_at(part, feeds) if isinstance(part, Const) else part

    def _take_feeds(self, a: Step, b: Step) -> None:
        """Adds the feeds that a step is the first to use; numbers that turn out to be sizes are none."""
        before = b.external - len(b.specs)
        mine = [s for k, s in enumerate(a.specs, a.external - len(a.specs)) if k not in self._one.numbers]
        for k, spec in enumerate(b.specs, before):
            if k in self._other.numbers:
                if not self._becomes_const(a, b, k):
                    self._add_feed(k, *self._number(a, b, k, spec))
                continue
            if not mine:
                raise _Differ
            self._add_feed(k, *self._feed(mine.pop(0), spec, len(self._specs)))

    def _feed(self, x: Spec, y: Spec, k: int, value: Size | None = None) -> tuple[Spec, tuple[Any, ...]]:
        if x is y:
            return y, y.shape
        if x.enum != y.enum or x.enum in (RESOURCE, VARIANT) or len(x.shape) != len(y.shape):
            raise _Differ
        dims: list[Any] = []
        open_dims: list[Any] = []
        for axis, pair in enumerate(zip(x.shape, y.shape, strict=True)):
            if pair[0] == pair[1]:
                dims.append(pair[0])
                open_dims.append(pair[0])
                continue
            if min(pair) < LEAST:
                raise _TooSmall
            known = self._symbols.get(pair)
            if known is None:
                known = self._symbols[pair] = Size(0, ((1, ((k, axis),)),))
                dims.append(None)
            else:
                dims.append(known)
            open_dims.append(known)
        return DynamicSpec(y.enum, tuple(dims), value, fitted=(x.shape, y.shape)), tuple(open_dims)

    def _number(self, a: Step, b: Step, k: int, spec: Spec) -> tuple[Spec, tuple[Any, ...]]:
        """Returns the spec of a number that Python passes, with what it was as a function of sizes, and its shape.

        So does a list of numbers, which may be data, of as many as there are rows.
        """
        value = _plain(self._other.numbers[k])
        for mine, its, known in _inputs_of(a, b):
            for i, (x, y) in enumerate(zip(mine, its, strict=True)):
                if y != -1 - k:
                    continue
                before: Any = known[i].value if x == CONST else self._one.numbers.get(-1 - x)
                shape = np.shape(before) if x == CONST or before is None else before._shape_tuple()
                if before is not None and shape != spec.shape:
                    return self._feed(intern_spec(spec.enum, shape), spec, len(self._specs), UNKNOWN)
                before = _plain(before) if x != CONST and before is not None else before
                if value is not None and type(before) in (int, float) and before == value:
                    return spec, spec.shape
                size = None if before is None or value is None else self._fit(before, value)
                return DynamicSpec(spec.enum, spec.shape, UNKNOWN if size is None else size), spec.shape
        return spec, spec.shape

    def _becomes_const(self, a: Step, b: Step, k: int) -> bool:
        """Returns whether a number of this step that was a constant before, and then fed, is one that follows sizes."""
        for mine, its, known in _inputs_of(a, b):
            for i, (x, y) in enumerate(zip(mine, its, strict=True)):
                if y == -1 - k:
                    return x == CONST and self._fit(known[i].value, _plain(self._other.numbers[k])) is not None
        return False

    def _inputs(
        self, mine: tuple[int, ...], its: tuple[int, ...], known: dict[int, Const], consts: dict[int, Const],
        parts: Any, its_parts: Any,
    ) -> tuple[tuple[int, ...], dict[int, Const], list[Any]]:  # fmt: skip
        """Returns the slots, constants and parts of a step's inputs, or of a list's items.

        A part is the output or the number of the feed that an input is, its constant, or a constant's spec.
        """
        slots: list[int] = []
        found: dict[int, Const] = {}
        made: list[Any] = []
        for i, (x, y) in enumerate(zip(mine, its, strict=True)):
            part = its_parts[i]
            if y == LIST:
                slots.append(LIST)
                made.append(None)
            elif y >= 0:
                slots.append(y)
                made.append(self._parts[y])
            elif y == CONST:
                if x != CONST:
                    raise _Differ
                const = self._const(known[i], consts[i])
                if isinstance(part, Spec) and part is not parts[i]:
                    raise _Differ
                found[i] = const
                slots.append(CONST)
                made.append(const if isinstance(part, Const) else part)
            elif -1 - y in self._feeds:
                slots.append(-1 - self._feeds[-1 - y])
                made.append(self._feeds[-1 - y])
            else:  # a number that follows sizes
                value = known[i].value
                form = self._fit(value, _plain(self._other.numbers[-1 - y]))
                if form is None:
                    raise _Differ
                found[i] = SizedConst(value, form)
                slots.append(CONST)
                made.append(part)
        return tuple(slots), found, made

    def _const(self, x: Const, y: Const) -> Const:
        if x == y:
            return y
        form = self._fit(x.value, y.value)
        if form is None:
            raise _Differ
        return SizedConst(y.value, form)

    def _output(self, x: Output, y: Output) -> Output:
        if x.spec is y.spec and x.const == y.const:
            return y
        if x.spec.enum != y.spec.enum or len(x.spec.shape) != len(y.spec.shape):
            raise _Differ
        if (x.const is None) is not (y.const is None):
            raise _Differ
        dims = [self._size(*pair) for pair in zip(x.spec.shape, y.spec.shape, strict=True)]
        if any(d is None for d in dims):
            raise _Differ
        const = None if y.const is None or x.const is None else self._const(x.const, y.const)
        return DynamicOutput(y.spec.enum, tuple(dims), const, y.node)  # type: ignore[arg-type]

    def _fit(self, x: Any, y: Any) -> Any:
        """Returns the form of a value that differs between the segments (see `SizedConst`); None if there is none."""
        kind = type(x)
        if kind is np.ndarray and x.dtype.kind in "if":
            if not isinstance(y, np.ndarray):  # it was fed
                y = None if y is None or x.shape else np.asarray(y)
            if y is None or x.shape != y.shape:
                return None
            values = np.ravel(x).tolist(), np.ravel(y).tolist()
        elif kind is int or kind is float:
            values = [x], [y]
        elif kind in (list, tuple) and type(y) is kind and len(x) == len(y):
            values = list(x), list(y)
        else:
            return None
        if not all(map(_is_whole, itertools.chain(*values))):
            return None
        form = [self._size(int(n), int(m)) for n, m in zip(*values, strict=True)]
        if None in form or not any(isinstance(n, Size) for n in form):
            return None
        return form[0] if kind is int or kind is float else form

    def _size(self, x: int, y: int) -> int | Size | None:
        """Returns what is `x` in one segment and `y` in the other, as a function of open dimensions."""
        if x == y:
            return x
        known = self._symbols.get((x, y))
        if known is not None:
            return known
        for (p, q), size in self._symbols.items():
            if x % p == 0 and y % q == 0 and x // p == y // q != 0:
                return Size(0, ((x // p, size.terms[0][1]),))
        for ((p, q), size), ((r, s), more) in itertools.combinations_with_replacement(self._symbols.items(), 2):
            if x % (p * r) == 0 and y % (q * s) == 0 and x // (p * r) == y // (q * s) != 0:
                return Size(0, ((x // (p * r), (*size.terms[0][1], *more.terms[0][1])),))
        for (p, q), size in self._symbols.items():
            if x - p == y - q:
                return Size(x - p, size.terms)
        for ((p, q), size), ((r, s), more) in itertools.combinations(self._symbols.items(), 2):
            if x - p - r == y - q - s:
                return Size(x - p - r, (*size.terms, *more.terms))
        for (p, q), size in self._symbols.items():
            times, rest = divmod(x - y, p - q)
            if rest == 0 and times:
                return Size(x - times * p, ((times, size.terms[0][1]),))
        for ((p, q), size), ((r, s), more) in itertools.combinations(self._symbols.items(), 2):
            if p + r == q + s:
                continue
            times, rest = divmod(x - y, p + r - q - s)
            if rest == 0 and times:
                return Size(x - times * (p + r), ((times, size.terms[0][1]), (times, more.terms[0][1])))
        return None

    # What the shape functions say at other sizes.

    def _check(self) -> None:
        """Raises `_Differ` if TensorFlow infers other shapes for small or large sizes."""
        if len(self._symbols) > MAX_SIZES:
            raise _Differ
        checks = list({self._key_of(*check): check for check in self._checks if not self._is_known(*check)}.values())
        count = len(self._symbols)
        samples = [list(sizes)[:count] for sizes in _SAMPLES]
        # All and each as small as they may be, and far smaller and larger than the others: what is clamped to a number,
        # to another size, or to twice that, shows.
        few, many = _SAMPLES[2], _SAMPLES[-1]
        least = range(LEAST, LEAST + 3)
        samples += [[small] * count for small in least]
        samples += [[small if n == k else few[n] for n in range(count)] for k in range(count) for small in least]
        samples += [[many[n] if n == k else few[n] for n in range(count)] for k in range(count) if count > 1]
        samples += [[few[n] if n == k else many[n] for n in range(count)] for k in range(count) if count > 1]
        for sizes in samples:
            feeds = self._feeds_at(sizes)
            for node, parts, outputs in checks:
                self._check_node(node, parts, outputs, feeds)

    def _is_known(self, node: Node, parts: tuple[Any, ...], outputs: tuple[Output, ...]) -> bool:
        """Returns whether a rule says what is known of the output."""
        const = outputs[0].const if len(outputs) == 1 else None
        if node.op == "Shape" and const is not None:
            form = const.form if isinstance(const, SizedConst) else const.value
            return tuple(np.ravel(form).tolist()) == self._dims_of(parts[0])
        if len(outputs) != 1 or const is not None:
            return False
        shapes = [self._dims_of(item) for part in parts for item in (part if isinstance(part, tuple) else (part,))]
        last = parts[-1] if parts else None
        axes = last.value if type(last) is Const else None
        if isinstance(last, SizedConst) and node.op in BY_NUMBERS:
            axes = last.form
        found = shape_of(node.op, node.attrs, shapes, None if axes is None else np.ravel(axes).tolist())
        return found == self._dims_of(outputs[0])

    def _key_of(self, node: Node, parts: tuple[Any, ...], outputs: tuple[Output, ...]) -> Any:
        """Returns what an operation is compared by: many in a gradient are of the same sizes."""
        return node.op, node.entry, freeze(node.attrs), tuple(map(self._symbolic, parts)), tuple(
            map(self._symbolic, outputs)
        )  # fmt: skip

    def _symbolic(self, part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(map(self._symbolic, part))
        if isinstance(part, Output):
            return part.spec.enum, self._dims_of(part), part.const
        return (self._specs[part].enum, self._dims[part]) if isinstance(part, int) else part

    def _dims_of(self, part: Any) -> tuple[Any, ...]:
        """Returns the shape of an input, or output, with sizes for open dimensions; see `_inputs`."""
        if isinstance(part, Output):
            return part.dims if isinstance(part, DynamicOutput) else part.spec.shape
        if isinstance(part, int):
            return self._dims[part]
        return tuple(np.shape(part.value)) if isinstance(part, Const) else tuple(part.shape)

    def _feeds_at(self, sizes: list[int]) -> list[Shaped]:
        given = dict(zip(self._symbols.values(), sizes, strict=True))
        return [Shaped(tuple([given[d] if isinstance(d, Size) else d for d in dims])) for dims in self._dims]

    def _check_node(
        self, node: Node, parts: tuple[Any, ...], outputs: tuple[Output, ...], feeds: list[Shaped]
    ) -> None:  # fmt: skip
        for part in (*parts, *outputs):
            for item in part if isinstance(part, tuple) else (part,):
                if isinstance(item, DynamicOutput) and min(dims_at(item.dims, feeds), default=0) < 0:
                    raise _Differ  # a slice of fewer rows than there are to leave out
        try:
            at = tuple([self._part_at(part, feeds) for part in parts])
            here = [settled(out, feeds) for out in outputs]
        except OverflowError:  # an integer of TensorFlow's cannot hold so large a product
            return
        if any(size > _LARGEST for out in here for size in out.spec.shape):
            return
        # Only what computes shapes is run: others would make tensors of a million rows.
        found = folded_variant(node, at) if outputs and outputs[0].const is not None else None
        found = found or inferred_variant(node, at)
        if found is None or len(found.outputs) != len(outputs):
            raise _Differ
        for out, made in zip(here, found.outputs, strict=True):
            if out.spec is not made.spec or out.const != made.const:
                raise _Differ


def _inputs_of(a: Step, b: Step) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], dict[int, Const]]]:
    """Yields the slots of two alike steps, and the constants of the first: of its inputs, and of each list of them."""
    yield a.slots, b.slots, a.consts
    for i, (its, _) in b.lists.items():
        mine, known = a.lists[i]
        yield mine, its, known


def _is_data(tensor: Any) -> bool:
    """Returns whether what was made from a Python value is neither a number nor a shape, but data in an array."""
    return bool(tensor.shape.rank) and shape_like(tensor) is None


def _plain(tensor: Any) -> Any:
    """Returns the number in a tensor of one; None for others."""
    array = array_in(tensor)
    return array.item() if array.shape == () and array.dtype.kind in "if" else None


def _is_whole(number: Any) -> bool:
    return type(number) is int or (type(number) is float and number.is_integer())


def _is_dynamic(part: Any) -> bool:
    return any(map(_is_dynamic, part)) if isinstance(part, tuple) else isinstance(part, DynamicOutput)


def _is_same(part: Any, other: Any) -> bool:
    if isinstance(part, tuple):
        return all(map(_is_same, part, other))
    return part is other or (isinstance(part, Const) and part == other)
