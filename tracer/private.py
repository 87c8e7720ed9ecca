"""Private: the parts of TensorFlow that are not public, brought in through this one door.

Relies on TensorFlow 2.21; `tests/tracer/test_private.py` pins what each part must do, and fails first when it changes.

* `pywrap_tfe`: the entry points of the eager runtime, looked up as module attributes on each use (see `intercept`).
* `context`, `core`, `record`, `ops`: the eager context and its device name, the exceptions of the fast path, whether
  tapes record, `EagerTensor` and the class behind its methods.
* `constant_op.convert_to_eager_tensor`: makes tensors of Python values.
* `op_def_registry`, `op_def_library._apply_op_helper`: definitions of operations; an operation added to a graph by the
  names in its definition.
* `func_graph`, `handle_data_util`, `cpp_shape_inference_pb2`: a function's graph, and what is behind a resource in it.
* `pywrap_tf_session`: `TF_GraphToFunction_wrapper`, `TF_FunctionSetAttrValueProto`, `TF_DeleteFunction`.
* `gen_xla_ops.xla_optimization_barrier`: hides a constant from XLA's simplifier.
* `global_state`: Keras' scopes and policies, by thread.
* `is_resource_variable`, `CompositeTensor`: what C++ would convert out of sight.
"""

from keras.src.backend.common import global_state
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.core.framework import attr_value_pb2, tensor_shape_pb2, types_pb2
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session
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
from tensorflow.python.ops import handle_data_util
from tensorflow.python.ops.resource_variable_ops import is_resource_variable

EagerTensor = ops.EagerTensor

__all__ = [
    "CompositeTensor", "EagerTensor", "attr_value_pb2", "config_pb2", "constant_op", "context", "core",
    "cpp_shape_inference_pb2", "func_graph", "gen_xla_ops", "global_state", "handle_data_util", "is_resource_variable",
    "op_def_library", "op_def_registry", "ops", "pywrap_tf_session", "pywrap_tfe", "record",
    "rewriter_config_pb2", "tensor_shape_pb2", "types_pb2",
]  # fmt: skip
