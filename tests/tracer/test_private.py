"""TensorFlow's private parts: what each must be and do. An upgrade that changes one fails here first, by name."""

import dis
import inspect
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tracer import private
from tracer.lazy import LazyTensor
from tracer.private import (
    CompositeTensor,
    EagerTensor,
    config_pb2,
    constant_op,
    context,
    core,
    cpp_shape_inference_pb2,
    func_graph,
    function_pb2,
    handle_data_util,
    is_resource_variable,
    op_def_library,
    op_def_registry,
    ops,
    pywrap_tfe,
    record,
    tensor_shape_pb2,
    types_pb2,
)

X = tf.constant([1.0, 2.0])
FLOAT, INT32 = types_pb2.DT_FLOAT, types_pb2.DT_INT32


def test_every_name_is_there():
    """All parts that `private` promises can be imported."""
    assert all(getattr(private, name, None) is not None for name in private.__all__)


# pywrap_tfe: looked up as module attributes on each use.


def recorded(monkeypatch, name):
    """Replaces an entry point by one that notes its arguments, and returns the notes."""
    calls, original = [], getattr(pywrap_tfe, name)

    def noting(*arguments):
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(pywrap_tfe, name, noting)
    return calls


def test_generated_wrappers_look_up_the_fast_path(monkeypatch):
    """A wrapper calls `pywrap_tfe.TFE_Py_FastPathExecute(ctx, op, name, *inputs, *attrs)` by its attribute."""
    calls = recorded(monkeypatch, "TFE_Py_FastPathExecute")
    tf.raw_ops.MatMul(a=X[None], b=X[:, None], transpose_a=False, transpose_b=False, name="product")
    ctx, op, name, a, b, *attrs = calls[-1]
    assert (ctx, op, name) == (context.context(), "MatMul", "product")
    assert (type(a), type(b)) == (EagerTensor, EagerTensor)
    assert attrs[:4] == ["transpose_a", False, "transpose_b", False]


def test_python_values_reach_the_fast_path_as_they_are(monkeypatch):
    """`x * 2.0` passes a Python number or a tensor of it; the registered conversion is no other entry point."""
    calls = recorded(monkeypatch, "TFE_Py_FastPathExecute")
    assert (X * 2.0).numpy().tolist() == [2.0, 4.0]
    assert [c[1] for c in calls] == ["Mul"]
    tf.concat([X, X], 0)
    assert calls[-1][1] == "ConcatV2"
    assert isinstance(calls[-1][3], list)


def test_the_fast_path_raises_its_own_exceptions():
    """A failure is `_NotOkStatusException`, made presentable by `_status_to_exception`; the slow way is asked for."""
    with pytest.raises(core._NotOkStatusException) as caught:
        pywrap_tfe.TFE_Py_FastPathExecute(context.context(), "MatMul", None, X, X)
    assert isinstance(caught.value.message, str)
    assert isinstance(core._status_to_exception(caught.value), tf.errors.InvalidArgumentError)
    with pytest.raises(core._FallbackException):
        pywrap_tfe.TFE_Py_FastPathExecute(context.context(), "Square", None, object())
    assert issubclass(core._FallbackException, Exception)


def test_execute_takes_operations_and_functions_by_name(monkeypatch):
    """`TFE_Py_Execute(handle, device, op, inputs, attrs, outputs)` runs either and returns a list."""
    ctx = context.context()
    assert pywrap_tfe.TFE_Py_Execute(ctx._handle, ctx.device_name, "Square", [X], ("T", FLOAT), 1)[0].shape == (2,)
    calls = recorded(monkeypatch, "TFE_Py_Execute")
    tf.function(lambda x: x * 2.0)(X)
    assert len(calls) == 1
    _, _, name, inputs, attrs, outputs = calls[0]
    assert "inference" in (name.decode() if isinstance(name, bytes) else name)
    assert (len(inputs), outputs) == (1, 1)
    assert "config_proto" in attrs
    assert callable(pywrap_tfe.TFE_Py_ExecuteCancelable)


