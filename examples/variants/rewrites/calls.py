"""How the `call` of the program's own layers and models is written."""

import ast
import copy
from collections.abc import Iterator

from examples.variants.rewrites import rewrite
from examples.variants.source import NotApplicable, Source, bound, filled, parsed, rename

LOGGER = "logger = logging.getLogger('variants')"


def _calls(source: Source) -> Iterator[tuple[ast.ClassDef, ast.FunctionDef]]:
    """The classes before the factory with their methods that compute."""
    found = [
        (cls, method)
        for cls in source.tree.body[: source.tree.body.index(source.factory)]
        if isinstance(cls, ast.ClassDef)
        for method in cls.body
        if isinstance(method, ast.FunctionDef) and method.name in ("call", "__call__", "encode", "decode")
    ]
    if not found:
        raise NotApplicable("no class with a call of its own")
    return iter(found)


def _first_argument(method: ast.FunctionDef) -> str:
    return method.args.args[1].arg


def _begin(source: Source, text: str) -> None:
    """Adds statements at the beginning of each `call`, in which `FIRST` is its first argument."""
    for _, method in _calls(source):
        method.body[0:0] = parsed(text.replace("FIRST", _first_argument(method)))


def _define(source: Source, text: str) -> None:
    """Adds definitions before the first class with a `call`."""
    place = source.tree.body.index(next(_calls(source))[0])
    source.tree.body[place:place] = parsed(text)


def _wrap(source: Source, text: str) -> None:
    for _, method in _calls(source):
        method.body = filled(text, BODY=method.body)


