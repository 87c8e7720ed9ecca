"""Purity proofs: that all of the program's code that runs inside a call only computes.

By its source, each function that runs must only compute on every path (`tracer.forms`), and call only functions known
to compute, library calls whose effects are observed, and other such functions. What they read is guarded. That
and the arguments determine which functions are called: while they are unchanged, no other ones are.
"""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Callable, Container
from typing import Any

import numpy as np

from coexec.guards.c_functions import is_method_of_array, is_of_numpy
from coexec.guards.pure_calls import BUILTINS, is_computing
from coexec.guards.state import StateGuards
from tracer.errors import Refused
from tracer.forms import Forms, forms_of, not_its_own
from tracer.keras_packages import classes
from tracer.lazy import LazyTensor
from tracer.library import behind, is_pure
from tracer.private import EagerTensor

_BUILTINS = frozenset({*BUILTINS, sorted, callable, iter, issubclass})

# Modules whose functions have no unobservable effects on Python state, besides those that only compute.
_MODULES = (
    "keras.src.ops.", "keras.src.activations.", "keras.src.losses.losses", "keras.src.random.random",
    "tf_keras.src.activations",
    *(f"tensorflow.python.ops.{name}" for name in (
      "array_ops", "bincount_ops", "clip_ops", "embedding_ops", "histogram_ops", "image_ops", "linalg_ops", "math_ops",
      "nn_impl", "nn_ops", "random_ops", "sets_impl", "signal.", "sparse_ops", "special_math_ops",
      "stateless_random_ops")),
)  # fmt: skip
_OTHERWISE = frozenset({
    "recompute_grad", "custom_gradient", "gradients", "map_values", "py_function", "numpy_function"
})  # fmt: skip

# Functions of Keras 2's backend that only compute. Others set its state, or ask for it.
_BACKEND = frozenset(
    """
    abs all any arange argmax argmin batch_dot batch_flatten bias_add binary_crossentropy cast categorical_crossentropy
    clip concatenate constant conv1d conv2d conv2d_transpose conv3d cos cumprod cumsum depthwise_conv2d dot dtype elu
    equal exp expand_dims eye flatten gather greater greater_equal hard_sigmoid int_shape is_sparse l2_normalize less
    less_equal log logsumexp max maximum mean min minimum ndim normalize_batch_in_training not_equal one_hot ones_like
    permute_dimensions pool2d pool3d pow prod relu repeat repeat_elements reshape resize_images reverse round
    separable_conv2d shape sigmoid sign sin softmax softplus softsign sparse_categorical_crossentropy
    spatial_2d_padding sqrt square squeeze stack std stop_gradient sum tanh temporal_padding tile transpose var
    zeros_like
    """.split()  # noqa: SIM905
)

# Functions beside others that do more, by module. What they look at is part of a call's key: settings of Keras and
# Keras 2, and what Keras notes on tensors (`guards/call_key`).
_AMONG_OTHERS = {
    "keras.src.backend.common.masking": ("get_keras_mask",),
    "keras.src.backend.config": ("epsilon", "floatx", "image_data_format"),
    "tensorflow.python.eager.context": ("executing_eagerly",),
    "tf_keras.src.backend_config": ("epsilon", "floatx", "image_data_format"),
}
# Wrappers that TensorFlow generates: each issues one operation, which is followed.
_GENERATED = re.compile(r"tensorflow\.(python|compiler)\.[\w.]+\.gen_\w+_ops")

# Types whose methods only compute, or mutate only the object, which `forms` has checked.
_PLAIN = (list, tuple, dict, str, bytes, int, float, complex, range, EagerTensor, LazyTensor)


# Types of which an operator such as `+=` changes an object in place.
_CHANGED_IN_PLACE = (np.ndarray, list, dict, set, bytearray)


def _is_layer(holder: Any, name: str) -> bool:
    """Returns whether an object's attribute of this name is a layer, such as `self.add = keras.layers.Add()`."""
    return isinstance(getattr(holder, "__dict__", {}).get(name), classes.layers)


def allowed(function: Any) -> bool:
    """Returns whether pure code may call this function of Python or a library."""
    if isinstance(function, types.BuiltinFunctionType):
        holder = function.__self__
        if holder is None or type(holder) is types.ModuleType:
            return function in _BUILTINS or vars(math).get(function.__name__) is function or is_of_numpy(function)
        return isinstance(holder, _PLAIN) or is_method_of_array(function)
    if is_computing(function) or is_of_numpy(function):
        return True
    behind = inspect.unwrap(function)
    name = getattr(behind, "__module__", None) or ""
    if name == "tf_keras.src.backend":
        return behind.__name__ in _BACKEND
    if behind.__name__ in _AMONG_OTHERS.get(name, ()) or _GENERATED.fullmatch(name):
        return True
    return name.startswith(_MODULES) and behind.__name__ not in _OTHERWISE


