"""What kind of function or method the step is, how it is decorated and called."""

import ast

from examples.variants.rewrites import rewrite
from examples.variants.source import NotApplicable, Source, filled, parsed, substitute

INIT = "    def __init__(self, NAMES):\n        SETS\n"
MADE = "trainer = Trainer(NAMES)\nSTEP = trainer.train"


def _is_plain(source: Source) -> None:
    if source.anchor is not source.step or source.step.args.kwonlyargs:
        raise NotApplicable("no function by itself")


def _undecorated(source: Source, inner: str = "inner") -> None:
    """Gives the step another name and no decorator."""
    _is_plain(source)
    source.step.decorator_list = []
    source.step.name = inner


def _as_method(source: Source, head: str, name: str = "train") -> ast.ClassDef:
    """Puts the step into a class, in the place of `BODY`."""
    _is_plain(source)
    source.step.args.args.insert(0, ast.arg("self"))
    source.step.name = name
    made = filled(head, BODY=[source.step])
    source.replace_step(made)
    return made[-1]


def _owned(source: Source) -> list[str]:
    """Lets the step read what it shares with the factory from `self`; returns the names."""
    names = source.shared()
    if not names:
        raise NotApplicable("nothing is shared")
    substitute(source.step.body, {n: f"self.{n}" for n in names})
    return names


def _as_owner(source: Source, head: str, behind: str = MADE, method: str = "train") -> None:
    """Puts the step into a class whose objects have as attributes what the step shares with the factory.

    In the class, `head`, and in what comes behind it, names in capitals stand for what depends on these attributes.
    """
    _is_plain(source)
    step, names = source.step.name, _owned(source)
    parts = {
        "NAMES": ", ".join(names),
        "TUPLE": repr(tuple(names)),
        "FIELDS": "\n    ".join(f"{n}: typing.Any" for n in names),
        "SETS": "\n        ".join(f"self.{n} = {n}" for n in names),
        "HIDDEN": "\n        ".join(f"self._{n} = {n}" for n in names),
        "GETS": "".join(f"    @property\n    def {n}(self):\n        return self._{n}\n" for n in names),
        "STEP": step,
    }
    for part, text in parts.items():
        head, behind = head.replace(part, text), behind.replace(part, text)
    _as_method(source, head, method)
    source.after_step(behind)


@rewrite("a method of a class around it")
def method(source: Source) -> None:
    name = source.step.name
    _as_method(source, "class Trainer:\n    BODY")
    source.after_step(f"{name} = Trainer().train")


@rewrite("a method, all else attributes")
def method_with_attributes(source: Source) -> None:
    _as_owner(source, f"class Trainer:\n{INIT}    BODY")


@rewrite("a method decorated when the object is made")
def bound_method(source: Source) -> None:
    source.step.decorator_list = []
    decorated = "        self.train = function(self.train_on)\n"
    _as_owner(source, f"class Trainer:\n{INIT}{decorated}    BODY", method="train_on")


@rewrite("a dataclass's method")
def dataclass(source: Source) -> None:
    source.import_("dataclasses", "typing")
    _as_owner(source, "@dataclasses.dataclass\nclass Trainer:\n    FIELDS\n    BODY")


@rewrite("a method of a class with slots")
def slots(source: Source) -> None:
    _as_owner(source, f"class Trainer:\n    __slots__ = TUPLE\n{INIT}    BODY")


@rewrite("a method of a base class")
def base_class(source: Source) -> None:
    _as_owner(source, "class Base:\n    BODY", f"class Trainer(Base):\n{INIT}{MADE}")


@rewrite("a method of a tf.Module")
def module(source: Source) -> None:
    init = INIT.replace("SETS", "super().__init__()\n        SETS")
    _as_owner(source, f"class Trainer(tf.Module):\n{init}    BODY")


