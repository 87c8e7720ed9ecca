"""Trace graph: all traces of one function, merged.

A *node* is an operation at a place: type, attributes and location. Its *variants* say what comes out for what goes
in (dtypes, shapes, and the values of integers that shapes depend on). Edges say which node followed which; a node
with several successors is a fork, one with several predecessors a join.

A *step* is a node on one path, with its wiring: which earlier tensor of the same segment each input is, or which
feed. Steps are what the cursor walks; they hang in a tree that starts anew after every cut, so paths that part
before a cut share their steps after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from tracer import seeds
from tracer.inputs import shape_like
from tracer.lazy import Output
from tracer.location import FREE, Location
from tracer.op import Const, copied_attrs, freeze, signature_of
from tracer.spec import Spec, spec_of

CONST = -(1 << 40)  # slot of an input that is a constant
LIST = CONST - 1  # slot of an input that is a list

MAX_HANDLES = 4096

# A place whose attributes have had this many values runs its operation on its own from then on.
MAX_ATTRIBUTES = 32


class Variant:
    """What a node does with inputs of these specs and values: its outputs, and the shape of its result."""

    __slots__ = ("key", "outputs", "template")

    def __init__(self, key: tuple[Any, ...], outputs: tuple[Output, ...], template: Any) -> None:
        self.key = key
        self.outputs = outputs
        # None: no result; -1: the tensor itself; else a list of output numbers and lists of output numbers.
        self.template = template

    @property
    def folded(self) -> bool:
        """Whether all outputs are known without running the operation."""
        return bool(self.outputs) and all(o.const is not None for o in self.outputs)


class Node:
    """One operation at one place of the user's program."""

    __slots__ = (
        "after", "attrs", "constants", "entry", "fed", "guarded", "head", "host", "inputs", "location", "name",
        "number", "op", "predecessors", "shaping", "successors", "variants",
    )  # fmt: skip

    def __init__(self, number: int, op: str, entry: str, attrs: tuple[Any, ...], location: Location) -> None:
        self.number = number
        self.op = op
        self.entry = entry
        self.attrs: tuple[Any, ...] = copied_attrs(attrs)
        self.location = location
        self.name: Any = None
        self.guarded = FREE  # what the program may do with its failure
        self.host: str | None = None  # why the operation runs on its own and is no part of a segment
        self.variants: dict[tuple[Any, ...], Variant] = {}
        self.successors: dict[int, Node] = {}
        self.predecessors: dict[int, Node] = {}
        self.inputs: list[set[str]] = []  # where each input has come from, for people
        self.fed: set[Any] = set()  # constants that have changed and are fed since
        self.shaping: set[Any] = set()  # those that were fed, until a shape behind the node was found to depend on them
        self.constants: dict[Any, Const] = {}  # the first of those that may be fed, by input, or by input and item
        self.after: Step | None = None
        self.head: Node = self  # of the nodes of all iterations of this operation at this place, the first

    def start_after(self) -> Step:
        """Returns the root of the steps that follow a cut behind this node: the same one in all iterations."""
        head = self.head
        if head.after is None:
            head.after = Step(None, None, head, None, (), {}, {}, ())
        return head.after

    def __repr__(self) -> str:
        return f"<Node {self.number} {self.op} at {self.location}>"


