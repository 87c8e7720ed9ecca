"""Private: the only module that imports non-public parts of TensorFlow and Keras.

Relies on what `versions.TESTED` have in common; `tests/tracer/test_private.py` pins what each part must do, and fails
first when it changes. What they do not have in common stands in `versions`.

* `pywrap_tfe`: the entry points of the eager runtime, looked up as module attributes on each use (see `intercept`).
* `context`, `core`, `record`, `ops`: the eager context and its device name, the exceptions of the fast path, whether
  tapes record, `EagerTensor` and its base class.
* `context.internal_operation_seed`, `context.global_seed`: the seeds of operations without one.
* `constant_op.convert_to_eager_tensor`: converts Python values to tensors.
* `op_def_registry`: the definitions of operations.
* `node_def_pb2`, `op_def_library.value_to_attr_value`: an operation as a `NodeDef`.
* `func_graph`, `ops._create_c_op`, `handle_data_util`, `cpp_shape_inference_pb2`: a graph that runs shape functions, an
  operation added to it, and the handle data of a resource there.
* `function_pb2`, `Context.add_function_def`: a function definition, built node by node; `XlaOptimizationBarrier` in it
  hides a constant from XLA's simplifier.
* `global_state`: Keras' thread-local scopes and policies, and its random state (`global_seed_generator`).
* `keras_losses.scale_loss_for_distribution`, `unscale_loss_for_distribution`: looked up on each use, they divide and
  multiply losses by the number of replicas.
* `custom_objects`: what the program has registered for names that Keras looks up.
* `KerasFunctional`: the class of functional models, whose `call` first converts arrays to the dtypes of the symbolic
  inputs in `_inputs_struct` (to integers without a dtype, with a cast).
* `KerasNode`: a call in the graph of a functional model, which keeps its `arguments`; `keras_tracking`: the lists,
  dicts and sets by which Keras replaces a layer's, and the `Tracker` that they notify of additions.
* `context.anonymous_name`: each `VarHandleOp` of that name makes its own variable, which dies with its handle.
* `Context._rng`: the generator of seeds for operations without one, after `tf.random.set_seed`.
* `binary_assert`, `plain_assert`: what every value assertion of `tf.debugging` ends in: each tests the truth of one
  tensor, its local `condition`, and raises if it is false.
* `AtomicFunction`: a graph function that is registered; its `call_flat` issues the calls, and `function_type` has specs
  of the results. `InterpolateRuntimeError`: what completes a call's error, at the end of its `with`.
* `gradient_code`: the code in which TensorFlow calls an operation's gradient function; its local `op_name` is the op.
* `GradientRegistry`: the class of `ops.gradient_registry`, whose `lookup` that code calls; the gradient function of
  `StridedSlice` passes on the values of its positions, and does nothing else with them.
* `inject_argument_info`, `code_inside`: the wrapper in which a layer runs its `call`, and which adds the call's
  arguments to an error; and its code, whose frame has the locals `fn`, `object_name`, `args` and `kwargs`.
* `_EagerTensorCache.put`: the tensor cache of gradient functions.
* `Context._thread_local_data`, `Context._seed`, `keras_config._EPSILON`, `_FLOATX`, `_IMAGE_DATA_FORMAT`: what
  `tf.executing_eagerly`, the device in scope, `tf.random.set_seed` and `keras.config` report, without their calls.
* `Graph._distribution_strategy_stack`: the strategies in scope.
* `Context._initialized`, `Context._context_devices`: whether TensorFlow has discovered its devices, as it does for its
  first operation, and which.
* `kernels.get_registered_kernels_for_op`: the kernels of an operation; oneDNN's have its name behind `_Mkl`.
* `TFE_ContextSetRunEagerOpAsFunction`: a switch of the context, whose pointer is in the capsule `Context._handle`.
* `Context.get_compiler_ir`: XLA's program for a registered function, given arguments, by stage.
* `is_op_determinism_enabled`: whether runs must be bitwise reproducible.
* `pywrap_tf_session`: TensorFlow reads `TF_XLA_FLAGS` once, when one of those flags is first queried.
* Abseil's `SetMinLogLevel`, exported by TensorFlow's library: the level from which C++ messages are printed.
* `Model._initial_epoch`: the epoch at which Keras' `BackupAndRestore` resumes training.
* `Trackable._serialize_to_tensors`, `_LEGACY_SAVEABLE_NAME`: what `tf.train.Checkpoint` writes of an object, and under
  which name.
* `is_resource_variable`, `CompositeTensor`: what C++ would convert past the hooks.
* `ResourceVariable`, `variable_accessed`: what `tf.Variable(...)` makes, how it is read, and how tapes are notified.
* `gen_resource_variable_ops`: the operations issued by a variable's writing methods; `_lazy_read`: what those return,
  an `UnreadVariable`, whose constructor takes what it keeps in fields of the same names.
* `KerasVariable`: the class whose operators call functions of `keras_numpy` on its `_value`, a `tf.Variable`, which its
  `assign` writes; all check `global_state` for an `autocast_scope` and a `stateless_scope`.
* `DatasetV2._functions`, `_inputs`: the functions that a dataset runs, and its input datasets.
* `nest`, `nest_util`, `tf_module`, `tensor_util`: helpers that look each other up as module attributes on each use;
  `tensor_util.tf_type_classes`, of which the last is a protocol of methods, as `nest_util.CustomNestProtocol` is.
* `FuncRegistry`: kernels of `py_function` and `numpy_function` call its single instance with a token, a device and
  arguments; the result must be eager tensors or arrays, by exact type.
"""

