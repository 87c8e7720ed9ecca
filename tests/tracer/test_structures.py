"""TensorFlow's helpers for structures: in a followed call they give, or raise, what they do outside of one."""

import collections
import sys
import types

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.types.core import Tensor as core_types
from tensorflow.python.types.internal import NativeObject as internal

import coexec
from tests.tracer import unhooked
from tracer import intercept, structures
from tracer.private import nest, nest_util, tensor_util, tf_module
from tracer.recorder import Recorder
from tracer.trace import Trace

X = tf.constant([1.0, 2.0])
V = tf.Variable([3.0, 4.0])
Pair = collections.namedtuple("Pair", "a b")
RAGGED = tf.ragged.constant([[1, 2], [3]])


class Flat:
    """What flattens itself by `CustomNestProtocol`."""

    def __init__(self, *items):
        self.items = items

    def __tf_flatten__(self):
        return (), self.items

    def __tf_unflatten__(self, metadata, components):
        return Flat(*components)

    def __eq__(self, other):
        return type(other) is Flat and self.items == other.items

    def __repr__(self):
        return f"Flat{self.items}"

    __hash__ = None


class Like:
    def is_tensor_like(self):
        return True


class Unlike:
    is_tensor_like = None


class Computed:
    """An object that has any attribute that is asked for, and notes which."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        if name == "asked":
            raise AttributeError(name)
        self.asked.append(name)
        return name


class Failing:
    def __getattr__(self, name):
        raise KeyError(name)


class Pretending:
    __class__ = property(lambda self: Like)


def with_method(value):
    value.is_tensor_like = lambda: True
    return value


VALUES = [
    5, 1.5, True, None, "text", b"bytes", 1j, np.ones(2), np.float32(1), X, V, RAGGED, tf.float32, X.shape, len,
    Pair(1, 2), [], (), {}, [1, 2], (1, [2, (3,)]), {"b": 1, "a": [2]}, {"a": X, 2: 3}, [Pair(1, 2)], {1, 2}, range(3),
    [None],
    collections.OrderedDict(b=1, a=2), collections.defaultdict(list, a=[1]), {"a": 1}.values(), Flat(1, 2), [Flat(3)],
    types.SimpleNamespace(is_tensor_like=None), with_method(types.SimpleNamespace()), Like(), Unlike(), Like,
    Pretending(), [RAGGED, 1], tf.TensorSpec([2]), object(), tf.Module(), [tf.Module()], Computed(), Failing(),
    [Failing()],
]  # fmt: skip


def outcome(call):
    """What a call returns, or what it raises."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def same(one, other):
    """Whether two outcomes are equal, with the same objects as leaves."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or (isinstance(one, (str, int, float, bool, Flat)) and one == other)


@pytest.fixture
def replaced():
    """The functions as they are while a call is followed."""
    intercept.hold()
    with intercept.handling(Recorder(Trace())):
        yield
    intercept.release()


structures.install()
ORIGINALS = {
    "paths": structures._flatten_with_paths,
    "map": structures._map_structure,
    "up to": structures._map_up_to,
    "module": structures._flatten_module,
}
REPLACEMENTS = {
    "paths": structures.flatten_with_tuple_paths,
    "map": structures.map_structure,
    "up to": structures.map_structure_up_to,
    "module": structures.flatten_module,
}


def outcomes(which, *args, **kwargs):
    """What a replacement does with these arguments, and what the original does."""
    walk = list if which == "module" else lambda found: found
    calls = REPLACEMENTS[which], ORIGINALS[which]
    return [outcome(lambda function=function: walk(function(*args, **kwargs))) for function in calls]


def test_the_functions_are_replaced_while_calls_are_followed(replaced):
    assert nest.flatten_with_tuple_paths is REPLACEMENTS["paths"]
    assert nest_util._tf_core_map_structure is REPLACEMENTS["map"]
    assert nest_util._tf_core_map_structure_with_tuple_paths_up_to is REPLACEMENTS["up to"]
    assert tf_module._flatten_module is REPLACEMENTS["module"]
    with unhooked():
        assert nest.flatten_with_tuple_paths is ORIGINALS["paths"]
        assert tensor_util.tf_type_classes[-1] is tensor_util.IsTensorLike


@pytest.mark.parametrize("expands", [False, True])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_paths_of_leaves(value, expands, replaced):
    assert same(*outcomes("paths", value, expands))


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_mapping(value, replaced):
    def function(*leaves):
        if leaves[0] == 2 or leaves[0] is None:
            raise ValueError("of the function")
        return leaves

    def fine(*leaves):
        return leaves

    for arguments in ((fine, value), (function, value), (function, value, value), (function, value, 7)):
        assert same(*outcomes("map", *arguments))
    for kwargs in ({}, {"check_types": False}, {"expand_composites": True}):
        for arguments in ((value, fine, value), (3, function, value, value), (value, function, value)):
            assert same(*outcomes("up to", *arguments, **kwargs))


def test_mapping_by_what_is_no_function_and_over_nothing(replaced):
    for arguments in ((None, 1), (len,), (len, [1]), (len, "word")):
        assert same(*outcomes("map", *arguments))


@pytest.mark.parametrize("change", [list.pop, lambda items: items.append(9), lambda items: items.insert(0, [1, 2])])
def test_a_function_that_changes_what_it_is_mapped_over(change, replaced):
    def result(original):
        items, changed = [1, 2, 3], []

        def function(leaf):
            if not changed:
                changed.append(change(items))
            return leaf

        return outcome(lambda: original(function, items))

    assert same(result(REPLACEMENTS["map"]), result(ORIGINALS["map"]))


PYTHON_IS_FAST = pytest.mark.skipif(sys.version_info >= (3, 12), reason="not replaced: Python's own checks are fast")


@PYTHON_IS_FAST
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_instances_of_protocols(value, replaced):
    nested = vars(sys.modules["tensorflow.python.util.custom_nest_protocol"])["CustomNestProtocol"]
    assert isinstance(nest_util.CustomNestProtocol, structures.Protocol)
    for kinds, check in (
        ((internal, core_types, tensor_util.IsTensorLike), tensor_util.tf_type_classes),
        (nested, nest_util.CustomNestProtocol),
    ):
        answers, asked = [], []
        for kind in (kinds, check):
            answers.append(outcome(lambda kind=kind: isinstance(value, kind)))
            if isinstance(value, Computed):
                asked.append(tuple(value.asked))
                value.asked.clear()
        assert answers[0] == answers[1]
        assert not asked or asked[0] == asked[1]
    with intercept.handling(None):
        assert tf.is_tensor([]) is False


@PYTHON_IS_FAST
def test_an_attribute_that_comes_and_goes(replaced):
    def answers():
        class Kind:
            pass

        value, found = Kind(), []
        for change in (
            lambda: None,
            lambda: setattr(Kind, "is_tensor_like", lambda self: True),
            lambda: setattr(value, "is_tensor_like", None),
            lambda: delattr(value, "is_tensor_like"),
            lambda: delattr(Kind, "is_tensor_like"),
        ):
            change()
            found.append(tf.is_tensor(value))
        return found

    here = answers()
    with intercept.handling(None):
        assert here == answers()
    assert True in here
    assert False in here


class Inner(tf.Module):
    def __init__(self):
        super().__init__()
        self.kernel = tf.Variable(1.0)
        self.fixed = tf.Variable(2.0, trainable=False)
        self.number, self.text, self.items = 3, "four", (5, [6, {"a": V}])


class Outer(tf.Module):
    _TF_MODULE_IGNORED_PROPERTIES = frozenset({"hidden", *tf.Module._TF_MODULE_IGNORED_PROPERTIES})

    def __init__(self):
        super().__init__()
        self.first, self.second = Inner(), Inner()
        self.again = [self.first, (self.second,)]
        self.first.parent = self
        self.hidden = tf.Variable(7.0)
        self.ragged, self.tensor, self.flat = RAGGED, X, Flat(V)
        self.by_name = {"b": tf.Variable(8.0), "a": Inner()}


@pytest.mark.parametrize("with_path", [False, True])
@pytest.mark.parametrize("expands", [False, True])
@pytest.mark.parametrize("recursive", [False, True])
def test_what_a_module_holds(with_path, expands, recursive, replaced):
    module = Outer()
    for predicate in (lambda leaf: True, tf_module._is_trainable_variable, tf_module._is_module):
        for key in (None, lambda name: name[::-1]):
            ignored = module._TF_MODULE_IGNORED_PROPERTIES
            found, wanted = outcomes("module", module, recursive, predicate, key, ignored, with_path, expands)
            assert wanted
            assert len(found) == len(wanted)
            assert all(same(one, other) or np.all(one == other) for one, other in zip(found, wanted, strict=True))


def test_a_module_that_changes_while_it_is_walked(replaced):
    def walk(function):
        module, found = Outer(), []
        for leaf in function(module, True, tf_module._is_variable, None, (), True, False):
            found.append(leaf[0])
            module.first.added = tf.Variable(0.0)
            module.second.__dict__.pop("kernel", None)
        return found

    assert walk(REPLACEMENTS["module"]) == walk(ORIGINALS["module"])
    assert any("added" in path for path in walk(REPLACEMENTS["module"]))


def test_errors_of_modules_and_predicates(replaced):
    module = tf.Module()
    module.mixed = {1: 2}
    module.mixed.update(a=3)
    for predicate in (lambda leaf: True, lambda leaf: leaf.missing):
        found, wanted = outcomes("module", module, True, predicate, None, frozenset(), False, True)
        assert isinstance(wanted, tuple)
        assert found == wanted


def test_a_step_that_asks_modules_is_followed_and_sees_what_changes():
    module = Outer()

    @coexec.function
    def step(x):
        shapes = tf.nest.map_structure(lambda t: t * 2.0, [x, x])
        names = nest.flatten_with_tuple_paths({"a": shapes, "b": 1})
        return tf.add_n([v * tf.reduce_sum(x) for v in module.trainable_variables if v.shape == ()]), len(names)

    def eager():
        with coexec.imperative():
            return step(X)

    for _ in range(6):
        assert float(step(X)[0]) == float(eager()[0])
        assert step(X)[1] == 3
    assert step.stats().followed >= 8
    assert step.stats().diverged <= 1
    module.second.more = tf.Variable(10.0)
    assert float(step(X)[0]) == float(eager()[0])
    del module.first.kernel
    module.first.fixed._trainable = True
    for _ in range(3):
        assert float(step(X)[0]) == float(eager()[0])
