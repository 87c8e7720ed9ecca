"""How the step is split into helpers, and what kind of helpers they are."""

import ast

from examples.variants.rewrites import rewrite
from examples.variants.source import NotApplicable, Source, bound, extract, filled, loaded, parsed


def _after(source: Source, statements: list[ast.stmt], place: int) -> list[ast.stmt]:
    """The statements behind one of the step's."""
    behind = statements[place + 1 :]
    if statements is not source.step.body:
        raise NotApplicable("not on the step's first level")
    return behind


def _split_loss(source: Source, decorators: tuple[str, ...] = (), name: str = "compute_loss") -> None:
    statements, place, tape = source.tape()
    tape.body = [extract(source, tape.body, _after(source, statements, place), name, decorators)]


def _split_apply(source: Source, decorators: tuple[str, ...] = (), name: str = "apply_gradients") -> None:
    statements, place, _ = source.tape()
    behind = _after(source, statements, place)
    last = behind[-1:] if isinstance(behind[-1], ast.Return) else []
    moved = behind[: len(behind) - len(last)]
    if not moved:
        raise NotApplicable("nothing behind the tape")
    source.step.body[place + 1 :] = [extract(source, moved, last, name, decorators), *last]


@rewrite("the loss in a helper")
def loss(source: Source) -> None:
    _split_loss(source)


@rewrite("the update in a helper")
def update(source: Source) -> None:
    _split_apply(source)


@rewrite("loss and update in helpers")
def both(source: Source) -> None:
    _split_apply(source)
    _split_loss(source)


@rewrite("the tape in a helper")
def tape(source: Source) -> None:
    statements, place, with_ = source.tape()
    behind = _after(source, statements, place)
    statements[place] = extract(source, [with_], behind, "record")


@rewrite("all of the step in a helper")
def whole(source: Source) -> None:
    if any(isinstance(n, (ast.Nonlocal, ast.Global)) for s in source.step.body for n in ast.walk(s)):
        raise NotApplicable("a scope")
    given = ", ".join([a.arg for a in source.step.args.args + source.step.args.kwonlyargs])
    if source.step.args.vararg or source.step.args.kwarg or source.step.args.kwonlyargs:
        raise NotApplicable("arguments of any number")
    source.before_step(filled(f"def make_step({given}):\n    BODY", BODY=source.step.body))
    source.step.body = parsed(f"return make_step({given})")


@rewrite("helpers in helpers")
def deep(source: Source) -> None:
    whole(source)
    for number in range(3):
        call = source.step.body[0].value
        given = ", ".join(ast.unparse(a) for a in call.args)
        source.before_step(f"def level{number}({given}):\n    return {ast.unparse(call)}")
        source.step.body = parsed(f"return level{number}({given})")


@rewrite("calls of layers in helpers")
def forward(source: Source) -> None:
    _wrap_calls(source, "def forward_{n}(*args, **kwargs):\n    return {n}(*args, **kwargs)")


@rewrite("calls of layers in helpers with a decorator")
def decorated(source: Source) -> None:
    source.import_("functools")
    source.define(
        """
        def counted(function):
            @functools.wraps(function)
            def counting(*args, **kwargs):
                return function(*args, **kwargs)
            return counting
        """
    )
    _wrap_calls(source, "@counted\ndef forward_{n}(*args, **kwargs):\n    return {n}(*args, **kwargs)")


@rewrite("calls of layers in a helper that calls itself")
def recursive(source: Source) -> None:
    source.define(
        "def descend(layer, depth, *args, **kwargs):\n    if depth:\n"
        "        return descend(layer, depth - 1, *args, **kwargs)\n    return layer(*args, **kwargs)"
    )
    _wrap_calls(source, "def forward_{n}(*args, **kwargs):\n    return descend({n}, 3, *args, **kwargs)")


@rewrite("calls of layers in lambdas")
def lambdas(source: Source) -> None:
    _wrap_calls(source, "forward_{n} = lambda *args, **kwargs: {n}(*args, **kwargs)")