class PurityProof:
    """The purity proof of one call; `reason` says why it failed."""

    def __init__(self, function: Any, given: list[Any]) -> None:
        self.reason: str | None = None
        self.state_guards = StateGuards(allowed)
        self._given = given  # objects among the arguments
        self._pure = is_pure(function)
        if self._pure:
            self.state_guards.functions[id(function.__code__)] = {id(function): function}
        self._codes: dict[int, Any] = {}  # of the functions that ran, and nested ones
        self._ambiguous: dict[int, frozenset[str]] = {}  # by the ids of those: see `Forms`
        self._augmented: dict[int, frozenset[str]] = {}
        self._methods: set[int] = set()  # ids of those that are methods
        self._noted: set[int] = set()  # ids of functions already guarded
        self._kinds: set[tuple[int, int]] = set()  # ids of codes and classes whose decorated methods were
        # The codes of functions created in the call, with the variables that they share with their makers' codes.
        self._made: dict[int, tuple[Any, tuple[str, ...], Any]] = {}

    def start(self, refuse: Callable[[str], None]) -> None:
        """Does nothing: the observer calls `admits` and `admits_call`."""

    def stop(self) -> None:
        """Does nothing, likewise."""

    suspend = resume = stop

    @property
    def asks(self) -> dict[int, Any]:
        """The codes, by id, for which to call `admits_call`; grows during the call."""
        return self._codes

    @property
    def is_needed(self) -> bool:
        """Whether any of the program's code has run."""
        return bool(self._codes)

    def admits(self, frame: types.FrameType) -> bool:
        """Returns whether a function of the program that is about to run only computes; sets `reason` if not."""
        code = frame.f_code
        try:
            if id(code) not in self._codes:
                forms = forms_of(code, frame.f_globals)
                self._ambiguous[id(code)], self._augmented[id(code)] = forms.ambiguous, forms.augmented
                for function in self._functions_of(frame):
                    self._note(function, forms)
                self._codes.update((id(each), each) for each in forms.codes)
                self._made.update((id(each), (each, shared, code)) for each, shared in forms.made.items())
            elif id(code) in self._made:
                if not self._is_made_here(frame):
                    raise Refused("a function that was made before")
            elif code.co_freevars and (kind := self._decorated(frame)) not in self._kinds:
                self._kinds.add(kind)
                for function in self._functions_of(frame):
                    self._note(function, forms_of(code, frame.f_globals))
            for name in self._augmented.get(id(code), ()):
                if isinstance(frame.f_locals.get(name), _CHANGED_IN_PLACE):
                    raise Refused(f"it changes {name} in place, which it has not made itself")
            for name in self._ambiguous.get(id(code), ()):
                if not _is_layer(frame.f_locals[code.co_varnames[0]], name):
                    raise Refused(not_its_own(name))
            if id(code) in self._methods:
                self.state_guards.add_object(frame.f_locals[code.co_varnames[0]])
        except (Refused, Exception) as refused:  # errors of inspected objects must not reach the program
            self.reason = f"{code.co_name} may do more than compute: {refused}"
            return False
        return True

    @staticmethod
    def _decorated(frame: types.FrameType) -> tuple[int, int]:
        """Returns the ids of the code and of the instance's class: all results of a decorator share one code."""
        code = frame.f_code
        return id(code), id(type(frame.f_locals.get(code.co_varnames[0]))) if code.co_argcount else 0

    def _is_made_here(self, frame: types.FrameType) -> bool:
        """Returns whether a function must have been created in this call, not one of the same code from before.

        That is so if pure code calls it, whose other functions are all guarded, and it shares that code's variables.
        """
        _, shared, maker = self._made[id(frame.f_code)]
        around = frame.f_back
        if around is None or id(around.f_code) not in self._codes:
            return False
        # A comprehension inside of another shares variables of that one, which runs in between.
        wanted = {name: frame.f_locals.get(name, frame) for name in shared}
        while around is not None:
            if wanted and id(around.f_code) in self._codes:
                known = around.f_locals
                found = [name for name in wanted if name in known or around.f_code is maker]
                if any(known.get(name, frame) is not wanted.pop(name) for name in found):
                    return False
            if around.f_code is maker:
                return True
            around = around.f_back
        return not shared

    def admits_call(self, frame: types.FrameType, function: Any) -> bool:
        """Returns whether a frame may call a C function; sets `reason` if not."""
        if id(frame.f_code) not in self._codes or allowed(function) or function is getattr or function is hasattr:
            return True
        self.reason = f"{frame.f_code.co_name} calls {function.__qualname__}"
        return False

    def _note(self, function: Any, forms: Forms) -> None:
        if id(function) in self._noted:
            return
        self._noted.add(id(function))
        state_guards = self.state_guards
        free = function.__code__.co_freevars
        if hidden := sorted(name for name in forms.makers if name in free or name in function.__globals__):
            raise Refused(f"{hidden[0]} is not Python's own")
        state_guards.ask(forms.attributes, forms.optional)
        if forms.formats:
            state_guards.print_numbers()
        if any(chain[-1] == "get_keras_mask" for chain in forms.chains):
            state_guards.ask({"_keras_mask"})  # of a tensor that is kept somewhere
        state_guards.add_function(function)
        for chain in sorted(forms.chains):
            given = forms.positional.get(chain, 0)
            state_guards.add_chain(function, chain, chain in forms.called, chain in forms.classes, given)

    def _functions_of(self, frame: types.FrameType) -> list[Any]:
        """Returns the functions that may be running."""
        code = frame.f_code
        found = list(self.state_guards.functions.get(id(code), {}).values())
        if code.co_argcount:
            for base in type(frame.f_locals.get(code.co_varnames[0])).__mro__:
                for name, value in vars(base).items():  # a decorated method goes by its name in the class
                    method = _plain(value)
                    if type(method) is types.FunctionType and method.__code__ is code:
                        self._methods.add(id(code))
                        self.state_guards.ask({name})
                        found.append(method)
        if not found:  # perhaps a function held by an object
            self.state_guards.look_further()
            found = list(self.state_guards.functions.get(id(code), {}).values())
        if not found:
            raise Refused("it cannot be guarded")
        return found

    effects: tuple[Any, ...] = ()  # what has changed: nothing, as the source shows

    def end(self, ran: Container[int]) -> tuple[StateGuards, list[Any], list[Any]]:
        """Returns the guards of what the functions have read, and the variables and Keras objects among that.

        Args:
          ran: the ids of all code that ran.

        Raises:
          Refused: if something cannot be guarded.
        """
        try:
            self._look_at_all()
            self.state_guards.refuse_code_of_libraries(ran)
            self.state_guards.refuse_calls(ran)
            return self.state_guards, *self.state_guards.finish()
        except Refused:
            raise
        except Exception as error:  # as above
            raise Refused(f"{type(error).__name__} where its objects are looked at") from error

    def _look_at_all(self) -> None:
        state_guards = self.state_guards
        for value in self._given if self._pure else ():
            state_guards.add_object(value)
        state_guards.look_further()
        while more := [f for code, known in state_guards.functions.items() if code in self._codes
                       for f in known.values() if id(f) not in self._noted]:  # fmt: skip
            for function in more:
                self._note(function, forms_of(function.__code__, function.__globals__))
            state_guards.look_further()


def _plain(found: Any) -> Any:
    if isinstance(found, (staticmethod, classmethod)):
        return found.__func__
    found = found.fget if isinstance(found, property) else found
    return behind(found) if isinstance(found, types.FunctionType) else found


Contents = dict[int, tuple[int, ...]]


def containers_in(value: Any, found: Contents | None = None) -> Contents:
    """Returns the lists, tuples and dicts among arguments by id, with the ids of their items."""
    found = {} if found is None else found
    if isinstance(value, (list, tuple, dict)) and id(value) not in found:
        items = list(value.values()) if isinstance(value, dict) else list(value)
        found[id(value)] = tuple(map(id, items))
        for item in items:
            containers_in(item, found)
    return found


def is_shared(result: Any, given: Contents) -> bool:
    """Returns whether a result holds a container twice, or one passed as an argument: a skipped call would copy it."""
    seen: set[int] = set()

    def shared(value: Any) -> bool:
        if not isinstance(value, (list, tuple, dict)):
            return False
        if value and (id(value) in given or id(value) in seen):
            return True
        seen.add(id(value))
        return any(map(shared, value.values() if isinstance(value, dict) else value))

    return shared(result)