import contextlib
import ctypes
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras.src.backend import config as keras_config
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import Variable as KerasVariable
from keras.src.backend.tensorflow import numpy as keras_numpy
from keras.src.losses import loss as keras_losses
from keras.src.models.functional import Functional as KerasFunctional
from keras.src.ops.node import Node as KerasNode
from keras.src.saving.object_registration import GLOBAL_CUSTOM_OBJECTS as custom_objects
from keras.src.utils import tracking as keras_tracking
from keras.src.utils.traceback_utils import inject_argument_info_in_traceback as inject_argument_info
from tensorflow.core.framework import function_pb2, node_def_pb2, tensor_shape_pb2, types_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.eager import backprop, context, core, record
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction, InterpolateRuntimeError
from tensorflow.python.framework import (
    constant_op,
    cpp_shape_inference_pb2,
    func_graph,
    kernels,
    op_def_library,
    op_def_registry,
    ops,
    tensor_util,
)
from tensorflow.python.framework.composite_tensor import CompositeTensor
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.module import module as tf_module
from tensorflow.python.ops import check_ops, control_flow_assert, gen_resource_variable_ops, handle_data_util
from tensorflow.python.ops.resource_variable_ops import ResourceVariable, is_resource_variable, variable_accessed
from tensorflow.python.ops.resource_variable_ops import _UnreadVariable as UnreadVariable
from tensorflow.python.ops.script_ops import FuncRegistry
from tensorflow.python.trackable.base import Trackable
from tensorflow.python.util import nest, nest_util
from tensorflow.python.util._pywrap_utils import IsNested as is_nested
from tensorflow.python.util._pywrap_utils import IsNestedOrComposite as is_nested_or_composite

from tracer import hooks
from tracer.versions import ABSEIL, present

EagerTensor = ops.EagerTensor
gradient_code = backprop._gradient_function.__code__
GradientRegistry = type(ops.gradient_registry)
binary_assert = check_ops._binary_assert
plain_assert = inspect.unwrap(control_flow_assert.Assert)

__all__ = [
    "AtomicFunction", "CompositeTensor", "EagerTensor", "FuncRegistry", "GradientRegistry", "InterpolateRuntimeError",
    "KerasFunctional", "KerasNode", "KerasVariable", "ResourceVariable", "Trackable", "UnreadVariable",
    "binary_assert", "code_inside", "compiler_ir_of", "config_pb2", "constant_op", "context", "core",
    "cpp_shape_inference_pb2", "custom_objects", "func_graph", "function_pb2", "functions_of_dataset",
    "gen_resource_variable_ops",
    "global_state", "gradient_code", "handle_data_util", "inject_argument_info", "is_nested",
    "is_nested_or_composite", "is_op_determinism_enabled", "is_resource_variable", "keras_config", "keras_losses",
    "keras_numpy", "keras_tracking", "kernels_of", "nest", "nest_util", "node_def_pb2", "op_as_function_switch",
    "op_def_library", "op_def_registry", "ops",
    "plain_assert", "pywrap_tf_session", "pywrap_tfe", "quiet", "record", "tensor_shape_pb2", "tensor_util",
    "tf_module", "types_pb2", "variable_accessed",
]  # fmt: skip