def test_what_takes_tensors_past_the_fast_path(monkeypatch):
    """These take eager tensors by themselves, and are looked up on each use."""
    capsules, devices = recorded(monkeypatch, "TFE_ToDlpackCapsule"), recorded(monkeypatch, "TFE_DlpackDevice")
    tf.experimental.dlpack.to_dlpack(X)
    X.__dlpack_device__()
    assert capsules[0][0] is devices[0][0] is X
    assert pywrap_tfe.TFE_Py_TensorShapeSlice([tf.ones([2, 3]), tf.ones([5])], 0).numpy().tolist() == [2, 5]
    assert callable(pywrap_tfe.TFE_Py_PackEagerTensors)


def test_tapes_and_accumulators(monkeypatch):
    """They are made by functions that can be replaced; records go through `TFE_Py_RecordGradient`."""
    tapes = recorded(monkeypatch, "TFE_Py_TapeSetNew")
    accumulators = recorded(monkeypatch, "TFE_Py_ForwardAccumulatorNew")
    assert pywrap_tfe.TFE_Py_TapeSetIsEmpty()
    y = tf.constant([3.0, 4.0])
    with tf.GradientTape() as tape:
        assert not pywrap_tfe.TFE_Py_TapeSetIsEmpty()
        tape.watch(X)
        # As an operation that TensorFlow did not run itself: name, flat inputs, attributes, outputs, name scope.
        pywrap_tfe.TFE_Py_RecordGradient("Mul", [X, X], ("T", FLOAT), [y], ops.get_name_scope())
        with record.stop_recording():
            assert pywrap_tfe.TFE_Py_TapeSetIsEmpty()
    assert tape.gradient(y, X).numpy().tolist() == [2.0, 4.0]
    with tf.autodiff.ForwardAccumulator(X, X):
        assert not pywrap_tfe.TFE_Py_TapeSetIsEmpty()
    assert (len(tapes), len(accumulators)) == (1, 1)


def test_numbers_of_tensors():
    """`TFE_Py_UID` counts up, and eager tensors take theirs from the same count."""
    first, tensor, second = pywrap_tfe.TFE_Py_UID(), tf.constant(1.0)._id, pywrap_tfe.TFE_Py_UID()
    assert first < tensor < second


# context, ops, record.


def test_the_context():
    """What is asked of the eager context."""
    ctx = context.context()
    ctx.ensure_initialized()
    assert ctx.executing_eagerly() is True
    assert list(ctx.op_callbacks) == []
    assert ctx._handle is not None
    with tf.device("CPU:0"):
        assert "CPU:0" in ctx.device_name
    assert len(ctx.devices()) >= 1
    config_pb2.ConfigProto().ParseFromString(ctx.function_call_options.config_proto_serialized)
    with tf.Graph().as_default():
        assert ctx.executing_eagerly() is False


BY_PRIVATE_METHOD = {
    "_numpy_internal": [lambda x: x.numpy(), lambda x: x.__array__(), lambda x: float(x), lambda x: x.__reduce__()],
    "_datatype_enum": [],
    "_shape_tuple": [lambda x: len(x)],
    "_rank": [],
    "_num_elements": [],
    "_copy_to_device": [lambda x: x.cpu()],
    "_prefer_custom_summarizer": [lambda x: str(x), lambda x: f"{x}"],
    "_summarize_value": [],
}


@pytest.mark.parametrize("name", BY_PRIVATE_METHOD)
def test_the_private_methods_of_an_eager_tensor(name):
    """Eager tensors have them, the class behind them leaves them open, and a lazy tensor fills them in."""
    assert callable(getattr(X, name))
    assert name in vars(LazyTensor)
    base = getattr(ops._EagerTensorBase, name, None)
    if base is not None:
        with pytest.raises(NotImplementedError):
            base(*([X] if name != "_copy_to_device" else [X, "CPU:0"]))


@pytest.mark.parametrize(("name", "use"), [(name, use) for name, uses in BY_PRIVATE_METHOD.items() for use in uses])
def test_public_methods_go_through_the_private_ones(name, use):
    """`_EagerTensorBase` expresses the public methods by the private ones: a subclass that has those is whole."""
    asked = []

    class Standing(ops._EagerTensorBase):
        """Stands in for X, and notes what it is asked."""

        __slots__ = ()
        dtype, device, backing_device = tf.float32, X.device, X.device

        shape = X.shape

    def answer(private_name):
        def method(self, *arguments):
            asked.append(private_name)
            number = tf.constant(1.0)
            return {"_shape_tuple": (2,), "_prefer_custom_summarizer": False, "_copy_to_device": X}.get(
                private_name, number._numpy_internal() if private_name == "_numpy_internal" else 0
            )

        return method

    for private_name in BY_PRIVATE_METHOD:
        setattr(Standing, private_name, answer(private_name))
    use(Standing.__new__(Standing))
    assert name in asked


