"""Trace graph: all traces of one function, merged.

A *node* is an operation at a location: type, attributes, call stack and iteration. Its *variants* map input parts
(dtypes, shapes, and the values of integers that shapes depend on) to outputs. Edges record which node followed which; a
node with several successors is a fork, one with several predecessors a join.

A *step* is a node on one path, with its wiring: for each input, which earlier tensor of the same segment or which feed
it is. The cursor walks steps. They form one tree per cut, rooted at the node before the cut, so paths that differed
before a cut share their steps after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from tensorflow import as_dtype

from tracer import seeds
from tracer.callees import MAX_AT_PLACE, Callee, Callees, name_in
from tracer.host_ops import is_apart
from tracer.inputs import shape_like
from tracer.lazy import Output
from tracer.location import FREE, Frame, Location
from tracer.meetings import Meetings
from tracer.op import Const, copied_attrs, freeze, signature_of
from tracer.spec import RESOURCE, STRING, VARIANT, Spec, intern_spec, spec_of
from tracer.variable_ops import READS, ROW_UPDATES, SPARSE_OPTIMIZER_OPS, is_variable_op

CONST = -(1 << 40)  # slot of a constant input
LIST = CONST - 1  # slot of a list input

MAX_HANDLES = 4096

MAX_SHARED = 4096  # roots of steps behind cuts at which ways meet

# An operation that has been seen with more attribute values than this at one location is a host op from then on.
MAX_ATTRIBUTES = 32


VALUE_SHAPED = "the shape of its result depends on values"  # why an operation runs on its own
# Why an operation runs on its own whose value decides shapes (`shape_sources`); folded on constants alone.
DECIDES = "its value decides shapes"
RISKY = "its failure could be caught, and it needs nothing that is pending"
OPEN_VARIABLE = "the variable's shape is not fixed"
DECIDES_AT_LENGTH = "its value decides shapes, and is too large to be kept"


class Variant:
    """The outputs of a node for one key (a spec or constant per input), and the structure of its result."""

    __slots__ = ("folded", "key", "open", "outputs", "ran", "template", "window")

    def __init__(
        self, key: tuple[Any, ...], outputs: tuple[Output, ...], template: Any, is_open: bool = False, ran: bool = True,
        is_window: bool = False,
    ) -> None:  # fmt: skip
        self.key = key
        self.outputs = outputs
        # None: no result; -1: a single tensor; else a list of output numbers and lists of output numbers.
        self.template = template
        # Whether all outputs are known without running the operation. (Asked some ten times for each step compiled.)
        self.folded = bool(outputs) and all(o.const is not None for o in outputs)
        self.open = is_open  # whether sizes of inputs or outputs depend on values (`open_sizes`)
        self.window = is_window  # whether it is for a size that the values of fed inputs must have (`windows`)
        self.ran = ran  # whether the operation is known to have succeeded on such inputs, or was only inferred


def has_open(parts: tuple[Any, ...]) -> bool:
    """Returns whether the size of one of these inputs depends on values that are not known yet."""
    return any(has_open(p) if p.__class__ is tuple else p.__class__ is Spec and p.open for p in parts)


def name_by_default(entry: str) -> str | None:
    """Returns the name with which the error of an operation ends that was given none (`slow_path`)."""
    return "" if entry == "fast" else None


def _dtypes_of(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the dtypes of an operation's inputs; of a constant, its class and NumPy's dtype."""
    return tuple(
        [
            _dtypes_of(part) if part.__class__ is tuple
            else part.enum if isinstance(part, Spec)
            else (type(value := getattr(part, "value", part)), getattr(value, "dtype", None))
            for part in parts
        ]
    )  # fmt: skip


_NONE: frozenset[Any] = frozenset()
_NO_NUMBERS: dict[int, Any] = {}