@rewrite("calls of layers in partials")
def partials(source: Source) -> None:
    source.import_("functools")
    _wrap_calls(source, "forward_{n} = functools.partial({n})")


@rewrite("a loss helper with a decorator")
def loss_decorated(source: Source) -> None:
    source.import_("functools")
    source.define(
        """
        def named(name):
            def decorate(function):
                @functools.wraps(function)
                def wrapped(*args, **kwargs):
                    with tf.name_scope(name):
                        return function(*args, **kwargs)
                return wrapped
            return decorate
        """
    )
    _split_loss(source, ("named('loss')",))


@rewrite("a loss helper that logs")
def loss_logged(source: Source) -> None:
    source.import_("logging")
    source.define("logger = logging.getLogger('variants')")
    _split_loss(source)
    _helper(source, "compute_loss").body[0:0] = parsed("logger.debug('computing the loss')")


@rewrite("a loss helper with a timer")
def loss_timed(source: Source) -> None:
    source.import_("time")
    source.define("seconds = []")
    _split_loss(source)
    helper = _helper(source, "compute_loss")
    helper.body[0:0] = parsed("start = time.perf_counter()")
    helper.body[-1:-1] = parsed("seconds.append(time.perf_counter() - start)")


@rewrite("a loss helper that counts")
def loss_counted(source: Source) -> None:
    source.define("calls = 0")
    _split_loss(source)
    _helper(source, "compute_loss").body[0:0] = parsed("global calls\ncalls += 1")


@rewrite("a loss helper that is a generator")
def loss_generator(source: Source) -> None:
    _split_loss(source)
    helper = _helper(source, "compute_loss")
    result = helper.body[-1]
    helper.body[-1] = ast.Expr(ast.Yield(result.value))
    _, _, tape = source.tape()
    tape.body[0].value = ast.Call(ast.Name("next", ast.Load()), [tape.body[0].value], [])


@rewrite("methods for loss and update")
def methods(source: Source) -> None:
    if source.anchor is not source.step:
        raise NotApplicable("no function by itself")
    both(source)
    name = source.step.name
    helpers = [_helper(source, "compute_loss"), _helper(source, "apply_gradients")]
    for helper in helpers:
        source.factory.body.remove(helper)
        helper.args.args.insert(0, ast.arg("self"))
    for node in ast.walk(source.step):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("compute_loss", "apply_gradients"):
                node.func = ast.Attribute(ast.Name("self", ast.Load()), node.func.id, ast.Load())
    source.step.args.args.insert(0, ast.arg("self"))
    source.step.name = "train"
    source.replace_step(filled("class Trainer:\n    BODY", BODY=[*helpers, source.step]))
    source.after_step(f"{name} = Trainer().train")


@rewrite("functions inside of the step")
def inner(source: Source) -> None:
    """The loss as a function that is made in each call."""
    statements, place, tape = source.tape()
    behind = _after(source, statements, place)
    results = [n for n in loaded(behind) if n in bound(tape.body)]
    helper = filled("def compute_loss():\n    BODY", BODY=[*tape.body, *parsed(f"return {', '.join(results)}")])
    local = bound(source.step.body)
    if any(n in local for n in loaded(tape.body) if n in bound(tape.body) and n in source.parameters()):
        raise NotApplicable("an argument is written")
    tape.body = parsed(f"{', '.join(results)} = compute_loss()")
    statements[place:place] = helper


def _helper(source: Source, name: str) -> ast.FunctionDef:
    return next(s for s in source.factory.body if isinstance(s, ast.FunctionDef) and s.name == name)


def _wrap_calls(source: Source, helper: str) -> None:
    """Calls what the step shares with the factory, and is called by name, through helpers."""
    calls = [n for n in ast.walk(source.step) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    shared = source.shared()
    names = list(dict.fromkeys(c.func.id for c in calls if c.func.id in shared))
    if not names:
        raise NotApplicable("no layers are called")
    for name in names:
        source.before_step(helper.format(n=name))
    for call in calls:
        if call.func.id in names:
            call.func.id = f"forward_{call.func.id}"