def test_isinstance_asks_the_class_property():
    """A subclass whose `__class__` says `EagerTensor` passes `isinstance`, `is_tensor` and weak references."""

    class Claiming(ops._EagerTensorBase):
        """Says that it is an eager tensor."""

        __class__ = property(lambda self: EagerTensor)

    one = Claiming.__new__(Claiming)
    assert isinstance(one, EagerTensor)
    assert type(one) is not EagerTensor
    assert tf.is_tensor(one)
    assert weakref.ref(one)() is one
    assert issubclass(EagerTensor, ops._EagerTensorBase)


def test_an_eager_tensor_is_made_of_an_array():
    """`EagerTensor(array, device, dtype enum)`; specs come from `_datatype_enum`, `_shape_tuple`, `_handle_data`."""
    tensor = EagerTensor(np.array([1, 2], np.int32), context.context().device_name, INT32)
    assert (tensor._datatype_enum(), tensor._shape_tuple(), tensor._num_elements()) == (INT32, (2,), 2)
    assert tensor._handle_data is None
    data = tf.Variable(X).handle._handle_data
    assert data.is_set
    assert [(d.dtype, [s.size for s in d.shape.dim], d.shape.unknown_rank) for d in data.shape_and_type] == [
        (FLOAT, [2], False)
    ]


def test_the_name_scope_and_control_dependencies():
    """`get_name_scope` answers in eager mode; `control_dependencies(None)` is a context manager."""
    assert isinstance(ops.get_name_scope(), str)
    with ops.control_dependencies(None):
        assert tf.constant(1).numpy() == 1


# constant_op, op_def_registry, op_def_library, func_graph.


def test_constants_are_made_by_one_function(monkeypatch):
    """`constant_op.convert_to_eager_tensor(value, ctx, dtype)` makes tensors of Python values, by its attribute."""
    assert list(inspect.signature(constant_op.convert_to_eager_tensor).parameters) == ["value", "ctx", "dtype"]
    calls, original = [], constant_op.convert_to_eager_tensor
    monkeypatch.setattr(constant_op, "convert_to_eager_tensor", lambda *a, **k: calls.append(a) or original(*a, **k))
    tf.constant([1, 2])
    tf.convert_to_tensor(3.0)
    assert [c[0] for c in calls] == [[1, 2], 3.0]
    with pytest.raises(ValueError):
        original(object(), context.context(), None)


def test_definitions_of_operations():
    """`op_def_registry.get` knows inputs, outputs, attributes and statefulness; it answers None for other names."""
    definition = op_def_registry.get("ConcatV2")
    assert [(a.name, a.number_attr, a.type_attr, a.type_list_attr) for a in definition.input_arg] == [
        ("values", "N", "T", ""), ("axis", "", "Tidx", ""),
    ]  # fmt: skip
    assert not definition.is_stateful
    assert op_def_registry.get("RandomUniform").is_stateful
    assert op_def_registry.get("no such operation") is None
    default = {a.name: a for a in definition.attr}["Tidx"]
    assert default.HasField("default_value")
    assert default.default_value.type == INT32


def build(graph):
    """A function's graph: doubles its input."""
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [2])
        _, _, operation, _ = op_def_library._apply_op_helper("Mul", x=x, y=tf.constant(2.0))
        graph.inputs, graph.outputs = [x], [tf.identity(operation.outputs[0])]
    return graph


def test_an_operation_is_added_by_the_names_of_its_definition():
    """`_apply_op_helper(op, **inputs and attributes)` returns four things, the third of them the operation."""
    graph = build(func_graph.FuncGraph("test"))
    assert [op.type for op in graph.get_operations()] == ["Placeholder", "Const", "Mul", "Identity"]
    assert graph.outputs[0].shape == [2]