class Node:
    """One operation at one location of the user's program."""

    __slots__ = (
        "_frozen", "after", "attrs", "callee", "constants", "data", "decides", "entry", "fed", "guarded", "head",
        "host", "inputs", "joined", "location", "name", "number", "op", "opens", "predecessors", "returned",
        "shaping", "sized", "sizing", "specific", "successors", "variants", "varies", "waits", "ways", "windows",
    )  # fmt: skip

    def __init__(
        self, number: int, op: str, entry: str, attrs: tuple[Any, ...], location: Location, frozen: Any = None
    ) -> None:
        self.number = number
        self.op = op
        self.entry = entry
        self.attrs: tuple[Any, ...] = copied_attrs(attrs)
        self._frozen = frozen
        self.location = location
        self.name = name_by_default(entry)  # with which its error ends; of a function, its own
        self.guarded = FREE  # what may happen to its error: FREE, NAMED, PASSED or CAUGHT (`location`)
        self.callee: Callee | None = None  # the function that it calls as part of segments
        self.returned: dict[Any, Output] = {}  # of its results, those that are known without a call
        self.host: str | None = None  # why this is a host op, which runs on its own and is not part of a segment
        self.variants: dict[tuple[Any, ...], Variant] = {}
        self.successors: dict[int, Node] = {}
        self.predecessors: dict[int, Node] = {}
        # Sets are replaced and not changed, so that nodes share them: each takes 216 bytes, and memory that the process
        # did not have before was a fifth of what merging took.
        self.inputs: list[frozenset[str]] = []  # source of each input, for display only
        self.fed = _NONE  # numbers that changed between calls, or are likely to, and are fed
        self.varies = False  # whether such a number has differed from the last one
        self.shaping = _NONE  # inputs that were fed until a later shape turned out to depend on them
        self.data = _NONE  # those of them that kept changing, and were fed again,
        self.sizing = _NONE  # and of these, those on which a shape depended then, too
        self.windows: dict[Any, Variant] | None = None  # if it slices windows: by inputs and size
        self.specific = _NONE  # sets of inputs that cannot be fed, as a shape depends on them
        self.opens: dict[tuple[Any, ...], Variant] = {}  # variants with sizes that depend on values (`open_sizes`)
        self.sized = False  # whether it has none, as the program asks for these sizes
        self.decides = False  # whether its values are constants, as other shapes depend on them (`shape_sources`)
        self.joined: dict[Any, int] = {}  # how often a path came to it in the middle of a segment, by another way
        self.ways: dict[int, int] = {}  # by the nodes after which calls came to it by a new step: the last such call
        self.waits = 0  # how often it has run on its own behind what was pending, up to a limit (`shape_sources`)
        self.constants: dict[Any, Const] = {}  # first values of those that may be fed, by input or (input, item)
        self.after: Step | None = None
        self.head: Node = self  # the first node of this operation at this call stack

    @property
    def frozen(self) -> Any:
        """The attributes as `freeze` returns them; raises `TypeError` if they cannot be compared."""
        if self._frozen is None:
            self._frozen = freeze(self.attrs)
        return self._frozen

    def constant(self, number: int, value: np.ndarray[Any, Any]) -> Output:
        """Returns the output for a result of a function whose value is known without a call: one for equal values."""
        key = number, Const(value)
        if key not in self.returned:
            self.returned[key] = Output(intern_spec(as_dtype(value.dtype).as_datatype_enum, value.shape), key[1], self)
        return self.returned[key]

    def has_run(self, variant: Variant) -> bool:
        """Returns whether the operation is known to have succeeded on inputs of these dtypes."""
        wanted = _dtypes_of(variant.key)
        return any(known.ran and _dtypes_of(known.key) == wanted for known in list(self.variants.values()))

    def start_after(self) -> Step:
        """Returns the root of the steps after a cut at this node; all iterations share it."""
        head = self.head
        if head.after is None:
            head.after = Step(None, None, head, None, (), {}, {}, ())
        return head.after

    def __repr__(self) -> str:
        return f"<Node {self.number} {self.op} at {self.location}>"


class Carried:
    """Per-step slots owned by the package that follows the graph. `tracer` only initialises them.

    They are slots of the step itself because every operation and library call reads one: a separate object would add an
    attribute access, and a side table a hash.
    """

    __slots__ = (
        "assertion", "closed", "executables", "fallible", "joins", "notes", "pattern", "pause", "reading", "regions",
        "spelled", "tape", "visits",
    )  # fmt: skip

    def __init__(self) -> None:
        self.visits = 0  # calls that cut right after this step
        self.executables: Any = None  # the executables of the segment that ends here
        self.pause = False  # whether there is a host gap after this step
        self.reading: Any = None  # the tally of reads that cut here
        # Library calls before which to cut here, as calls reach them by ever other ways: functions, and their tallies.
        self.joins: Any = ()
        self.regions: Any = None  # memoized library calls that start after this step, by key
        self.pattern: Any = None  # the argument guard of the most recent of them
        self.spelled: dict[int, tuple[Any, Any]] | None = None  # by input: a list's frozen value, its constant
        self.tape: Any = None  # complete attributes, in the form gradient tapes take
        self.closed: bool | None = None  # whether all its inputs are computed in this segment
        self.fallible: bool | None = None  # whether it, or one before it in its segment, may fail
        self.assertion: Any = None  # the assertion about its result, to repeat if it fails
        self.notes: Any = None  # what Keras adds to an error of this operation


