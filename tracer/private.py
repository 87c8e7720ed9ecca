"""Private: the parts of TensorFlow that are not public, brought in through this one door.

Relies on TensorFlow 2.21; `tests/tracer/test_private.py` pins what each part must do, and fails first when it changes.

* `pywrap_tfe`: the entry points of the eager runtime, looked up as module attributes on each use (see `intercept`).
* `context`, `core`, `record`, `ops`: the eager context and its device name, the exceptions of the fast path, whether
  tapes record, `EagerTensor` and the class behind its methods.
* `context.internal_operation_seed`, `context.global_seed`: the seeds of operations that are given none.
* `constant_op.convert_to_eager_tensor`: makes tensors of Python values.
* `op_def_registry`: the definitions of operations.
* `node_def_pb2`, `op_def_library.value_to_attr_value`: an operation written down.
* `func_graph`, `ops._create_c_op`, `handle_data_util`, `cpp_shape_inference_pb2`: a graph to ask shape functions in, an
  operation added to it, and what is behind a resource there.
* `function_pb2`, `Context.add_function_def`: a function's definition, written node by node; in it
  `XlaOptimizationBarrier` hides a constant from XLA's simplifier.
* `global_state`: Keras' scopes and policies, by thread, and its random numbers (`global_seed_generator`).
* `keras_losses.scale_loss_for_distribution`, `unscale_loss_for_distribution`: looked up on each use, they divide and
  multiply losses by the number of replicas.
* `context.anonymous_name`: under that name each `VarHandleOp` makes a variable of its own, which ends with its handle.
* `Context._rng`: where the seeds of operations without one of their own come from, after `tf.random.set_seed`.
* `binary_assert`, `plain_assert`: what every assertion of `tf.debugging` that looks at values ends in: each asks one
  tensor, which it calls `condition`, for its truth, and raises where that does not hold.
* `gradient_code`: the code in which TensorFlow asks for an operation's gradient, which it knows as `op_name`.
* `inject_argument_info`, `injecting_code`: what a layer runs its `call` in, which writes into an error how that was
  called, and its code, whose frame has the names `fn`, `object_name`, `args` and `kwargs`.
* `_EagerTensorCache.put`: where gradient functions keep tensors for the next time.
* `Context._thread_local_data`, `Context._seed`, `keras_config._EPSILON`, `_FLOATX`, `_IMAGE_DATA_FORMAT`: what
  `tf.executing_eagerly`, the device in scope, `tf.random.set_seed` and `keras.config` tell, without the calls.
* `Graph._distribution_strategy_stack`: the strategies in scope.
* `Context._initialized`, `Context._context_devices`: whether TensorFlow has looked for devices, as it does with its
  first operation, and what it has found.
* `is_op_determinism_enabled`: whether runs are to be equal to the bit.
* `pywrap_tf_session`: TensorFlow reads `TF_XLA_FLAGS` when one of them is asked for, and never again.
* `SetMinLogLevel` of Abseil, as TensorFlow's library exports it: what of C++'s messages is printed.
* `Model._initial_epoch`: where Keras' `BackupAndRestore` says that training goes on.
* `Trackable._serialize_to_tensors`, `_LEGACY_SAVEABLE_NAME`: what `tf.train.Checkpoint` writes of an object, and how it
  calls that.
* `is_resource_variable`, `CompositeTensor`: what C++ would convert out of sight.
* `ResourceVariable`, `variable_accessed`: what `tf.Variable(...)` makes, how it is read, and how tapes hear of that.
* `DatasetV2._functions`, `_inputs`: what a dataset runs, and what it is made of.
"""

import contextlib
import ctypes
import inspect
import os
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from keras.src.backend import config as keras_config
from keras.src.backend.common import global_state
from keras.src.losses import loss as keras_losses
from keras.src.utils.traceback_utils import inject_argument_info_in_traceback as inject_argument_info
from tensorflow.core.framework import function_pb2, node_def_pb2, tensor_shape_pb2, types_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.eager import backprop, context, core, record
from tensorflow.python.framework import (
    constant_op,
    cpp_shape_inference_pb2,
    func_graph,
    op_def_library,
    op_def_registry,
    ops,
)
from tensorflow.python.framework.composite_tensor import CompositeTensor
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.ops import check_ops, control_flow_assert, handle_data_util
from tensorflow.python.ops.resource_variable_ops import ResourceVariable, is_resource_variable, variable_accessed
from tensorflow.python.trackable.base import Trackable

EagerTensor = ops.EagerTensor
gradient_code = backprop._gradient_function.__code__
binary_assert = check_ops._binary_assert
plain_assert = inspect.unwrap(control_flow_assert.Assert)
injecting_code = next(c for c in inject_argument_info.__code__.co_consts if inspect.iscode(c))

__all__ = [
    "CompositeTensor", "EagerTensor", "ResourceVariable", "Trackable", "binary_assert", "config_pb2", "constant_op",
    "context", "core", "cpp_shape_inference_pb2", "func_graph", "function_pb2", "functions_of_dataset",
    "global_state", "gradient_code", "handle_data_util", "inject_argument_info", "injecting_code",
    "is_op_determinism_enabled", "is_resource_variable", "keras_config", "keras_losses", "node_def_pb2",
    "op_def_library", "op_def_registry", "ops", "plain_assert", "pywrap_tf_session", "pywrap_tfe", "quiet", "record",
    "tensor_shape_pb2", "types_pb2", "variable_accessed",
]  # fmt: skip

_ABSEIL = "_ZN4absl12lts_2025081411MinLogLevelEv", "_ZN4absl12lts_2025081414SetMinLogLevelENS0_18LogSeverityAtLeastE"
_FATAL = 3
_quiet_lock = threading.Lock()
_quiet_depth = 0
_level = 0


def _levels() -> tuple[Any, Any]:
    library = ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2"))
    level, set_level = (getattr(library, name) for name in _ABSEIL)
    return level, set_level


def _begin_in_child() -> None:
    """In a forked process no other thread goes on, nor would end what it has begun."""
    global _quiet_depth
    if _quiet_depth:
        _quiet_depth = 0
        _levels()[1](_level)
    _quiet_lock.release()


os.register_at_fork(before=_quiet_lock.acquire, after_in_parent=_quiet_lock.release, after_in_child=_begin_in_child)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps errors that C++ logs, and does not raise, from being printed meanwhile, of any thread."""
    global _quiet_depth, _level
    try:
        level, set_level = _levels()
    except (OSError, AttributeError):  # another build: they are printed, then
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
    """Returns the functions that a dataset, and those that it is made of, run for their elements."""
    found = [wrapper.function for wrapper in dataset._functions()]
    return found + [function for part in dataset._inputs() for function in functions_of_dataset(part)]
