"""What a program may do to its own process: each is given `check`, which runs programs and fails where they differ."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import cProfile
import faulthandler
import gc
import importlib
import linecache
import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import timeit
import tracemalloc
import warnings

from tests.environments import programs
from tests.environments.programs import Differs, Run

ENVIRONMENTS = {}
# What ends the process, or outlives what it was given: such a one is the last.
LAST = {"atexit_trains", "daemon_threads_at_exit", "os_exit", "threads_behind_main", "exits_in_a_step"}
FORKED = "forked after TensorFlow had started"


def environment(function):
    """Lists a function among the environments."""
    ENVIRONMENTS[function.__name__] = function
    return function


@environment
def plain(check):
    check()


@environment
def traced(check):
    """As a debugger does."""
    lines = []

    def trace(frame, event, argument):
        lines.append(event)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        check()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    if len(lines) < 1000:
        raise Differs(f"{len(lines)} events were traced")


@environment
def profiled(check):
    """As a profiler written in Python does, on every thread."""
    names = set()

    def profile(frame, event, argument):
        if event == "call":
            names.add(frame.f_code.co_name)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        check()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if "step" not in names:
        raise Differs("the profiler saw no step")


@environment
def profiled_in_c(check):
    profile = cProfile.Profile()
    profile.runcall(check)
    if not any(entry.code.co_name == "step" for entry in profile.getstats() if hasattr(entry.code, "co_name")):
        raise Differs("the profiler saw no step")


@environment
def traced_memory(check):
    tracemalloc.start(5)
    try:
        check()
        tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()


@environment
def fault_handler(check):
    with tempfile.TemporaryFile() as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGUSR1])
        try:
            timer.start()
            check()
            timer.join()
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.disable()


@environment
def switching_often(check):
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        check()
    finally:
        sys.setswitchinterval(before)


@environment
def collecting_often(check):
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        check()
    finally:
        gc.set_threshold(*before)


@environment
def never_collecting(check):
    gc.disable()
    try:
        check()
    finally:
        gc.enable()


@environment
def warnings_are_errors(check):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check()


@environment
def threads(check):
    """Several at a time."""
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(check) for _ in range(3)]:
            future.result()


@environment
def coroutines(check):
    """Steps of several tasks take turns; some run on asyncio's threads."""

    async def task(name):
        run = Run(name)
        for _ in range(4):
            run.call()
            await asyncio.sleep(0)
            await asyncio.to_thread(run.call)
        run.finish()

    async def main():
        await asyncio.gather(*(task(name) for name in check.args[0]))
        await asyncio.get_running_loop().run_in_executor(None, check)

    asyncio.run(main())


@environment
def signals(check):
    """Handlers written in Python run between any two instructions; they read no tensors."""
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if not seen:
        raise Differs("no signal came")


@environment
def interrupts(check):
    """As a notebook's user does: Ctrl-C in a step, and then on."""
    for name in check.args[0]:
        run = Run(name)
        for _ in range(4):
            run.call()
        for delay in (0.0, 0.001, 0.01):
            timer = threading.Timer(delay, signal.raise_signal, [signal.SIGINT])
            try:
                timer.start()
                while True:
                    run.step_alone()
            except KeyboardInterrupt:
                pass
            timer.join()
        fresh = Run(name)
        for _ in range(4):
            fresh.call()
        fresh.finish()


CELL = """
import tensorflow as tf, coexec
weights = tf.Variable([1.0, 2.0, 3.0])
seen = []
def helper(x):
    return tf.reduce_sum(x * weights)
@coexec.function
def step(x):
    with tf.GradientTape() as tape:
        loss = helper(x) * {factor}
    seen.append(float(loss))
    weights.assign_sub(0.1 * tape.gradient(loss, weights))
    return loss
"""


@environment
def cells(check):
    """As a notebook does: definitions are run again, changed, in the same names."""
    names = {"__name__": "__main__"}
    for number, factor in enumerate((1.0, 2.0, 1.0)):
        source = CELL.format(factor=factor)
        file = f"<ipython-input-{number}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        exec(compile(source, file, "exec"), names)
        step_in_cells(names, factor)
        exec("def helper(x):\n    return tf.reduce_sum(x * weights) + 1.0", names)
        step_in_cells(names, factor, 1.0)
    check()


def step_in_cells(names, factor, more=0.0):
    import numpy as np

    x = np.float32([1.0, -1.0, 0.5])
    for _ in range(5):
        expected = (np.sum(x * names["weights"].numpy()) + more) * factor
        loss = eval("step(tf.constant([1.0, -1.0, 0.5]))", names)
        if abs(float(loss) - expected) > 1e-4 or abs(names["seen"][-1] - expected) > 1e-4:
            raise Differs(f"a cell's step gives {float(loss)} for {expected}")
    if names["step"].stats().followed < 4:
        raise Differs(str(names["step"].stats()))