class Step(Carried):
    """A node on one path of a segment: what the cursor matches an operation against."""

    __slots__ = (
        "arity", "attrs", "checked", "consts", "depth", "draws", "dynamic", "early", "end", "exact", "external", "fast",
        "first", "frames", "host", "hot", "join", "lists", "live", "next", "node", "numbers", "onward", "op", "open",
        "opened", "outputs", "parent", "plain", "risky", "seeded", "single", "slots", "specs", "variant", "window",
    )  # fmt: skip
    end: int
    live: int
    external: int

    def __init__(
        self,
        parent: Step | None,
        op: str | None,
        node: Node | None,
        variant: Variant | None,
        slots: tuple[int, ...],
        consts: dict[int, Const],
        lists: dict[int, tuple[tuple[int, ...], dict[int, Const]]],
        specs: tuple[Any, ...],
    ) -> None:
        super().__init__()
        self.parent = parent
        self.op = op
        self.node = node
        self.variant = variant
        self.slots = slots  # per input: >= 0 a tensor of this segment, < 0 feed -(k + 1), or CONST, or LIST
        self.consts = consts
        self.lists = lists
        self.specs = specs  # specs of the feeds first used by this step
        self.external = (parent.external if parent is not None else 0) + len(specs)
        self.first = parent.end if parent is not None else 0  # number of its first output within the segment
        self.outputs = variant.outputs if variant is not None else ()
        self.end = self.first + len(self.outputs)
        self.depth: int = parent.depth + 1 if parent is not None else 0
        # Operations of the segment up to here that must run; those folded from shapes are not counted.
        self.live = (parent.live if parent is not None else 0) + (variant is not None and not variant.folded)
        self.single = variant is not None and variant.template == -1
        self.open = variant is not None and variant.open
        self.window = variant is not None and variant.window
        self.opened: bool = self.open or (parent is not None and parent.opened)  # or one before it in its segment
        self.arity = len(slots)
        self.fast = node is not None and node.entry == "fast"  # `execute` returns its results in another structure
        self.attrs = node.attrs if node is not None and op is not None else ()
        self.exact = _needs_exact_attrs(self.attrs)
        self.host = node is not None and op is not None and node.host is not None and variant is None
        self.early = self.host and is_apart(op or "")  # a host op that needs no cut if its inputs are known
        # Whether it draws random numbers from fed seeds, and how many such draws the segment has up to here.
        self.seeded = op is not None and not self.host and seeds.are_fed(op, self.attrs)
        self.draws: int = (parent.draws if parent is not None else 0) + self.seeded
        self.next: list[Step] = []
        # By feed, the last number fed here and its tensor: most are the same object in each call.
        self.numbers: dict[int, tuple[Any, Any]] = _NO_NUMBERS
        # Whether to compare the call stack too: right after a cut and at a fork, an operation that looks the same may
        # be another one.
        self.checked = parent is not None and parent.parent is None
        # Whether it is for any size (`dynamic_paths`), as are those after it in its segment.
        self.dynamic: bool = parent is not None and parent.dynamic
        self.join = False  # whether it stands for any wiring of its operation, before which the segment is cut
        self.onward: Step | None = None  # of such a step: the root from which all ways go on behind the cut
        self.frames = node.location.frames if node is not None else ()
        self.hot: Step | None = None
        # Whether the program could catch a failure of it; None until the package above has decided.
        self.risky: bool | None = None
        self.plain = False

    @classmethod
    def at_join(cls, parent: Step, node: Node, inputs: int) -> Step:
        """Returns a step before which to cut, whatever the sources of the operation's `inputs` inputs."""
        step = cls(parent, node.op, node, None, (), {}, {}, ())
        step.host = step.join = True
        step.arity, step.seeded, step.draws = inputs, False, parent.draws
        return step

    def settle_plain(self) -> None:
        """Sets `plain`: whether `Cursor.is_next` may match this step on its short path."""
        self.plain = (
            self.risky is False
            and self.single
            and not (self.host or self.checked or self.exact or self.lists or self.specs or self.seeded or self.open)
            and not self.window
        )

    def add(self, step: Step, most: int) -> None:
        """Adds a successor and makes it the first to try; drops the oldest beyond `most`."""
        if len(self.next) >= most:
            del self.next[0]
        if any(s.node is not step.node for s in self.next):
            for sibling in (*self.next, step):
                sibling.checked = True
                sibling.settle_plain()
        self.next.append(step)
        self.hot = step

    @property
    def place(self) -> str:
        """The source line that issued the operation, for messages."""
        return str(self.node.location) if self.node is not None else ""

    def constant_inputs(self) -> list[Any]:
        """Returns its inputs that are constants, as input numbers or (input, item) pairs."""
        return [*self.consts, *((i, j) for i, (_, consts) in self.lists.items() for j in consts)]

    def is_inside(self, frames: tuple[Any, ...]) -> bool:
        """Returns whether a callee of `frames` issued the operation; its own frames may be in the location too."""
        return self.frames[len(self.frames) - len(frames) :] == frames

    def root(self) -> Step:
        """Returns the root of the tree that holds this step."""
        step = self
        while step.parent is not None:
            step = step.parent
        return step

    def arrange(self, tensors: list[Any]) -> Any:
        """Returns `tensors`, the outputs by number, in the structure that the operation returns."""
        template = self.variant.template if self.variant is not None else None
        if template is None:
            return None
        return [tensors[t] if isinstance(t, int) else [tensors[n] for n in t] for t in template]

    def given(self) -> set[int]:
        """Returns the numbers of the segment's tensors up to this step that have to be computed."""
        return {s.first + n for s in self.chain() for n, out in enumerate(s.outputs) if out.const is None}

    def chain(self) -> list[Step]:
        """Returns the steps of the segment up to and including this one, in order."""
        steps = []
        step: Step | None = self
        while step is not None and step.parent is not None:
            steps.append(step)
            step = step.parent
        steps.reverse()
        return steps


