"""What is around the tape, and around the step: `with` and `try`."""

import ast

from examples.variants.rewrites import rewrite
from examples.variants.rewrites.forms import method_with_attributes
from examples.variants.source import NotApplicable, Source, filled, is_tape, parsed

TIMER = """
class Timer:
    def __init__(self):
        self.seconds = 0.0

    def __enter__(self):
        self.start = time.perf_counter()
        return self

    def __exit__(self, *error):
        self.seconds += time.perf_counter() - self.start
"""
SPAN = """
@contextlib.contextmanager
def span(name):
    start = time.perf_counter()
    try:
        yield
    finally:
        logger.debug('%s took %.3f s', name, time.perf_counter() - start)
"""


def _beside(source: Source, manager: str, first: bool = True) -> None:
    _, _, tape = source.tape()
    item = ast.withitem(ast.parse(manager, mode="eval").body, None)
    tape.items.insert(0 if first else len(tape.items), item)


def _around_tape(source: Source, text: str) -> None:
    statements, place, tape = source.tape()
    statements[place : place + 1] = filled(text, TAPE=[tape])


@rewrite("a name scope beside the tape")
def scope_beside(source: Source) -> None:
    _beside(source, "tf.name_scope('loss')")


@rewrite("a name scope behind the tape")
def scope_behind(source: Source) -> None:
    _beside(source, "tf.name_scope('loss')", first=False)


@rewrite("a name scope around the step")
def scope_around(source: Source) -> None:
    source.wrap_step("with tf.name_scope('step'):\n    BODY")


@rewrite("an exit stack")
def exit_stack(source: Source) -> None:
    source.import_("contextlib")
    statements, place, tape = source.tape()
    entered = []
    for item in tape.items:
        call = ast.Call(ast.parse("stack.enter_context", mode="eval").body, [item.context_expr], [])
        target = item.optional_vars
        entered.append(ast.Expr(call) if target is None else ast.Assign([target], call, lineno=0))
    statements[place : place + 1] = filled(
        "with contextlib.ExitStack() as stack:\n    ENTER\n    BODY", ENTER=entered, BODY=tape.body
    )


@rewrite("a generator's manager around the tape")
def span_around(source: Source) -> None:
    source.import_("contextlib", "logging", "time")
    source.define("logger = logging.getLogger('variants')" + SPAN)
    _around_tape(source, "with span('loss'):\n    TAPE")


@rewrite("a generator's manager around the step")
def span_around_step(source: Source) -> None:
    source.import_("contextlib", "logging", "time")
    source.define("logger = logging.getLogger('variants')" + SPAN)
    source.wrap_step("with span('step'):\n    BODY")


@rewrite("a generator's manager that gives the tape")
def gives_tape(source: Source) -> None:
    source.import_("contextlib")
    source.define(
        "@contextlib.contextmanager\ndef recording():\n    with tf.GradientTape() as tape:\n        yield tape"
    )
    _, _, tape = source.tape()
    for item in tape.items:
        if is_tape(item.context_expr):
            item.context_expr = ast.parse("recording()", mode="eval").body


@rewrite("a function that gives the tape")
def made_tape(source: Source) -> None:
    source.define("def new_tape(**kwargs):\n    return tf.GradientTape(**kwargs)")
    _, _, tape = source.tape()
    for item in tape.items:
        if is_tape(item.context_expr):
            item.context_expr.func = ast.Name("new_tape", ast.Load())


@rewrite("a class derived from the tape's")
def derived_tape(source: Source) -> None:
    source.define("class Tape(tf.GradientTape):\n    pass")
    _, _, tape = source.tape()
    for item in tape.items:
        if is_tape(item.context_expr):
            item.context_expr.func = ast.Name("Tape", ast.Load())


@rewrite("a timer around the tape")
def timer_around(source: Source) -> None:
    source.import_("time")
    source.define(TIMER)
    source.before_step("timer = Timer()")
    _around_tape(source, "with timer:\n    TAPE")


@rewrite("a timer around the step")
def timer_around_step(source: Source) -> None:
    source.import_("time")
    source.define(TIMER)
    source.wrap_step("with Timer() as timer:\n    BODY")