_FATAL = 3


def code_inside(inject: Any) -> Any:
    """Returns the code of the function that `inject_argument_info_in_traceback` returns."""
    return next(c for c in inject.__code__.co_consts if inspect.iscode(c))


_quiet_lock = threading.Lock()
_quiet_depth = 0
_level = 0


def _levels() -> tuple[Any, Any]:
    library = ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2"))
    level, set_level = (getattr(library, present(library, *names)[0]) for names in ABSEIL)
    return level, set_level


def _begin_in_child() -> None:
    """Resets state in a forked child, where no other thread exists to leave its `quiet` block."""
    global _quiet_depth
    if _quiet_depth:
        _quiet_depth = 0
        _levels()[1](_level)
    _quiet_lock.release()


hooks.at_fork(
    __name__, "what C++ logs is logged again in the child", _quiet_lock.acquire, _quiet_lock.release, _begin_in_child
)
hooks.Hooks(
    __name__,
    "Abseil's `SetMinLogLevel`",
    "errors that are expected and handled are not printed",
    "XLA loads code that an earlier process has compiled",
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses what C++ logs below the fatal level, on all threads, for the duration of the `with`."""
    global _quiet_depth, _level
    try:
        level, set_level = _levels()
    except (OSError, IndexError):  # another build of TensorFlow: the messages are printed
        yield
        return
    with _quiet_lock:
        _quiet_depth += 1
        if _quiet_depth == 1:
            _level = level()
            set_level(max(_level, _FATAL))
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_depth -= 1
            if _quiet_depth == 0:
                set_level(_level)


def functions_of_dataset(dataset: Any) -> list[Any]:
    """Returns the functions that a dataset and its inputs run for their elements, recursively."""
    found = [wrapper.function for wrapper in dataset._functions()]
    return found + [function for part in dataset._inputs() for function in functions_of_dataset(part)]


def op_as_function_switch(ctx: Any) -> tuple[Callable[[], None], Callable[[], None]] | None:
    """Returns what has an eager context run each operation as a function no longer, and again; None in another build.

    Both are C functions with their arguments: neither a signal nor a deep stack comes between a call and its effect.
    """
    try:
        library = ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), "libtensorflow_cc.so.2"))
        switch, status = library.TFE_ContextSetRunEagerOpAsFunction, library.TF_NewStatus
    except (OSError, AttributeError):
        return None
    pointer, name = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_GetName
    status.restype = pointer.restype = ctypes.c_void_p
    name.restype = ctypes.c_char_p
    switch.restype = None
    capsule = ctypes.py_object(ctx._handle)
    where, ok = ctypes.c_void_p(pointer(capsule, ctypes.c_char_p(name(capsule)))), ctypes.c_void_p(status())
    off, on = (functools.partial(switch, where, ctypes.c_ubyte(value), ok) for value in (0, 1))
    return off, on


def kernels_of(op: str) -> list[Any]:
    """Returns the definitions of the kernels that are registered for an operation."""
    return list(kernels.get_registered_kernels_for_op(op).kernel)


def compiler_ir_of(ctx: Any, name: str, given: list[Any], stage: str) -> str:
    """Returns XLA's program for a registered function and arguments of these shapes; `stage` is one of TensorFlow's.

    Raises `NotImplementedError` for a stage that this version does not print.
    """
    device = ctx.device_name or tf.zeros([]).device
    try:
        text: bytes = ctx.get_compiler_ir(device, None, name, given, [], stage)
    except ValueError as error:
        if not str(error).startswith("Invalid stage"):
            raise
        raise NotImplementedError(f"TensorFlow {tf.__version__} does not print it: {error}") from error
    return text.decode()