def _needs_exact_attrs(value: Any) -> bool:
    """Whether `==` does not decide the identity of these attributes: 0.0 == -0.0, and NaN != NaN."""
    if isinstance(value, (list, tuple)):
        return any(map(_needs_exact_attrs, value))
    if isinstance(value, (np.ndarray, np.generic)):
        return True
    return isinstance(value, float) and (value == 0.0 or value != value)


def spec_of_constant(step: Step, *path: int) -> Spec | None:
    """Returns the spec of a step's constant input, or list item, at `path`; None if shapes depend on its value."""
    assert step.variant is not None
    part: Any = step.variant.key
    for n in path:
        part = part[n]
    return part if isinstance(part, Spec) else None


class TraceGraph:
    """All traces of one function, merged. `str(graph)` prints it; `tracer.show.parse` reads that back."""

    def __init__(self, name: str = "function") -> None:
        self.name = name
        self.nodes: list[Node] = []
        self.index: dict[Any, Node] = {}
        self.entry = Node(0, "Entry", "entry", (), Location((), 0))
        self.nodes.append(self.entry)
        self.places: Counter[Any] = Counter()  # nodes per operation and location, whatever their attributes
        self.steps = 0
        self.exits: set[int] = set()
        self.slow: set[Any] = set()  # operations issued through `execute`, with their locations
        self.calls = 0  # followed calls
        self.meetings = Meetings()
        self.shared: dict[Any, Step] = {}  # the roots of the steps behind cuts at which ways meet, by what comes next
        self.callees = Callees()
        self.updates_rows = False  # whether it has operations of `SPARSE_OPTIMIZER_OPS`
        self._heads: dict[Any, Node] = {}  # the first node per operation and call stack
        self._latest: dict[Any, Node] = {}  # the latest node per operation, attributes and call stack
        self._constants: dict[int, Const | None] = {}
        self._handles: dict[int, Spec] = {}

    def handle_spec(self, handle: Any) -> Spec:
        """Returns the spec of a resource, memoized by the handle's `_id`, which TensorFlow never reuses."""
        spec = self._handles.get(handle._id)
        if spec is None:
            if len(self._handles) >= MAX_HANDLES:
                self._handles.clear()
            spec = self._handles[handle._id] = spec_of(handle)
        return spec

    def constant_of(self, tensor: Any) -> Const | None:
        """Returns the value of an eager tensor that may be used as a shape, else None; reads each tensor once."""
        key = tensor._id
        if key not in self._constants:
            if len(self._constants) >= MAX_HANDLES:
                self._constants.clear()
            self._constants[key] = shape_like(tensor)
        return self._constants[key]

    def find(self, op: str, entry: str, attrs: tuple[Any, ...], location: Location) -> Node | None:
        """Returns the node with this type, these attributes and this location, or None."""
        return self.at(node_key(op, entry, attrs, location))

    def at(self, key: Any) -> Node | None:
        """Returns the node with this `node_key`, or the one at its place whatever its attributes, or None."""
        return self.index.get(key) or self.index.get((key[0], key[1], key[-1]))

    def add(self, op: str, entry: str, attrs: tuple[Any, ...], location: Location, key: Any = None) -> Node:
        """Adds a node, or returns the existing one; `key` is its `node_key`, for those who have asked for it."""
        key = key or node_key(op, entry, attrs, location)
        node = self.index.get(key)
        if node is None:
            place = (op, entry, location)
            there = self.places[place] = self.places.get(place, 0) + 1
            frozen = key[2] if len(key) > len(place) else None
            node = Node(len(self.nodes), op, entry, attrs, location, frozen)
            first = _first(location)
            self._latest[(*key[:-1], first)] = node
            if there > MAX_ATTRIBUTES:
                key = place  # from now on attributes are not part of the key
                node.host = "its attributes keep changing"
            self.index[key] = node
            self.nodes.append(node)
            node.head = self._heads.setdefault((op, entry, location.frames), node)
            self.updates_rows |= op in SPARSE_OPTIMIZER_OPS
            if entry == "execute":
                self.slow.add((op, first))
        return node

    def repeat(self, op: str, entry: str, attrs: tuple[Any, ...], location: Location) -> Node | None:
        """Adds a node for one more iteration of a known operation, copying its variants; None if none is known."""
        key = node_key(op, entry, attrs, location)
        known = self._latest.get((*key[:-1], _first(location)))
        if known is None:
            return None
        node = self.add(op, entry, attrs, location, key)
        node.name, node.guarded, node.host = known.name, known.guarded, node.host or known.host
        node.sized = known.sized
        node.inputs = list(known.inputs)
        node.fed, node.shaping, node.specific = known.fed, known.shaping, known.specific
        node.data, node.sizing = known.data, known.sizing
        node.windows = None if known.windows is None else {}
        for key, variant in known.variants.items():
            outputs = tuple([Output(o.spec, o.const, node) for o in variant.outputs])
            node.variants[key] = Variant(key, outputs, variant.template, ran=variant.ran)
        return node

    def calling(self, node: Node, callee: Callee, attrs: tuple[Any, ...], inputs: int) -> Node | None:
        """Returns the node of a function's calls as part of segments, at the place of `node`; None for one too many.

        `attrs` includes its name; `node` is that of calls of any function.
        """
        found = self.index.get(node_key(node.op, node.entry, attrs, node.location))
        if found is None:
            if self.places[node.op, node.entry, node.location] > MAX_AT_PLACE:
                return None
            found = self.add(node.op, node.entry, attrs, node.location)
            found.callee = callee
            found.inputs = [_NONE] * inputs
        found.guarded = max(found.guarded, node.guarded)
        return found

    def link(self, before: Node, after: Node) -> None:
        """Adds the edge from `before` to `after`."""
        if after.number not in before.successors:
            before.successors[after.number] = after
            after.predecessors[before.number] = before

    def came_to(self, frames: tuple[Frame, ...], ways: dict[int, int], way: Node) -> bool:
        """Notes the node after which a followed call came to a place by a new step, in the `ways` known so far.

        Returns whether to cut there, as ways meet that others have multiplied: see `meetings`.
        """
        return self.meetings.came_to(self.calls, frames, ways, way.head.number)  # loops of ever other lengths are one

    def onward_from(self, place: Any) -> Step:
        """Returns the root of the steps from this place on behind a cut, whatever came before it."""
        root = self.shared.get(place)
        if root is None:
            if len(self.shared) >= MAX_SHARED:
                self.shared.clear()
            root = self.shared[place] = Step(None, None, None, None, (), {}, {}, ())
        return root

    def begin_call(self) -> None:
        """Counts a followed call; sets known steps aside if calls are cut where ways meet from now on."""
        self.calls += 1
        if self.meetings.begin():
            self.meetings.aside = list(self.roots())
            self.shared.clear()
            self.steps = 0
            for node in self.nodes:
                node.after = None

    def roots(self) -> Iterator[Step]:
        """Yields the roots of the steps behind all cuts."""
        yield from (node.after for node in self.nodes if node.after is not None)
        yield from list(self.shared.values())

    def size(self) -> int:
        """Returns the number of nodes and steps, which the graph's memory is proportional to."""
        return len(self.nodes) + self.steps

    def forks(self) -> Iterator[Node]:
        """Yields the nodes with several successors."""
        return (n for n in self.nodes if len(n.successors) > 1)

    def joins(self) -> Iterator[Node]:
        """Yields the nodes with several predecessors."""
        return (n for n in self.nodes if len(n.predecessors) > 1)

    def __str__(self) -> str:
        from tracer.show import show

        return show(self)