def _attributes(source: Source, text: str) -> None:
    """Adds statements at the end of the constructors of classes with a `call`."""
    for cls in dict.fromkeys(cls for cls, _ in _calls(source)):
        made = [s for s in cls.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"]
        if made:
            made[0].body += parsed(text)


@rewrite("call: import inside")
def import_inside(source: Source) -> None:
    _begin(source, "import tensorflow as tf")


@rewrite("call: import under another name")
def renamed(source: Source) -> None:
    source.import_("tensorflow as T")
    for _, method in _calls(source):
        rename(method.body, "tf", "T")


@rewrite("call: a debug log")
def debug(source: Source) -> None:
    source.import_("logging")
    _define(source, LOGGER)
    _begin(source, "logger.debug('called')")


@rewrite("call: a log of shapes")
def shapes(source: Source) -> None:
    source.import_("logging")
    _define(source, LOGGER)
    _begin(source, "logger.debug(f'called with {FIRST.shape}')")


@rewrite("call: a timer")
def timer(source: Source) -> None:
    source.import_("time")
    _define(source, "seconds = []")
    _wrap(
        source,
        "start = time.perf_counter()\ntry:\n    BODY\nfinally:\n    seconds.append(time.perf_counter() - start)",
    )


@rewrite("call: a name scope")
def scope(source: Source) -> None:
    _wrap(source, "with tf.name_scope('block'):\n    BODY")


@rewrite("call: a name scope of its own name")
def own_scope(source: Source) -> None:
    _wrap(source, "with tf.name_scope(self.name):\n    BODY")


@rewrite("call: a manager of one's own")
def manager(source: Source) -> None:
    source.import_("contextlib")
    _define(source, "@contextlib.contextmanager\ndef span(name):\n    yield name")
    _wrap(source, "with span('call'):\n    BODY")


@rewrite("call: a counter of the object")
def counter(source: Source) -> None:
    _attributes(source, "self.calls = 0")
    _begin(source, "self.calls += 1")


@rewrite("call: a counter in a list of the object")
def list_counter(source: Source) -> None:
    _attributes(source, "self.shapes = []")
    _begin(source, "self.shapes.append(tuple(FIRST.shape))\ndel self.shapes[:-3]")


@rewrite("call: a global counter")
def global_counter(source: Source) -> None:
    _define(source, "calls = 0")
    _begin(source, "global calls\ncalls += 1")


@rewrite("call: asserted shapes")
def asserted(source: Source) -> None:
    _begin(source, "assert FIRST.shape.rank >= 2, f'a shape of {FIRST.shape}'")


@rewrite("call: an error for wrong shapes")
def error(source: Source) -> None:
    _begin(source, "if len(FIRST.shape) < 2:\n    raise ValueError(f'{self.name} got {FIRST.shape}')")


@rewrite("call: a check of types")
def types(source: Source) -> None:
    _begin(source, "if isinstance(FIRST, (list, tuple)):\n    FIRST = tf.stack(FIRST)")


@rewrite("call: a check of layers' types")
def layer_types(source: Source) -> None:
    _begin(source, "if isinstance(self, keras.layers.Dropout):\n    return FIRST")


@rewrite("call: a `try` that raises again")
def raises(source: Source) -> None:
    _wrap(source, "try:\n    BODY\nexcept Exception:\n    raise")


@rewrite("call: `finally`")
def finally_(source: Source) -> None:
    _wrap(source, "try:\n    BODY\nfinally:\n    pass")


@rewrite("call: an early return")
def early(source: Source) -> None:
    _begin(source, "if FIRST is None:\n    return None")


@rewrite("call: a flag of the object")
def flag(source: Source) -> None:
    _attributes(source, "self.verbose = False")
    _begin(source, "if self.verbose:\n    print('called')")


@rewrite("call: a flag that may be missing")
def missing(source: Source) -> None:
    _begin(source, "if getattr(self, 'verbose', False) or hasattr(self, 'debugging'):\n    print('called')")


@rewrite("call: a configuration")
def configuration(source: Source) -> None:
    source.import_("dataclasses")
    _define(
        source, "@dataclasses.dataclass(frozen=True)\nclass Config:\n    verbose: bool = False\n    rate: float = 0.0"
    )
    _attributes(source, "self.config = Config()")
    _begin(source, "if self.config.verbose and self.config.rate > 0.0:\n    print('called')")


@rewrite("call: a configuration in a dict")
def in_a_dict(source: Source) -> None:
    _attributes(source, "self.config = {'verbose': False, 'names': ['a', 'b']}")
    _begin(source, "if self.config.get('verbose') or 'c' in self.config['names']:\n    print('called')")


@rewrite("call: layers looked up by name")
def by_name(source: Source) -> None:
    changed = False
    for _, method in _calls(source):
        for node in ast.walk(method):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if ast.unparse(node.func.value) == "self":
                    name = ast.Constant(node.func.attr)
                    node.func = ast.Call(ast.Name("getattr", ast.Load()), [node.func.value, name], [])
                    changed = True
    if not changed:
        raise NotApplicable("no layer is called")


@rewrite("call: a helper method")
def helper_method(source: Source) -> None:
    for cls, method in [*_calls(source)]:
        inner = copy.deepcopy(method)
        inner.name = f"_{method.name.strip('_')}_inner"
        cls.body.insert(cls.body.index(method), inner)
        method.body = parsed(f"return self.{inner.name}({_given(method)})")


@rewrite("call: a helper function")
def helper_function(source: Source) -> None:
    for cls, method in [*_calls(source)]:
        inner = copy.deepcopy(method)
        inner.name = f"{cls.name.lower()}_{method.name.strip('_')}"
        source.tree.body.insert(source.tree.body.index(cls), inner)
        method.body = parsed(f"return {inner.name}(self, {_given(method)})")


@rewrite("call: a helper that is a static method")
def static(source: Source) -> None:
    for cls, method in [*_calls(source)]:
        inner = copy.deepcopy(method)
        inner.name = f"_{method.name.strip('_')}_inner"
        inner.args.args[0].arg = "this"
        rename(inner.body, "self", "this")
        inner.decorator_list = [ast.Name("staticmethod", ast.Load())]
        cls.body.insert(cls.body.index(method), inner)
        method.body = parsed(f"return self.{inner.name}(self, {_given(method)})")


@rewrite("call: of a base class")
def base_class(source: Source) -> None:
    for cls, method in [*_calls(source)]:
        base = copy.deepcopy(cls)
        base.name = f"Base{cls.name}{method.name.strip('_')}"
        base.body = [copy.deepcopy(method)]
        source.tree.body.insert(source.tree.body.index(cls), base)
        cls.bases = [ast.Name(base.name, ast.Load())]
        method.body = parsed(f"return super().{method.name}({_given(method)})")


@rewrite("call: a decorator")
def decorator(source: Source) -> None:
    source.import_("functools")
    _define(
        source,
        """
        def plainly(method):
            @functools.wraps(method)
            def inner(self, *args, **kwargs):
                return method(self, *args, **kwargs)
            return inner
        """,
    )
    for _, method in _calls(source):
        method.decorator_list = [ast.Name("plainly", ast.Load())]


@rewrite("call: a lambda")
def lambda_(source: Source) -> None:
    _begin(source, "same = lambda value: value\nFIRST = same(FIRST)")


@rewrite("call: a function inside")
def inside(source: Source) -> None:
    _begin(source, "def same(value):\n    return value\nFIRST = same(FIRST)")


@rewrite("call: a function inside that shares variables")
def sharing(source: Source) -> None:
    for _, method in _calls(source):
        first = _first_argument(method)
        inner = [*parsed(f"{first} = given"), *method.body] if first in bound(method.body) else method.body
        method.body = [*parsed(f"given = {first}"), *filled("def compute():\n    BODY\nreturn compute()", BODY=inner)]


@rewrite("call: a list of results")
def results(source: Source) -> None:
    _begin(source, "outputs = []\noutputs.append(FIRST)\nFIRST = outputs[-1]")


@rewrite("call: a dict of results")
def dict_results(source: Source) -> None:
    _begin(source, "outputs = {}\noutputs['first'] = FIRST\nFIRST = outputs['first']")


@rewrite("call: a comprehension")
def comprehension(source: Source) -> None:
    _begin(source, "FIRST = [value for value in (FIRST,) if value is not None][0]")


@rewrite("call: `enumerate`, `zip` and `reversed`")
def iterators(source: Source) -> None:
    _begin(source, "for number, (value, _) in enumerate(zip([FIRST], reversed([0]))):\n    FIRST = value")


@rewrite("call: a set")
def a_set(source: Source) -> None:
    _begin(source, "if FIRST.dtype in {tf.int32, tf.int64, tf.string}:\n    return FIRST")


@rewrite("call: unpacked")
def unpacked(source: Source) -> None:
    _begin(source, "batch, *rest = FIRST.shape\nif batch == 0 or not rest:\n    return FIRST")


@rewrite("call: a walrus")
def walrus(source: Source) -> None:
    _begin(source, "if (rank := len(FIRST.shape)) < 2:\n    raise ValueError(rank)")


@rewrite("call: `del`")
def del_(source: Source) -> None:
    _begin(source, "shape = FIRST.shape\ndel shape")


@rewrite("call: `match`")
def match(source: Source) -> None:
    _begin(source, "match len(FIRST.shape):\n    case 0:\n        return FIRST\n    case _:\n        pass")


@rewrite("call: annotations")
def annotations(source: Source) -> None:
    for _, method in _calls(source):
        method.args.args[1].annotation = ast.parse("tf.Tensor", mode="eval").body
        method.returns = ast.parse("tf.Tensor", mode="eval").body
    _begin(source, "rank: int = len(FIRST.shape)")


@rewrite("call: other arguments")
def other(source: Source) -> None:
    for _, method in _calls(source):
        method.args.args.append(ast.arg("mask"))
        method.args.defaults.append(ast.Constant(None))
        method.args.kwarg = ast.arg("kwargs")
        method.body[0:0] = parsed("if mask is not None:\n    raise NotImplementedError")


@rewrite("call: numbers of NumPy and math")
def numbers(source: Source) -> None:
    source.import_("math")
    _begin(source, "if math.sqrt(FIRST.shape[-1]) < 0 or np.prod(FIRST.shape) < 0:\n    return FIRST")


@rewrite("call: `functools.partial` and `map`")
def functional(source: Source) -> None:
    source.import_("functools")
    _begin(source, "FIRST = list(map(functools.partial(tf.reshape, shape=FIRST.shape), [FIRST]))[0]")


@rewrite("call: `functools.reduce`")
def reduce(source: Source) -> None:
    source.import_("functools")
    _begin(source, "FIRST = functools.reduce(lambda value, layer: value, [1, 2], FIRST)")


@rewrite("call: a print that is switched off")
def printed(source: Source) -> None:
    _define(source, "VERBOSE = 0")
    _begin(source, "if VERBOSE > 1:\n    print(f'{FIRST.shape}')")


@rewrite("call: a warning that never comes")
def warning(source: Source) -> None:
    source.import_("warnings")
    _begin(source, "if FIRST.shape[-1] > 10 ** 6:\n    warnings.warn('large')")


@rewrite("call: a module of functions of one's own")
def namespace(source: Source) -> None:
    _define(source, "class F:\n    @staticmethod\n    def same(value):\n        return value")
    _begin(source, "FIRST = F.same(FIRST)")


@rewrite("call: a table of functions")
def table(source: Source) -> None:
    _define(source, "TABLE = {'same': lambda value: value, 'relu': tf.nn.relu}")
    _begin(source, "FIRST = TABLE['same'](FIRST)")


@rewrite("call: attributes that are properties")
def properties(source: Source) -> None:
    for cls in dict.fromkeys(cls for cls, _ in _calls(source)):
        cls.body += parsed("@property\ndef halved(self):\n    return 0.5")
    _begin(source, "if self.halved > 1.0:\n    return FIRST")


@rewrite("call: an attribute of the class")
def class_attribute(source: Source) -> None:
    for cls in dict.fromkeys(cls for cls, _ in _calls(source)):
        cls.body[0:0] = parsed("LIMIT = 1000000")
    _begin(source, "if FIRST.shape[-1] > self.LIMIT:\n    return FIRST")


@rewrite("call: an enumeration")
def enumeration(source: Source) -> None:
    source.import_("enum")
    _define(source, "class Kind(enum.Enum):\n    PLAIN = 'plain'\n    OTHER = 'other'")
    _attributes(source, "self.kind = Kind.PLAIN")
    _begin(source, "if self.kind == Kind.OTHER:\n    return FIRST")


@rewrite("call: a text that decides")
def text(source: Source) -> None:
    _attributes(source, "self.mode = 'plain-mode'")
    _begin(source, "if self.mode.lower().startswith('other') or self.mode.split('-')[0] == 'x':\n    return FIRST")


def _given(method: ast.FunctionDef) -> str:
    return ", ".join(a.arg for a in method.args.args[1:])