@environment
def reloaded(check):
    """As `%autoreload` does: the module is read again, and functions that are there get its new code."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "reloaded_steps.py")
        path.write_text(CELL.format(factor=1.0))
        sys.path.insert(0, directory)
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        try:
            module = importlib.import_module("reloaded_steps")
            names = vars(module)
            step_in_cells(names, 1.0)
            step = module.step
            path.write_text(CELL.format(factor=3.0))
            linecache.checkcache()
            importlib.invalidate_caches()
            importlib.reload(module)
            step_in_cells(names, 3.0)
            step.python_function.__code__ = module.step.python_function.__code__
            module.step = step
            step_in_cells(names, 3.0)
        finally:
            sys.path.remove(directory)
            sys.dont_write_bytecode = before
            sys.modules.pop("reloaded_steps", None)
    check()


@environment
def timed(check):
    """As `%timeit` does, with the collector off."""
    run = Run("raw_tape")
    timeit.Timer(run.call).repeat(2, 5)
    run.finish()


# Other processes.


def in_child(names, plainly=False):
    from coexec import testing

    with testing.always_follow(), testing.compile_everything():
        programs.check(names, plainly=plainly)
    return os.getpid()


def _queued(names, queue):
    try:
        queue.put(in_child(names))
    except BaseException as error:
        queue.put(repr(error))


def _processes(check, method):
    programs.check(check.args[0][:1])
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=_queued, args=(check.args[0], queue))
    process.start()
    answer = queue.get(timeout=200)
    process.join(60)
    if answer != process.pid or process.exitcode != 0:
        raise Differs(f"{method}: {answer}, exit code {process.exitcode}")
    programs.check(check.args[0][:1])


@environment
def spawned(check):
    _processes(check, "spawn")


@environment
def fork_server(check):
    _processes(check, "forkserver")


@environment
def process_pool(check):
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        if pool.submit(in_child, check.args[0]).result(200) == os.getpid():
            raise Differs("the pool runs in this process")


@environment
def forked_before_start(check):
    """Nothing but the import has happened: the child is like any other process."""
    import coexec  # noqa: F401

    _wait_for_child(lambda: in_child(check.args[0]))
    check()


@environment
def forked_after_start(check):
    """TensorFlow's threads are missing: programs run plainly, and say so."""
    run = Run("raw_tape")
    for _ in range(6):
        run.call()

    def child():
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            in_child(("raw_tape", "python_effects"), plainly=True)
            followed = run.step.stats().followed
            run.call()
            if run.step.stats().followed != followed:
                raise Differs("a call was followed")
        if sum(FORKED in str(each.message) for each in found) != 1:
            raise Differs([str(each.message) for each in found])

    _wait_for_child(child)
    run.call()
    run.finish()
    check()


def _wait_for_child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    for _ in range(2000):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise Differs("the child hangs")
    if os.waitstatus_to_exitcode(status) != 0:
        raise Differs(f"the child ended with {os.waitstatus_to_exitcode(status)}")


# Ends.


@environment
def daemon_threads_at_exit(check):
    """The main thread ends while others train, for ever."""
    started = threading.Semaphore(0)

    def work(name):
        run = Run(name)
        for _ in range(4):
            run.call()
        started.release()
        while True:
            run.call()

    for name in check.args[0]:
        threading.Thread(target=work, args=(name,), daemon=True).start()
    for _ in check.args[0]:
        if not started.acquire(timeout=100):
            raise Differs("a thread hangs")


@environment
def threads_behind_main(check):
    """The main thread ends, and the process goes on until the other has trained."""

    def work():
        threading.main_thread().join()
        check()

    threading.Thread(target=work).start()


@environment
def atexit_trains(check):
    check()
    atexit.register(check)
    runs = [Run(name) for name in check.args[0]]
    for run in runs:
        run.call()

    def go_on():
        for run in runs:
            for _ in range(5):
                run.call()
            run.finish()

    atexit.register(go_on)


@environment
def os_exit(check):
    check()
    sys.stdout.write("done\n")
    sys.stdout.flush()
    os._exit(0)


@environment
def exits_in_a_step(check):
    """`sys.exit` in the middle of a call, with operations pending."""
    import tensorflow as tf

    import coexec

    check()
    v = tf.Variable(0.0)

    @coexec.function
    def step(x, ends):
        v.assign_add(x)
        if ends:
            sys.exit(0)
        return v * 2.0

    for _ in range(4):
        step(tf.constant(1.0), False)
    with contextlib.suppress(SystemExit):
        step(tf.constant(1.0), True)
    if v.numpy() != 5.0:
        raise Differs(f"{v.numpy()} for 5.0")
    sys.stdout.write("done\n")
    step(tf.constant(1.0), True)
