"""Private: the parts of TensorFlow that are not public, brought in through this one door.

Relies on TensorFlow 2.21; `tests/tracer/test_private.py` pins what each part must do, and fails first when it changes.

* `pywrap_tfe`: the entry points of the eager runtime, looked up as module attributes on each use (see `intercept`).
* `context`, `core`, `record`, `ops`: the eager context and its device name, the exceptions of the fast path, whether
  tapes record, `EagerTensor` and the class behind its methods.
* `constant_op.convert_to_eager_tensor`: makes tensors of Python values.
* `op_def_registry`: the definitions of operations.
* `node_def_pb2`, `op_def_library.value_to_attr_value`: an operation written down.
* `func_graph`, `ops._create_c_op`, `handle_data_util`, `cpp_shape_inference_pb2`: a graph to ask shape functions in, an
  operation added to it, and what is behind a resource there.
* `function_pb2`, `Context.add_function_def`: a function's definition, written node by node; in it
  `XlaOptimizationBarrier` hides a constant from XLA's simplifier.
* `global_state`: Keras' scopes and policies, by thread.
* `is_op_determinism_enabled`: whether runs are to be equal to the bit.
* `is_resource_variable`, `CompositeTensor`: what C++ would convert out of sight.
"""

from keras.src.backend.common import global_state
from tensorflow.core.framework import function_pb2, node_def_pb2, tensor_shape_pb2, types_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, core, record
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
from tensorflow.python.ops import handle_data_util
from tensorflow.python.ops.resource_variable_ops import is_resource_variable

EagerTensor = ops.EagerTensor

__all__ = [
    "CompositeTensor", "EagerTensor", "config_pb2", "constant_op", "context", "core",
    "cpp_shape_inference_pb2", "func_graph", "function_pb2", "global_state", "handle_data_util",
    "is_op_determinism_enabled", "is_resource_variable", "node_def_pb2",
    "op_def_library", "op_def_registry", "ops", "pywrap_tfe", "record", "tensor_shape_pb2", "types_pb2",
]  # fmt: skip
