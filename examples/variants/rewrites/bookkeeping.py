"""Python beside the step's operations: logs, clocks, counters, checks and flags."""

import ast

from examples.variants.rewrites import rewrite
from examples.variants.source import NotApplicable, Source, bound, filled, parsed

LOGGER = "logger = logging.getLogger('variants')"


def _loss(source: Source) -> str:
    """The variable that has the loss."""
    if "loss" not in bound(source.step.body):
        raise NotApplicable("no loss")
    return "loss"


def _last_name(source: Source) -> str:
    return source.parameters()[0]


@rewrite("a debug log")
def debug(source: Source) -> None:
    source.import_("logging")
    source.define(LOGGER)
    source.begin_step("logger.debug('a step begins')")
    source.end_step("logger.debug('a step ends')")


@rewrite("a debug log inside of the tape")
def debug_inside(source: Source) -> None:
    source.import_("logging")
    source.define(LOGGER)
    _, _, tape = source.tape()
    tape.body += parsed("logger.debug('the loss is known')")


@rewrite("a log of shapes")
def shapes(source: Source) -> None:
    source.import_("logging")
    source.define(LOGGER)
    source.begin_step("\n".join(f"logger.debug(f'{n}: {{{n}.shape}} {{{n}.dtype}}')" for n in source.parameters()))


@rewrite("a log if it is enabled")
def enabled(source: Source) -> None:
    source.import_("logging")
    source.define(LOGGER)
    source.end_step("if logger.isEnabledFor(logging.DEBUG):\n    logger.debug('done')")


@rewrite("texts of shapes")
def texts(source: Source) -> None:
    source.before_step("seen = set()")
    source.begin_step(f"seen.add(f'{{{_last_name(source)}.shape}}')")


@rewrite("a timer")
def timer(source: Source) -> None:
    source.import_("time")
    source.before_step("seconds = []")
    source.begin_step("start = time.perf_counter()")
    source.end_step("seconds.append(time.perf_counter() - start)")


@rewrite("a timer of each part")
def timer_parts(source: Source) -> None:
    source.import_("time")
    source.before_step("seconds = {'loss': 0.0, 'update': 0.0}")
    statements, place, _ = source.tape()
    statements[place + 1 : place + 1] = parsed("seconds['loss'] += time.perf_counter() - start")
    statements[place:place] = parsed("start = time.perf_counter()")
    source.end_step("seconds['update'] += time.perf_counter() - start")


@rewrite("a log every minute")
def minutely(source: Source) -> None:
    source.import_("logging", "time")
    source.define(LOGGER)
    source.before_step("last = [time.time()]")
    source.end_step("if time.time() - last[0] > 60:\n    last[0] = time.time()\n    logger.info('still there')")


@rewrite("a progress bar")
def progress(source: Source) -> None:
    source.import_("sys", "time")
    source.define(
        """
        class Bar:
            def __init__(self, total, interval=30.0):
                self.n, self.total, self.interval, self.last = 0, total, interval, time.time()

            def update(self, n=1):
                self.n += n
                if time.time() - self.last >= self.interval:
                    self.last = time.time()
                    sys.stderr.write(f'{self.n}/{self.total}')
        """
    )
    source.before_step("bar = Bar(10 ** 9)")
    source.end_step("bar.update(1)")


@rewrite("a counter of an object")
def counter(source: Source) -> None:
    source.import_("types")
    source.before_step("progress = types.SimpleNamespace(count=0)")
    source.begin_step("progress.count += 1")


@rewrite("a global counter")
def global_counter(source: Source) -> None:
    source.define("steps = 0")
    source.begin_step("global steps\nsteps += 1")


@rewrite("a counter of the function around")
def nonlocal_counter(source: Source) -> None:
    source.before_step("steps = 0")
    source.begin_step("nonlocal steps\nsteps += 1")


@rewrite("a counter that numbers come from")
def iterator(source: Source) -> None:
    source.import_("itertools")
    source.before_step("steps = itertools.count()\nseen = []")
    source.begin_step("seen.append(next(steps))")


@rewrite("a counter of a collection")
def collection(source: Source) -> None:
    source.import_("collections")
    source.before_step("events, recent = collections.Counter(), collections.deque(maxlen=10)")
    source.begin_step("events['steps'] += 1\nrecent.append(events['steps'])")


@rewrite("a counter that the step's path does not depend on")
def modulo(source: Source) -> None:
    source.before_step("state = {'step': 0}")
    source.begin_step("state['step'] += 1\nif state['step'] % 1000000 == 0:\n    print('a million')")


@rewrite("losses in a list")
def history(source: Source) -> None:
    loss = _loss(source)
    source.before_step("history = []")
    source.end_step(f"history.append({loss})\ndel history[:-5]")


@rewrite("losses as numbers in a list")
def numbers(source: Source) -> None:
    loss = _loss(source)
    source.before_step("history = []")
    source.end_step(f"history.append(float({loss}))")


@rewrite("losses as arrays in a dict of lists")
def arrays(source: Source) -> None:
    loss = _loss(source)
    source.import_("collections")
    source.before_step("history = collections.defaultdict(list)")
    source.end_step(f"history['loss'].append({loss}.numpy())")


@rewrite("a moving mean of losses")
def moving(source: Source) -> None:
    loss = _loss(source)
    source.define(
        """
        class Mean:
            def __init__(self):
                self.total, self.count = 0.0, 0

            def update(self, value):
                self.total += float(value)
                self.count += 1

            @property
            def result(self):
                return self.total / max(self.count, 1)
        """
    )
    source.before_step("mean = Mean()")
    source.end_step(f"mean.update({loss})")


