"""What is set before TensorFlow is imported, and where the programs of the corpus write their files."""

import collections
import dataclasses
import gc
import os
import sys
import tempfile

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
# Nothing is kept for later runs, nor taken from the cache of whoever runs the tests.
os.environ["COEXEC_CACHE_DIR"] = "off"
# Failures of the runtime itself are failures of a test, but where it is about them.
os.environ.setdefault("COEXEC_DEBUG", "1")
# Programs are compared on the CPU: another device would round in its own way.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")


SAMPLE = 4  # of the parameters of one test


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses among them
def pytest_collection_modifyitems(items):
    """Of a test with many parameters, some that are spread over them are a sample, and all others are slow."""
    of_test = collections.defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            of_test[item.nodeid.partition("[")[0]].append(item)
    for many in of_test.values():
        chosen = many[0].get_closest_marker("sample")
        if chosen is not None:
            kept = {item for item in many if item.callspec.id in chosen.args}
        else:
            kept = {many[n * len(many) // SAMPLE] for n in range(SAMPLE)} if len(many) > SAMPLE else set(many)
        for item in many:
            if item not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def files_of_programs(tmp_path_factory):
    """What programs write goes where pytest cleans up."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("programs"))
    yield
    tempfile.tempdir = before


@pytest.fixture(scope="session", autouse=True)
def lasting_objects_set_apart():
    """No collection looks through TensorFlow and the test modules: that takes half a second, and tests ask for many."""
    import coexec  # noqa: F401 (what is imported now is set apart)

    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def tensors_in_their_places(monkeypatch):
    """Each pending tensor is where its key says: one place off, it would get another one's value, of the same shape."""
    from coexec.follow import flush

    def checked(run, last, before=flush.held_back):
        if sys.exc_info()[0] is None:  # an interrupt may leave what it came between
            places = [value._key - run.cursor.base for value in run.values if value is not None]
            assert places == [place for place, value in enumerate(run.values) if value is not None]
        return before(run, last)

    monkeypatch.setattr(flush, "held_back", checked)


@pytest.fixture(autouse=True)
def trusted(request):
    """What is compiled is what tests see, from its first launch on, but where the comparison is tested."""
    if request.node.get_closest_marker("distrusting"):
        yield
        return
    from coexec import testing

    with testing.trust_compiled():
        yield


@pytest.fixture(autouse=True)
def always_followed(request):
    """The clock decides nothing, but where that is what is tested (marks `clocked` and `paused`)."""
    if request.node.get_closest_marker("clocked"):
        yield
        return
    from coexec import testing  # imports TensorFlow, which is not to be before the lines above

    with testing.always_follow(paused=request.node.get_closest_marker("paused") is not None):
        yield


@pytest.fixture(autouse=True)
def tuning_of_before():
    """No test leaves values of its own: what the next ones launch would be something else."""
    from coexec.base.tuning import tuning

    before = dataclasses.replace(tuning)
    yield
    left = dataclasses.replace(tuning)
    for field in dataclasses.fields(before):
        setattr(tuning, field.name, getattr(before, field.name))
    assert left == before


@pytest.fixture
def exact_sizes(monkeypatch):
    """No path is followed at any size: each has steps of its own, as where that fails."""
    from tracer import dynamic_paths

    monkeypatch.setattr(dynamic_paths, "MIN_SIZES", 1 << 30)


@pytest.fixture
def tune():
    """Changes values of `coexec.base.tuning` until the test ends: `tune(max_executables=10)`."""
    from coexec.base.tuning import tuning

    # What was there before the fixtures behind this one, which restore theirs first.
    before, changed = dataclasses.replace(tuning), set()

    def change(**values):
        changed.update(values)
        for name, value in values.items():
            setattr(tuning, name, value)

    yield change
    for name in changed:
        setattr(tuning, name, getattr(before, name))