def _first(location: Location) -> Location:
    """Returns the location of the first iteration. (`_replace` takes a microsecond, and most are that.)"""
    return Location(location.frames, 0) if location.iteration else location


def node_key(op: str, entry: str, attrs: tuple[Any, ...], location: Location) -> Any:
    """Returns the identity of a node: type, entry point, attributes and location.

    Attributes are left out for host ops (functions, operations with their own state) and if they cannot be frozen. A
    function that segments call has a node of its own beside that of all functions at its place: by its name.
    """
    signature = signature_of(op)
    if signature is None and name_in(attrs) is not None:
        return op, entry, freeze(attrs), location
    if signature is None or (signature.stateful and not is_variable_op(op) and not seeds.are_fed(op, attrs)):
        return op, entry, location
    try:
        return op, entry, freeze(attrs), location
    except TypeError:
        return op, entry, location


_OPAQUE = frozenset({STRING, VARIANT, RESOURCE})
_CONVOLUTIONS = frozenset({"Conv2D", "Conv3D", "DepthwiseConv2dNative"})  # eager's keep the shape of an empty input


def refusal(op: str, parts: tuple[Any, ...], outputs: tuple[Spec, ...]) -> str | None:
    """Returns why an operation with these inputs and outputs must be a host op; None if a segment may contain it."""
    specs = [s for p in parts for s in (p if isinstance(p, tuple) else (p,)) if isinstance(s, Spec)]
    if op in _CONVOLUTIONS and 0 in specs[0].shape:
        return "the shape of an empty result differs between kernels"
    if _OPAQUE.isdisjoint([s.enum for s in specs]) and _OPAQUE.isdisjoint([s.enum for s in outputs]):
        return None  # nearly all of them
    for spec in (*specs, *outputs):
        if spec.enum == STRING:
            return "strings cannot be compiled"
        if spec.enum == VARIANT and op != "ZerosLike":
            return "a variant's contents are not known"
    if any(s.enum == RESOURCE for s in outputs):
        return f"{op} makes a resource"
    for spec in specs:
        if spec.enum == RESOURCE and not is_variable_op(op):
            return f"{op} works on a resource"
        if spec.enum == RESOURCE and not _is_fixed(spec):
            return OPEN_VARIABLE
    return None