@rewrite("attributes that are properties")
def properties(source: Source) -> None:
    _as_owner(source, f"class Trainer:\n{INIT.replace('SETS', 'HIDDEN')}GETS    BODY")


@rewrite("a static method")
def static(source: Source) -> None:
    _is_plain(source)
    name = source.step.name
    source.step.decorator_list = []
    source.step.name = "train"
    source.step.decorator_list = [ast.Name("staticmethod", ast.Load())]
    source.replace_step(filled("class Trainer:\n    BODY", BODY=[source.step]))
    source.after_step(f"{name} = function(Trainer.train)")


@rewrite("a callable object")
def callable_object(source: Source) -> None:
    source.step.decorator_list = []
    _as_owner(source, f"class Trainer:\n{INIT}    BODY", "STEP = function(Trainer(NAMES))", "__call__")


@rewrite("a lambda around it")
def lambda_(source: Source) -> None:
    name, names = source.step.name, ", ".join(source.parameters())
    _undecorated(source)
    source.after_step(f"{name} = function(lambda {names}: inner({names}))")


@rewrite("a partial of it")
def partial(source: Source) -> None:
    name, names = source.step.name, source.shared()[:2]
    _undecorated(source)
    source.import_("functools")
    source.step.args.args[0:0] = [ast.arg(n) for n in names]
    source.after_step(f"{name} = function(functools.partial(inner, {', '.join(names)}))")


@rewrite("keyword arguments of any name")
def any_keywords(source: Source) -> None:
    _is_plain(source)
    name, names = source.step.name, source.parameters()
    source.step.args = parsed("def f(**batch): pass")[0].args
    source.begin_step("\n".join(f"{n} = batch[{n!r}]" for n in names))
    source.after_step(f"train_with = lambda {', '.join(names)}: {name}({', '.join(f'{n}={n}' for n in names)})")
    _redirect(source, name)


@rewrite("arguments by keyword")
def by_keyword(source: Source) -> None:
    name, names = source.called, source.parameters()
    source.after_step(f"train_with = lambda {', '.join(names)}: {name}({', '.join(f'{n}={n}' for n in names)})")
    _redirect(source, name)


@rewrite("arguments of any number")
def any_number(source: Source) -> None:
    _is_plain(source)
    names = source.parameters()
    source.step.args = parsed("def f(*batch): pass")[0].args
    source.begin_step(f"{', '.join(names)}, = batch")


@rewrite("a tuple as batch")
def tuple_batch(source: Source) -> None:
    _is_plain(source)
    name, names = source.called, source.parameters()
    source.step.args = parsed("def f(batch): pass")[0].args
    source.begin_step(f"{', '.join(names)}, = batch")
    source.after_step(f"train_with = lambda *batch: {name}(batch)")
    _redirect(source, name)


@rewrite("a dict as batch")
def dict_batch(source: Source) -> None:
    _is_plain(source)
    name, names = source.called, source.parameters()
    source.step.args = parsed("def f(batch): pass")[0].args
    source.begin_step("\n".join(f"{n} = batch[{n!r}]" for n in names))
    source.after_step(f"train_with = lambda {', '.join(names)}: {name}(dict({', '.join(f'{n}={n}' for n in names)}))")
    _redirect(source, name)


@rewrite("a named tuple as batch")
def named_batch(source: Source) -> None:
    _is_plain(source)
    source.import_("collections")
    name, names = source.called, source.parameters()
    source.define(f"Batch = collections.namedtuple('Batch', {names!r})")
    source.step.args = parsed("def f(batch): pass")[0].args
    source.begin_step("\n".join(f"{n} = batch.{n}" for n in names))
    source.after_step(f"train_with = lambda *batch: {name}(Batch(*batch))")
    _redirect(source, name)