def test_what_is_behind_a_resource():
    """`set_handle_data` tells a graph's resource its dtype and shape, and shape functions use them."""
    with func_graph.FuncGraph("test").as_default():
        handle = tf.compat.v1.placeholder(tf.resource, [])
        data = cpp_shape_inference_pb2.CppShapeInferenceResult.HandleData(is_set=True)
        shape = tensor_shape_pb2.TensorShapeProto()
        shape.dim.add(size=3)
        data.shape_and_type.add(dtype=FLOAT, shape=shape)
        handle_data_util.set_handle_data(handle, data)
        assert tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32).shape == [3]


# function_pb2: functions registered and launched by name.


def registered(name):
    """Registers a function that adds its argument to itself."""
    definition = function_pb2.FunctionDef()
    definition.signature.name = name
    definition.signature.input_arg.add(name="x", type=FLOAT)
    definition.signature.output_arg.add(name="y", type=FLOAT)
    node = definition.node_def.add(name="sum", op="AddV2", input=["x", "x"])
    node.attr["T"].CopyFrom(op_def_library.value_to_attr_value(tf.float32, "type", "T"))
    definition.ret["y"] = "sum:z:0"
    definition.attr["_noinline"].b = True
    context.context().add_function_def(definition)


def launch(name):
    ctx = context.context()
    attrs = ("executor_type", "", "config_proto", ctx.function_call_options.config_proto_serialized)
    return pywrap_tfe.TFE_Py_Execute(ctx._handle, ctx.device_name, name, [X], attrs, 1)


def test_a_function_is_launched_by_name_until_it_is_removed():
    """`add_function_def`, `has_function`, a launch by name, `remove_function`; then the name is unknown."""
    ctx, name = context.context(), "test_private_doubling"
    registered(name)
    assert ctx.has_function(name.encode())
    assert launch(name)[0].numpy().tolist() == [2.0, 4.0]
    ctx.remove_function(name)
    assert not ctx.has_function(name.encode())
    with pytest.raises((core._NotOkStatusException, tf.errors.OpError)):
        launch(name)


def test_grappler_can_be_switched_off():
    """`rewrite_options` has the switch of all passes."""
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    again = config_pb2.ConfigProto.FromString(config.SerializeToString())
    assert again.graph_options.rewrite_options.disable_meta_optimizer


def test_the_barrier_takes_a_list():
    """`XlaOptimizationBarrier` takes and returns a list of tensors."""
    definition = op_def_registry.get("XlaOptimizationBarrier")
    assert [(a.name, a.type_list_attr) for a in (*definition.input_arg, *definition.output_arg)] == [
        ("input", "T"), ("output", "T"),
    ]  # fmt: skip


def test_attributes_are_encoded():
    """`value_to_attr_value(value, kind, name)` takes enums, dtypes, shapes and lists."""
    encode = op_def_library.value_to_attr_value
    assert encode(FLOAT, "type", "T").type == encode(tf.float32, "type", "T").type == FLOAT
    assert [d.size for d in encode([2, 3], "shape", "shape").shape.dim] == [2, 3]
    assert list(encode([1, 2], "list(int)", "strides").list.i) == [1, 2]
    assert encode("SAME", "string", "padding").s == b"SAME"


# Small things.


def test_what_cpp_would_convert_out_of_sight():
    """Variables are resource variables and composite; ragged and sparse tensors are composite; tensors neither."""
    assert is_resource_variable(tf.Variable(1.0))
    assert not is_resource_variable(X)
    composites = (tf.ragged.constant([[1]]), tf.sparse.from_dense([1]), tf.IndexedSlices(X, [0, 1]), tf.Variable(1.0))
    assert all(isinstance(c, CompositeTensor) for c in composites)
    assert not isinstance(X, CompositeTensor)


def test_the_exception_table_of_code():
    """Since 3.11 `dis._parse_exception_table` lists start, end and target of each handler."""
    parse = getattr(dis, "_parse_exception_table", None)
    if parse is None:
        assert any(i.opname == "SETUP_FINALLY" for i in dis.get_instructions(registered_in_a_try))
        return
    entries = parse(registered_in_a_try.__code__)
    assert entries
    assert all(e.start < e.end and isinstance(e.target, int) for e in entries)


def registered_in_a_try():
    try:
        registered("never called")
    except ValueError:
        return None