class Step:
    """A node on one path of a segment: what the cursor compares an operation with."""

    __slots__ = (
        "arity", "assertion", "attrs", "checked", "closed", "consts", "depth", "draws", "early", "end", "exact",
        "executables", "external", "fast", "first", "frames", "host", "hot", "lists", "live", "next", "node", "notes",
        "op", "outputs", "parent", "pattern", "pause", "plain", "regions", "risky", "seeded", "single", "slots",
        "specs", "spelled", "tape", "variant", "visits",
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
        self.parent = parent
        self.op = op
        self.node = node
        self.variant = variant
        self.slots = slots  # per input: >= 0 a tensor of this segment, < 0 a feed -(k + 1), or CONST, or LIST
        self.consts = consts
        self.lists = lists
        self.specs = specs  # the specs of the feeds that this step is the first to use
        self.external = (parent.external if parent is not None else 0) + len(specs)
        self.first = parent.end if parent is not None else 0  # number of its first output in the segment
        self.outputs = variant.outputs if variant is not None else ()
        self.end = self.first + len(self.outputs)
        self.depth: int = parent.depth + 1 if parent is not None else 0
        # How many operations of the segment have to run: those that are known from shapes alone do not.
        self.live = (parent.live if parent is not None else 0) + (variant is not None and not variant.folded)
        self.single = variant is not None and variant.template == -1
        self.arity = len(slots)
        self.fast = node is not None and node.entry == "fast"  # the other way gives its results in another form
        self.attrs = node.attrs if node is not None and op is not None else ()
        self.exact = _needs_exact_attrs(self.attrs)
        self.host = node is not None and op is not None and node.host is not None
        self.early = self.host and op in seeds.DRAWING  # it may run without a cut, if its inputs are known
        # Whether it draws random numbers from seeds that are fed; how many operations of the segment do up to here.
        self.seeded = op is not None and not self.host and seeds.are_fed(op, self.attrs)
        self.draws: int = (parent.draws if parent is not None else 0) + self.seeded
        self.next: list[Step] = []
        # Whether the place counts too: behind a cut and at a fork, what looks the same may be another operation.
        self.checked = parent is not None and parent.parent is None
        self.frames = node.location.frames if node is not None else ()
        self.hot: Step | None = None
        self.visits = 0
        self.executables: Any = None  # owned by the runtime: what has been compiled for a cut behind this step
        self.spelled: dict[int, tuple[Any, Any]] | None = None  # what lists among the inputs said, and became
        self.tape: Any = None  # the complete attributes, for gradient tapes
        self.closed: bool | None = None  # owned by the runtime: whether it takes nothing but what the segment has made
        self.regions: Any = None  # owned by the runtime: library calls that begin behind this step
        self.pattern: Any = None  # owned by the runtime: of those, the arguments of the one that came last
        self.risky: bool | None = None  # owned by the runtime: whether a failure could be caught by the program
        self.assertion: Any = None  # owned by the runtime: what an assertion says where it does not hold
        self.notes: Any = None  # owned by the runtime: what Keras writes into an error of it, the first of some
        self.pause = False  # owned by the runtime: whether Python takes its time behind this step
        self.plain = False

    def settle_plain(self) -> None:
        """Decides whether the cursor may compare this step in its shortest way."""
        self.plain = (
            self.risky is False
            and self.single
            and not (self.host or self.checked or self.exact or self.lists or self.specs or self.seeded)
        )

    def add(self, step: Step, most: int) -> None:
        """Adds a step that may come next; beyond `most`, the oldest goes."""
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
        """Where the program issued the operation, for people."""
        return str(self.node.location) if self.node is not None else ""

    def is_inside(self, frames: tuple[Any, ...]) -> bool:
        """Returns whether the operation was issued by what was called from here: its library may have frames, too."""
        return self.frames[len(self.frames) - len(frames) :] == frames

    def root(self) -> Step:
        """Returns the root of the steps that this one hangs from."""
        step = self
        while step.parent is not None:
            step = step.parent
        return step

    def arrange(self, tensors: list[Any]) -> Any:
        """Returns the outputs, given as they are numbered, in the form in which the operation returns them."""
        template = self.variant.template if self.variant is not None else None
        if template is None:
            return None
        return [tensors[t] if isinstance(t, int) else [tensors[n] for n in t] for t in template]

    def given(self) -> set[int]:
        """Returns the numbers of the segment's tensors up to this step that are not known from shapes alone."""
        return {s.first + n for s in self.chain() for n, out in enumerate(s.outputs) if out.const is None}

    def chain(self) -> list[Step]:
        """Returns the steps of the segment up to this one, in order."""
        steps = []
        step: Step | None = self
        while step is not None and step.parent is not None:
            steps.append(step)
            step = step.parent
        steps.reverse()
        return steps


def _needs_exact_attrs(attrs: tuple[Any, ...]) -> bool:
    """Whether `==` is too weak for these attributes: 0.0 == -0.0 holds, and they are not the same."""
    return any(a == 0.0 and isinstance(a, float) for a in attrs)


def spec_of_constant(step: Step, *path: int) -> Spec | None:
    """Returns the spec of a step's constant input, or item of a list; None where its value matters for shapes."""
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
        self.places: Counter[Any] = Counter()  # how many nodes each operation has at each place
        self.steps = 0
        self.exits: set[int] = set()
        self.slow: set[Any] = set()  # operations that TensorFlow's fast path has refused, by place
        self._heads: dict[Any, Node] = {}  # the first node of each operation at each place
        self._latest: dict[Any, Node] = {}  # the last node of each operation at each place, with its attributes
        self._constants: dict[int, Const | None] = {}
        self._handles: dict[int, Spec] = {}

    def handle_spec(self, handle: Any) -> Spec:
        """Returns the spec of a resource; what was found once is kept by the handle's id, which is never used again."""
        spec = self._handles.get(handle._id)
        if spec is None:
            if len(self._handles) >= MAX_HANDLES:
                self._handles.clear()
            spec = self._handles[handle._id] = spec_of(handle)
        return spec

    def constant_of(self, tensor: Any) -> Const | None:
        """Returns the value of an eager tensor if it may stand for a shape; read once per tensor."""
        key = tensor._id
        if key not in self._constants:
            if len(self._constants) >= MAX_HANDLES:
                self._constants.clear()
            self._constants[key] = shape_like(tensor)
        return self._constants[key]

    def find(self, op: str, entry: str, attrs: tuple[Any, ...], location: Location) -> Node | None:
        """Returns the node with this type, these attributes and this location, if there is one."""
        node = self.index.get(node_key(op, entry, attrs, location))
        return node or self.index.get((op, entry, location))

    def add(self, op: str, entry: str, attrs: tuple[Any, ...], location: Location) -> Node:
        """Adds a node; one that is there already is returned."""
        key = node_key(op, entry, attrs, location)
        place = (op, entry, location)
        node = self.index.get(key)
        if node is None:
            self.places[place] += 1
            if self.places[place] > MAX_ATTRIBUTES:
                key = place  # from now on it is what it is whatever its attributes say
            node = self.index[key] = Node(len(self.nodes), op, entry, attrs, location)
            if key == place and self.places[place] > MAX_ATTRIBUTES:
                node.host = "its attributes keep changing"
            self.nodes.append(node)
            node.head = self._heads.setdefault((op, entry, location.frames), node)
            first = location._replace(iteration=0)
            self._latest[node_key(op, entry, attrs, first)] = node
            if entry == "execute":
                self.slow.add((op, first))
        return node

    def repeat(self, op: str, entry: str, attrs: tuple[Any, ...], location: Location) -> Node | None:
        """Adds a node for one more iteration of what is known from others; None if it is not."""
        known = self._latest.get(node_key(op, entry, attrs, location._replace(iteration=0)))
        if known is None:
            return None
        node = self.add(op, entry, attrs, location)
        node.name, node.guarded, node.host = known.name, known.guarded, node.host or known.host
        node.inputs = [set(sources) for sources in known.inputs]
        node.fed, node.shaping = set(known.fed), set(known.shaping)
        for key, variant in known.variants.items():
            outputs = tuple(Output(o.spec, o.const, node) for o in variant.outputs)
            node.variants[key] = Variant(key, outputs, variant.template)
        return node

    def link(self, before: Node, after: Node) -> None:
        """Notes that `after` has followed `before`."""
        if after.number not in before.successors:
            before.successors[after.number] = after
            after.predecessors[before.number] = before

    def size(self) -> int:
        """Returns how many nodes and steps there are: what the graph's memory grows with."""
        return len(self.nodes) + self.steps

    def forks(self) -> Iterator[Node]:
        """Yields the nodes behind which paths part."""
        return (n for n in self.nodes if len(n.successors) > 1)

    def joins(self) -> Iterator[Node]:
        """Yields the nodes in which paths meet again."""
        return (n for n in self.nodes if len(n.predecessors) > 1)

    def __str__(self) -> str:
        from tracer.show import show

        return show(self)


def node_key(op: str, entry: str, attrs: tuple[Any, ...], location: Location) -> Any:
    """Returns the identity of a node: type, attributes, location.

    Operations that run on their own are what they are whatever their attributes say (seeds given, functions).
    """
    signature = signature_of(op)
    if signature is None or (signature.stateful and not is_variable_op(op) and not seeds.are_fed(op, attrs)):
        return op, entry, location
    try:
        return op, entry, freeze(attrs), location
    except TypeError:
        return op, entry, location


VARIABLE_OPS = frozenset(
    {"ReadVariableOp", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "VariableShape",
     "ResourceGather", "ResourceGatherNd", "ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate",
     "ResourceScatterMin", "ResourceScatterMax", "RngReadAndSkip"}
)  # fmt: skip


def is_variable_op(op: str) -> bool:
    """Returns whether `op` works on a variable in a way that segments can keep in order."""
    return op in VARIABLE_OPS