@rewrite("a dataclass as batch")
def dataclass_batch(source: Source) -> None:
    _is_plain(source)
    source.import_("dataclasses", "typing")
    name, names = source.called, source.parameters()
    fields = "\n    ".join(f"{n}: typing.Any" for n in names)
    source.define(f"@dataclasses.dataclass\nclass Batch:\n    {fields}")
    source.step.args = parsed("def f(batch): pass")[0].args
    source.begin_step("\n".join(f"{n} = batch.{n}" for n in names))
    source.after_step(f"train_with = lambda *batch: {name}(Batch(*batch))")
    _redirect(source, name)


@rewrite("annotations")
def annotations(source: Source) -> None:
    for argument in source.step.args.args:
        if argument.arg != "self":
            argument.annotation = ast.parse("tf.Tensor", mode="eval").body
    source.step.returns = ast.parse("tf.Tensor", mode="eval").body
    place = next((n for n, s in enumerate(source.step.body) if isinstance(s, ast.Assign)
                  and isinstance(s.targets[0], ast.Name)), None)  # fmt: skip
    if place is not None:
        assigned = source.step.body[place]
        source.step.body[place] = ast.AnnAssign(
            assigned.targets[0], ast.parse("list[tf.Variable]", mode="eval").body, assigned.value, simple=1
        )


@rewrite("a flag that is an argument")
def flag(source: Source) -> None:
    source.step.args.args.append(ast.arg("training"))
    source.step.args.defaults.append(ast.Constant(True))
    source.begin_step("if not training:\n    raise ValueError('only for training')")


@rewrite("source that was executed")
def executed(source: Source) -> None:
    _is_plain(source)
    name = source.step.name
    source.step.decorator_list = []
    text = ast.unparse(ast.fix_missing_locations(source.step))
    source.replace_step(
        parsed(f"space = {{**globals(), **locals()}}\nexec({text!r}, space)\n{name} = function(space[{name!r}])")
    )


@rewrite("another thread")
def another_thread(source: Source) -> None:
    source.import_("concurrent.futures")
    name = source.called
    source.after_step(
        "pool = concurrent.futures.ThreadPoolExecutor(1)\n"
        f"train_with = lambda *batch: pool.submit({name}, *batch).result()"
    )
    _redirect(source, name)


@rewrite("a decorator inside of ours")
def decorator_inside(source: Source) -> None:
    _decorate(source, 1)


@rewrite("a decorator around ours")
def decorator_outside(source: Source) -> None:
    _decorate(source, 0)


@rewrite("a decorator with arguments and a timer")
def decorator_with_timer(source: Source) -> None:
    source.import_("functools", "time")
    source.define(
        """
        class Timed:
            def __init__(self, name):
                self.name, self.seconds = name, []

            def __call__(self, function):
                @functools.wraps(function)
                def timed(*args, **kwargs):
                    start = time.perf_counter()
                    try:
                        return function(*args, **kwargs)
                    finally:
                        self.seconds.append(time.perf_counter() - start)
                return timed
        """
    )
    _needs_decorators(source)
    source.step.decorator_list.insert(1, ast.parse("Timed('step')", mode="eval").body)


def _needs_decorators(source: Source) -> None:
    if not source.step.decorator_list:
        raise NotApplicable("not decorated")


def _decorate(source: Source, place: int) -> None:
    _needs_decorators(source)
    source.import_("functools")
    source.define(
        """
        def counted(function):
            @functools.wraps(function)
            def counting(*args, **kwargs):
                counting.calls += 1
                return function(*args, **kwargs)
            counting.calls = 0
            return counting
        """
    )
    source.step.decorator_list.insert(place, ast.Name("counted", ast.Load()))


def _redirect(source: Source, old: str) -> None:
    """Lets whatever is behind the new function call that one."""
    place = source.factory.body.index(source.anchor) + 1
    while "train_with" not in ast.unparse(source.factory.body[place]):
        place += 1
    for statement in source.factory.body[place + 1 :]:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id == old and isinstance(node.ctx, ast.Load):
                node.id = "train_with"
    source.called = "train_with"