@rewrite("metrics as an object of one's own")
def metrics(source: Source) -> None:
    loss = _loss(source)
    source.define(
        "class Metrics(dict):\n    def log(self, **values):\n        for name, value in values.items():\n"
        "            self.setdefault(name, []).append(value)\n            del self[name][:-5]"
    )
    source.before_step("metrics = Metrics()")
    source.end_step(f"metrics.log(loss={loss})")


@rewrite("a check for a loss that is no number")
def finite(source: Source) -> None:
    loss = _loss(source)
    source.import_("math")
    source.end_step(f"if not math.isfinite(float({loss})):\n    raise FloatingPointError('diverged')")


@rewrite("asserted shapes")
def asserted(source: Source) -> None:
    first = _last_name(source)
    source.begin_step(f"assert {first}.shape.rank >= 1 and {first}.shape[0] > 0, f'no batch: {{{first}.shape}}'")
    loss = _loss(source)
    _, _, tape = source.tape()
    tape.body += parsed(f"assert {loss}.shape == ()")


@rewrite("asserted shapes of everything by a helper")
def asserted_helper(source: Source) -> None:
    source.define(
        "def check(tensor, name):\n    if not tf.is_tensor(tensor):\n"
        "        raise TypeError(f'{name} is a {type(tensor).__name__}')\n"
        "    if tensor.shape.rank is None:\n        raise ValueError(f'{name} has no rank')\n    return tensor"
    )
    source.begin_step("\n".join(f"{n} = check({n}, {n!r})" for n in source.parameters()))


@rewrite("a flag")
def flag(source: Source) -> None:
    source.before_step("debug = False")
    source.begin_step("if debug:\n    print('a step')")


@rewrite("flags of a configuration")
def configuration(source: Source) -> None:
    source.import_("dataclasses")
    source.define(
        "@dataclasses.dataclass(frozen=True)\nclass Config:\n    debug: bool = False\n    clip: float | None = None"
    )
    source.before_step("config = Config()")
    source.begin_step("if config.debug:\n    print('a step')")
    source.end_step("if config.clip is not None:\n    raise NotImplementedError")


@rewrite("a flag of the environment")
def environment(source: Source) -> None:
    source.import_("os")
    source.begin_step("if os.environ.get('VARIANTS_DEBUG'):\n    print('a step')")


@rewrite("an early return")
def early_return(source: Source) -> None:
    source.begin_step(f"if {_last_name(source)} is None:\n    return None")


@rewrite("an early return for empty batches")
def empty(source: Source) -> None:
    source.begin_step(f"if {_last_name(source)}.shape[0] == 0:\n    return None")


@rewrite("a walrus")
def walrus(source: Source) -> None:
    loss = _loss(source)
    _, _, tape = source.tape()
    for place, node in reversed([*enumerate(tape.body)]):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == loss:
            tape.body[place] = filled(
                f"if ({loss} := VALUE) is None:\n    raise ValueError('no loss')", VALUE=node.value
            )[0]
            return
    raise NotApplicable("no loss in the tape")


@rewrite("names deleted at the end")
def deleted(source: Source) -> None:
    _, _, tape = source.tape()
    names = [i.optional_vars.id for i in tape.items if isinstance(i.optional_vars, ast.Name)]
    if not names:
        raise NotApplicable("no name")
    source.end_step(f"del {', '.join(names)}")


@rewrite("callbacks")
def callbacks(source: Source) -> None:
    source.define(
        "class Callback:\n    def __init__(self):\n        self.events = 0\n"
        "    def on_batch_begin(self, **info):\n        self.events += 1\n"
        "    def on_batch_end(self, **info):\n        self.events += 1"
    )
    source.before_step("callbacks = [Callback(), Callback()]")
    source.begin_step("for callback in callbacks:\n    callback.on_batch_begin()")
    source.end_step("for callback in callbacks:\n    callback.on_batch_end(last=None)")


@rewrite("a dict of results")
def results(source: Source) -> None:
    last = source.step.body[-1]
    if not isinstance(last, ast.Return):
        raise NotApplicable("nothing is returned")
    source.step.body[-1] = filled("return {'loss': VALUE, 'shape': None}", VALUE=last.value)[0]


@rewrite("print of nothing")
def printed(source: Source) -> None:
    source.import_("io")
    source.before_step("file = io.StringIO()")
    source.end_step("print('.', end='', file=file)")


@rewrite("a random number of Python's")
def random(source: Source) -> None:
    source.import_("random")
    source.begin_step("if random.random() > 2.0:\n    print('never')")


@rewrite("a dict of losses, summed")
def summed(source: Source) -> None:
    _losses(source, "losses = {'main': LOSS}\nLOSS = sum(losses.values())")


@rewrite("a generator of losses, summed")
def summed_generator(source: Source) -> None:
    _losses(source, "losses = [LOSS]\nLOSS = sum(l for l in losses)")


@rewrite("losses added by add_n")
def add_n(source: Source) -> None:
    _losses(source, "losses = []\nlosses.append(LOSS)\nLOSS = tf.add_n(losses)")


@rewrite("losses with weights from a dict")
def weighted(source: Source) -> None:
    source.before_step("weights = {'main': 1.0}")
    _losses(source, "losses = {'main': LOSS}\nLOSS = sum(weights[k] * v for k, v in losses.items())")


@rewrite("a loss in a list comprehension")
def comprehension(source: Source) -> None:
    _losses(source, "LOSS = tf.reduce_sum([l for l in (LOSS,) if l is not None])")


def _losses(source: Source, text: str) -> None:
    loss = _loss(source)
    _, _, tape = source.tape()
    tape.body += parsed(text.replace("LOSS", loss))