def has_open_variable(parts: tuple[Any, ...]) -> bool:
    """Returns whether some of these inputs of a function are resources that are no variables of a fixed shape."""
    return any(spec.enum == RESOURCE and not _is_fixed(spec) for spec in parts)


def _is_fixed(spec: Spec) -> bool:
    return spec.handle is not None and all(shape is not None and -1 not in shape for _, shape in spec.handle)


def splits(last: Step, op: str, slots: list[int]) -> bool:
    """Returns whether to cut before an operation, as a segment cannot have it with one of the steps up to `last`.

    A graph updates rows in place, so it can neither write the whole variable before nor use all of it behind.
    """
    taken = {slot for slot in slots if CONST < slot < 0}
    step: Step | None = last
    while step is not None and step.parent is not None:
        before = step.op or ""
        if is_variable_op(before) and not taken.isdisjoint(step.slots):
            if before in SPARSE_OPTIMIZER_OPS and op not in ROW_UPDATES:
                return True
            if op in SPARSE_OPTIMIZER_OPS and before not in READS and before not in ROW_UPDATES:
                return True
        step = step.parent
    return False


def is_written(last: Step, slots: list[int]) -> bool:
    """Returns whether a segment up to `last` writes one of these variables; a function reads them by itself."""
    taken = {slot for slot in slots if CONST < slot < 0}
    step: Step | None = last
    while step is not None and step.parent is not None:
        if is_variable_op(step.op or "") and step.op not in READS and not taken.isdisjoint(step.slots):
            return True
        step = step.parent
    return False