@rewrite("timers around the parts of the step")
def timers(source: Source) -> None:
    source.import_("time")
    source.define(TIMER)
    source.before_step("timers = {'loss': Timer(), 'update': Timer()}")
    statements, place, tape = source.tape()
    behind = statements[place + 1 :]
    last = behind[-1:] if isinstance(behind[-1], ast.Return) else []
    moved = behind[: len(behind) - len(last)]
    if not moved or statements is not source.step.body:
        raise NotApplicable("nothing behind the tape")
    statements[place:] = [
        *filled("with timers['loss']:\n    TAPE\nwith timers['update']:\n    BODY", TAPE=[tape], BODY=moved),
        *last,
    ]


@rewrite("a lock around the step")
def lock(source: Source) -> None:
    source.import_("threading")
    source.before_step("lock = threading.Lock()")
    source.wrap_step("with lock:\n    BODY")


@rewrite("a device around the tape")
def device(source: Source) -> None:
    _around_tape(source, "with tf.device('/CPU:0'):\n    TAPE")


@rewrite("warnings caught around the tape")
def warnings(source: Source) -> None:
    source.import_("warnings")
    _around_tape(source, "with warnings.catch_warnings():\n    TAPE")


@rewrite("a `try` that raises again")
def raises_again(source: Source) -> None:
    source.wrap_step("try:\n    BODY\nexcept Exception:\n    raise")


@rewrite("a `try` that logs and raises again")
def logs_and_raises(source: Source) -> None:
    source.import_("logging")
    source.define("logger = logging.getLogger('variants')")
    source.wrap_step("try:\n    BODY\nexcept Exception:\n    logger.exception('the step failed')\n    raise")


@rewrite("a `try` that raises another error")
def raises_another(source: Source) -> None:
    source.wrap_step("try:\n    BODY\nexcept tf.errors.OpError as error:\n    raise RuntimeError('failed') from error")


@rewrite("a `try` for an error of Python's")
def python_error(source: Source) -> None:
    source.wrap_step("try:\n    BODY\nexcept (KeyError, StopIteration):\n    return None")


@rewrite("a `try` for running out of memory")
def memory_error(source: Source) -> None:
    source.wrap_step("try:\n    BODY\nexcept tf.errors.ResourceExhaustedError:\n    print('too large')\n    raise")


@rewrite("`finally`")
def finally_(source: Source) -> None:
    source.before_step("state = {'steps': 0}")
    source.wrap_step("try:\n    BODY\nfinally:\n    state['steps'] += 1")


@rewrite("`finally` around the tape, and a timer")
def finally_timer(source: Source) -> None:
    source.import_("time")
    source.before_step("seconds = []")
    source.begin_step("start = time.perf_counter()")
    _around_tape(source, "try:\n    TAPE\nfinally:\n    seconds.append(time.perf_counter() - start)")


@rewrite("a `try` with `else`")
def try_else(source: Source) -> None:
    source.before_step("state = {'steps': 0}")
    _around_tape(source, "try:\n    TAPE\nexcept Exception:\n    raise\nelse:\n    state['steps'] += 1")


@rewrite("methods and a name scope beside the tape and a `try` that raises again")
def several(source: Source) -> None:
    scope_beside(source)
    raises_again(source)
    method_with_attributes(source)


@rewrite("a manager that is a method")
def method_manager(source: Source) -> None:
    source.import_("contextlib")
    source.define(
        """
        class Stages:
            def __init__(self):
                self.stack = []

            @contextlib.contextmanager
            def stage(self, name):
                self.stack.append(name)
                try:
                    yield self
                finally:
                    self.stack.pop()
        """
    )
    source.before_step("stages = Stages()")
    _around_tape(source, "with stages.stage('loss'):\n    TAPE")


@rewrite("a decorator that is a manager")
def decorator_manager(source: Source) -> None:
    source.import_("contextlib", "logging", "time")
    source.define("logger = logging.getLogger('variants')" + SPAN)
    if not source.step.decorator_list:
        raise NotApplicable("not decorated")
    source.step.decorator_list.insert(1, parsed("span('step')")[0].value)
