"""TensorFlow's private parts: what each must be and do. An upgrade that changes one fails here first, by name."""

import ctypes
import dis
import gc
import inspect
import subprocess
import sys
import textwrap
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.marks import PRINTS_STABLEHLO, needs_stablehlo
from tests.tracer import unhooked
from tracer import private
from tracer.lazy import LazyTensor
from tracer.private import (
    AtomicFunction,
    CompositeTensor,
    EagerTensor,
    GradientRegistry,
    InterpolateRuntimeError,
    KerasVariable,
    ResourceVariable,
    Trackable,
    UnreadVariable,
    binary_assert,
    compiler_ir_of,
    config_pb2,
    constant_op,
    context,
    core,
    cpp_shape_inference_pb2,
    func_graph,
    function_pb2,
    functions_of_dataset,
    gen_resource_variable_ops,
    global_state,
    gradient_code,
    handle_data_util,
    is_nested,
    is_nested_or_composite,
    is_op_determinism_enabled,
    is_resource_variable,
    keras_config,
    keras_losses,
    keras_numpy,
    nest,
    nest_util,
    node_def_pb2,
    op_def_library,
    op_def_registry,
    ops,
    plain_assert,
    pywrap_tfe,
    record,
    tensor_shape_pb2,
    tensor_util,
    tf_module,
    types_pb2,
    variable_accessed,
)
from tracer.versions import present

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
    capsules = recorded(monkeypatch, "TFE_ToDlpackCapsule")
    tf.experimental.dlpack.to_dlpack(X)
    assert capsules[0][0] is X
    assert hasattr(X, "__dlpack_device__") == bool(present(pywrap_tfe, "TFE_DlpackDevice"))
    if hasattr(X, "__dlpack_device__"):
        devices = recorded(monkeypatch, "TFE_DlpackDevice")
        X.__dlpack_device__()
        assert devices[0][0] is X
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


def test_settings_and_scopes_are_attributes():
    """What public functions tell, without the calls."""
    ctx = context.context()
    ctx.ensure_initialized()
    local = ctx._thread_local_data
    assert list(ctx._context_devices) == list(ctx.devices())
    with tf.device("CPU:0"):
        assert local.device_name == ctx.device_name != ""
        assert local.is_eager is context.executing_eagerly() is True
    with tf.Graph().as_default():
        assert local.is_eager is context.executing_eagerly() is False
    assert ops.get_default_graph()._distribution_strategy_stack == []
    with tf.distribute.get_strategy().scope():
        assert not tf.distribute.has_strategy()
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        assert ops.get_default_graph()._distribution_strategy_stack
    tf.random.set_seed(3)
    try:
        assert ctx._seed == context.global_seed() == 3
    finally:
        tf.random.set_seed(None)
    assert ctx._seed is None


KERAS_SETTINGS = {"epsilon": 1e-3, "floatx": "float64", "image_data_format": "channels_first"}


@pytest.mark.parametrize("name", KERAS_SETTINGS)
def test_settings_of_keras_are_attributes(name):
    """Where they are set is where they are looked up."""
    before, value = getattr(keras.config, name)(), KERAS_SETTINGS[name]
    setting = getattr(keras.config, f"set_{name}")
    try:
        setting(value)
        assert vars(keras_config)[f"_{name.upper()}"] == getattr(keras.config, name)() == value
    finally:
        setting(before)


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


def test_seeds_of_operations_are_drawn_by_one_function(monkeypatch):
    """`get_seed` looks it up on each use if there is a global seed and no other, and takes both modulo 2**31 - 1."""
    largest = 2**31 - 1
    drawn = iter([5, 2**31, largest, 0])
    monkeypatch.setattr(context, "internal_operation_seed", lambda: next(drawn))
    tf.random.set_seed(2**31 + 6)
    assert context.global_seed() == 2**31 + 6
    assert tf.compat.v1.get_seed(None) == (7, 5)
    assert tf.compat.v1.get_seed(None) == (7, 1)
    assert tf.compat.v1.get_seed(3) == (7, 3)
    tf.random.set_seed(0)
    assert tf.compat.v1.get_seed(None) == (0, largest)  # both zero would mean no seed at all
    tf.random.set_seed(None)
    assert context.global_seed() is None
    assert tf.compat.v1.get_seed(None) == (None, None)
    assert tf.compat.v1.get_seed(3) == (87654321, 3)
    assert next(drawn) == 0


def test_a_random_kernel_goes_on_where_it_was():
    """It is kept by its attributes, seeds included, until a global seed is set."""

    def draw():
        return tf.raw_ops.RandomUniform(shape=[2], dtype=tf.float32, seed=5, seed2=6).numpy().tolist()

    tf.random.set_seed(1)
    first, second = draw(), draw()
    assert first != second
    tf.random.set_seed(1)
    assert (draw(), draw()) == (first, second)
    philox = {"key": [5], "counter": [0, 6], "alg": 1}
    assert tf.raw_ops.StatelessRandomUniformV2(shape=[2], **philox).numpy().tolist() == first


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


def test_a_written_operation_is_added_to_a_graph():
    """`_create_c_op(graph, node, inputs, control_inputs)` adds it; `_from_c_op` knows its outputs and their shapes."""
    graph = func_graph.FuncGraph("test")
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [2, 3])
    node = node_def_pb2.NodeDef(name="product", op="MatMul", input=["x", "x"])
    node.attr["T"].type = FLOAT
    node.attr["transpose_a"].b, node.attr["transpose_b"].b = True, False
    c_op = ops._create_c_op(graph, node, [x, x], [], extract_traceback=False)
    (product,) = ops.Operation._from_c_op(c_op=c_op, g=graph).outputs
    assert (product.dtype, product.shape) == (tf.float32, [3, 3])
    node.name, node.attr["transpose_a"].b = "wrong", False
    with pytest.raises(ValueError):
        ops._create_c_op(graph, node, [x, x], [], extract_traceback=False)


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


@pytest.mark.parametrize("stage", [pytest.param("stablehlo", marks=needs_stablehlo), "hlo", "optimized_hlo"])
def test_what_xla_makes_of_a_registered_function(stage):
    """`get_compiler_ir` takes a device, a name, tensors and a stage; the function need not ask for XLA."""
    ctx, name = context.context(), f"test_private_{stage}"
    registered(name)
    text = compiler_ir_of(ctx, name, [tf.zeros([2])], stage)
    assert text.startswith(("module @", "#loc", "HloModule "))
    assert name in text
    assert ("stablehlo." in text) == (stage == "stablehlo")
    ctx.remove_function(name)


def test_a_stage_that_tensorflow_does_not_print():
    """It says which there are; 2.18 says so of StableHLO."""
    ctx, name, stage = context.context(), "test_private_stage", "of_later" if PRINTS_STABLEHLO else "stablehlo"
    registered(name)
    text = f"does not print it: Invalid stage selected: '{stage}'. Valid values are: .*'hlo'"
    with pytest.raises(NotImplementedError, match=text):
        compiler_ir_of(ctx, name, [tf.zeros([2])], stage)
    ctx.remove_function(name)


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


def test_determinism_is_off_until_it_is_asked_for():
    """`is_op_determinism_enabled` says whether runs are to be equal to the bit; nothing switches that off again."""
    assert is_op_determinism_enabled() is False


def test_where_seeds_come_from():
    """`Context._rng` decides what is drawn next; `set_seed` makes it anew and forgets kernels that have drawn."""
    tf.random.set_seed(1)
    before, drawn = context.context()._rng.getstate(), float(tf.random.normal(()))
    assert context.global_seed() == 1
    assert float(tf.random.normal(())) != drawn
    tf.random.set_seed(1)
    context.context()._rng.setstate(before)
    assert float(tf.random.normal(())) == drawn


def test_whether_tensorflow_has_started():
    """The context's handle tells a forked process whether there are threads that it lacks."""
    assert context.context()._context_handle is not None
    assert context.Context()._context_handle is None


def test_the_layers_inside_of_a_layer():
    """A Keras layer lists itself and those that it holds, however deep."""
    inner = keras.layers.Dense(2)
    outer = keras.Sequential([keras.Sequential([inner])])
    assert {id(outer), id(inner)} <= {id(layer) for layer in outer._flatten_layers()}


def test_what_a_first_call_notes():
    """A layer that is built changes with its first call in this alone: that it was called, and its variables read."""
    layer = keras.layers.Dense(2)
    layer.build((1, 3))
    held = [variable.value for variable in layer.variables]
    before = [dict(vars(layer)), *(dict(vars(v)) for v in held)]
    assert not layer._called
    assert not any(v._variable_read for v in held)
    layer(tf.ones((1, 3)))
    after = [vars(layer), *map(vars, held)]
    pairs = list(zip(before, after, strict=True))
    changed = {name for one, other in pairs for name in other if one.get(name) is not other[name]}
    assert changed == {"_called", "_variable_read"}


def test_where_keras_keeps_its_random_numbers():
    """One generator serves those who bring none: its state is a variable, and another may take its place."""
    keras.random.normal(())
    generator = global_state.get_global_attribute("global_seed_generator")
    before, drawn = generator.state.numpy(), float(keras.random.normal(()))
    generator.state.assign(before)
    assert float(keras.random.normal(())) == drawn
    other = keras.random.SeedGenerator(0)
    other.state.assign(before)
    global_state.set_global_attribute("global_seed_generator", other)
    assert float(keras.random.normal(())) == drawn


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_where_training_goes_on(tmp_path):
    """`BackupAndRestore` sets `_initial_epoch` of its model when training begins, if it was interrupted before."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert model._initial_epoch is None
    for _ in range(2):
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        model.fit(np.ones([2, 1]), np.ones([2, 1]), epochs=2, verbose=0, callbacks=[backup])
    assert model._initial_epoch == 2


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_keras_scales_its_losses_by_functions_of_one_module(monkeypatch):
    """Losses and trainers look them up in it on each use."""
    asked = []
    monkeypatch.setattr(keras_losses, "scale_loss_for_distribution", lambda value: asked.append("scale") or value)
    keras.losses.MeanSquaredError()(X[:, None], X[:, None])
    assert asked == ["scale"]
    monkeypatch.setattr(keras_losses, "unscale_loss_for_distribution", lambda value: asked.append("back") or value)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    model.train_on_batch(np.ones([2, 1]), np.ones([2, 1]))
    assert "back" in asked


def test_what_a_checkpoint_writes_of_an_object(tmp_path):
    """What `_serialize_to_tensors` gives is written by attribute; an iterator has it, a variable has one value."""

    class Standing(Trackable):
        """Stands in for another object."""

        def __init__(self, tensors):
            self.tensors = tensors

        def _serialize_to_tensors(self):
            return self.tensors

    dataset = tf.data.Dataset.range(5)
    iterator, other, variable = iter(dataset), iter(dataset), tf.Variable(X)
    next(iterator)
    standing = {"variable": Standing({"VARIABLE_VALUE": variable.read_value()})}
    standing["iterator"] = Standing(iterator._serialize_to_tensors())
    standing["iterator"]._LEGACY_SAVEABLE_NAME = iterator._LEGACY_SAVEABLE_NAME
    next(iterator)
    variable.assign([0.0, 0.0])
    path = tf.train.Checkpoint(**standing).write(str(tmp_path / "one"))
    tf.train.Checkpoint(variable=variable, iterator=other).read(path).assert_existing_objects_matched()
    assert variable.numpy().tolist() == X.numpy().tolist()
    assert int(next(other)) == 1


def test_what_cpp_would_convert_out_of_sight():
    """Variables are resource variables and composite; ragged and sparse tensors are composite; tensors neither."""
    assert is_resource_variable(tf.Variable(1.0))
    assert not is_resource_variable(X)
    composites = (tf.ragged.constant([[1]]), tf.sparse.from_dense([1]), tf.IndexedSlices(X, [0, 1]), tf.Variable(1.0))
    assert all(isinstance(c, CompositeTensor) for c in composites)
    assert not isinstance(X, CompositeTensor)


def test_how_a_variable_is_read():
    """`tf.Variable` makes a `ResourceVariable`; reading tells tapes, if it is trainable, notes that, and is one op."""
    trained, fixed = tf.Variable(X), tf.Variable(X, trainable=False)
    assert type(trained) is type(fixed) is ResourceVariable
    assert (trained._cached_value, trained._caching_device, trained._dtype) == (None, None, tf.float32)
    assert (trained._trainable, fixed._trainable) == (True, False)
    for read in ("value", "_read_variable_op"):
        plain = inspect.unwrap(getattr(ResourceVariable, read))
        trained._variable_read = False
        with tf.GradientTape() as tape:
            for variable in (trained, fixed):
                assert plain(variable).numpy().tolist() == X.numpy().tolist()
        assert [v is trained for v in tape.watched_variables()] == [True]
        assert trained._variable_read
    with tf.GradientTape() as tape:
        variable_accessed(fixed)
        variable_accessed(trained)
    assert [v is trained for v in tape.watched_variables()] == [True]
    with tf.GradientTape() as tape:
        pywrap_tfe.TFE_Py_TapeVariableAccessed(trained)
    assert [v is trained for v in tape.watched_variables()] == [True]


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


# Frames: not TensorFlow's, but CPython's private parts.


def test_the_variables_of_a_running_function_can_be_set():
    """What is written to a frame's variables is what the function goes on with, cells and new names included."""
    import sys

    def change(**values):
        frame = sys._getframe(1)
        frame.f_locals.update(values)
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))

    def function(x):
        change(x=2, y=3)
        if x < 0:
            y = 4
        return x, y

    assert function(1) == (2, 3)


def test_the_variables_of_a_running_function_can_be_set_at_its_next_line():
    """A function traced from the midst of a statement on hears of the next line, or of a jump back to its own."""
    import sys

    heard = []

    class Traced:
        def __bool__(self):
            frame, here = sys._getframe(1), sys._getframe(1).f_lineno

            def tracing(at, event, _):
                heard.append((event, at.f_lineno - here))
                if event == "line":
                    at.f_locals["y"] = at.f_locals["y"] + 10
                    sys.settrace(None)
                    at.f_trace = None
                    return None
                return tracing

            frame.f_trace = tracing
            sys.settrace(lambda *_: None)
            return False

    def function(x):
        y = 1 + (2 if x else len([3]))
        z = y
        for _ in range(2): y = 5 if x else y + 1  # noqa: E701
        return y, z

    assert function(Traced()) == (34, 12)
    assert heard == [("line", 1), ("line", 0), ("line", 0)]

    def caught(x):
        y = 1
        try:
            y = 5 if x else [][0]
        except IndexError:
            return y

    heard.clear()
    assert caught(Traced()) == 11
    assert heard == [("exception", 0), ("line", 1)]


def test_an_instruction_says_what_statement_it_belongs_to():
    """A jump on the truth of a value has the place of the statement that it decides, or of a part of its test."""
    import sys

    lines = []

    class Asked:
        def __bool__(self):
            frame = sys._getframe(1)
            line, last, *_ = list(frame.f_code.co_positions())[frame.f_lasti // 2]
            lines.append((line - frame.f_code.co_firstlineno, last - frame.f_code.co_firstlineno))
            return False

    def function(asked):
        while asked:
            pass
        while True and asked:
            pass
        if asked:
            pass

    if sys.version_info >= (3, 11):
        function(Asked())
        assert [first for first, _ in lines] == [1, 3, 5]
        assert all(last - first in (0, 1) for first, last in lines)


def test_gradient_functions_are_called_from_one_place():
    """It knows the operation whose gradient is asked for as `op_name`."""
    names = []

    fast = pywrap_tfe.TFE_Py_FastPathExecute

    def look(*args):
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code is gradient_code:
                names.append(frame.f_locals["op_name"])
            frame = frame.f_back
        return fast(*args)

    with tf.GradientTape() as tape:
        tape.watch(X)
        y = tf.cos(X)
    pywrap_tfe.TFE_Py_FastPathExecute = look
    try:
        tape.gradient(y, X)
    finally:
        pywrap_tfe.TFE_Py_FastPathExecute = fast
    assert "Cos" in {name.decode() if isinstance(name, bytes) else name for name in names}


def test_the_gradient_of_a_slice_passes_on_its_positions():
    """By `lookup`, TensorFlow finds a function that issues one operation on what the slice was given."""
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = X[:1]
    asked, given = [], []
    lookup, fast = GradientRegistry.lookup, pywrap_tfe.TFE_Py_FastPathExecute

    def find(self, name):
        asked.append(name)
        return lookup(self, name)

    def look(*args):
        given.append(args)
        return fast(*args)

    GradientRegistry.lookup, pywrap_tfe.TFE_Py_FastPathExecute = find, look
    try:
        tape.gradient(y, X)
    finally:
        GradientRegistry.lookup, pywrap_tfe.TFE_Py_FastPathExecute = lookup, fast
    assert "StridedSlice" in {name.decode() if isinstance(name, bytes) else name for name in asked}
    ((_, _, _, shape, begin, end, strides, _, *attrs),) = [args for args in given if args[1] == "StridedSliceGrad"]
    assert [np.asarray(v).tolist() for v in (shape, begin, end, strides)] == [list(X.shape), [0], [1], [1]]
    assert attrs[::2] == ["begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask"]


def test_gradient_functions_keep_tensors():
    """Of sums, say; what is kept can be let go."""
    cache = context.context().ones_rank_cache()
    cache.flush()
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = tf.reduce_sum(X)
    tape.gradient(y, X)
    assert isinstance(cache.get(1), EagerTensor)
    context.context().ones_rank_cache().flush()
    assert cache.get(1) is None
    assert context.context().zeros_cache().flush() is None


def test_caches_are_filled_by_put(monkeypatch):
    """The hook that keeps lazy tensors out of them stands there."""
    asked = []
    monkeypatch.setattr(context._EagerTensorCache, "put", lambda self, key, value: asked.append(key))
    cache = context.context().ones_rank_cache()
    cache.flush()
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = tf.reduce_sum(X)
    tape.gradient(y, X)
    assert asked == [1]
    assert cache.get(1) is None


def test_devices_are_looked_for_with_the_first_operation():
    """Before it, a program may still say which are to be seen."""
    code = (
        "import tensorflow as tf; from tracer.private import context; c = context.context();"
        "before = c._initialized; tf.constant(1.0) + 1.0; print(before, c._initialized)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout.split() == ["False", "True"], found.stderr[-2000:]


READS_FLAGS_ONCE = """
import os
import tensorflow as tf
from tracer.private import pywrap_tf_session
os.environ["TF_XLA_FLAGS"] = "--tf_xla_disable_constant_folding=true {more}"
assert pywrap_tf_session.TF_GetXlaConstantFoldingDisabled()
os.environ["TF_XLA_FLAGS"] = "--no_such_flag_that_would_end_the_process"
pywrap_tf_session.TF_SetXlaConstantFoldingDisabled(False)
assert not pywrap_tf_session.TF_GetXlaConstantFoldingDisabled()
twice = tf.function(lambda x: x + x, jit_compile=True)
assert twice(tf.constant(2.0)) == 4.0
(name,) = tf.io.gfile.listdir("ram://there")
print(name)
"""


def test_tensorflow_reads_xla_flags_once_and_keeps_code_in_memory():
    """Asking for a flag has TensorFlow read `TF_XLA_FLAGS`, importing it does not; XLA's code goes where they say."""
    more = "--tf_xla_persistent_cache_directory=ram://there --tf_xla_persistent_cache_prefix=ours"
    command = [sys.executable, "-c", READS_FLAGS_ONCE.format(more=more)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.startswith("ours__")
    assert run.stdout.endswith(".pb\n")


def test_functions_are_counted():
    """A function that is added twice is there until it is removed twice."""
    ctx = private.context.context()
    definition = tf.function(tf.tanh).get_concrete_function(tf.TensorSpec([2])).function_def
    mine = private.function_pb2.FunctionDef.FromString(definition.SerializeToString())
    mine.signature.name = "added_twice"
    for _ in range(2):
        ctx.add_function_def(mine)
    ctx.remove_function("added_twice")
    assert ctx.has_function(b"added_twice")
    (result,) = private.pywrap_tfe.TFE_Py_Execute(ctx._handle, None, "added_twice", [tf.zeros([2])], (), 1)
    assert result.shape == [2]
    ctx.remove_function("added_twice")
    assert not ctx.has_function(b"added_twice")


def test_messages_of_cpp_come_again_in_a_forked_process():
    """The thread that kept them from being printed is not there, and will not let them be printed again."""
    program = textwrap.dedent("""
        import os, threading
        from tracer import private
        level, set_level = private._levels()
        set_level(0)
        entered, leave = threading.Event(), threading.Event()

        def keep_quiet():
            with private.quiet():
                entered.set()
                leave.wait(60)

        thread = threading.Thread(target=keep_quiet)
        thread.start()
        entered.wait(60)
        pid = os.fork()
        if pid == 0:
            with private.quiet():
                inside = level()
            os._exit(0 if (inside, level()) == (3, 0) else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        during = level()
        leave.set()
        thread.join()
        assert (code, during, level()) == (0, 3, 0), (code, during, level())
    """)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-2000:]


def test_messages_of_cpp_can_be_kept_quiet():
    """Inside of `quiet`, also nested, C++ prints no errors; behind it is what was before."""
    level, set_level = private._levels()
    before = level()
    try:
        for usual in (0, 2):
            set_level(usual)
            with private.quiet():
                assert level() > 2
                with private.quiet():
                    assert level() > 2
                assert level() > 2
            assert level() == usual
    finally:
        set_level(before)


# Assertions.


@pytest.mark.parametrize(
    ("code", "ask"),
    [
        (binary_assert.__code__, lambda fine: tf.debugging.assert_less(X, 9.0 if fine else 1.5, "words")),
        (binary_assert.__code__, lambda fine: tf.debugging.assert_non_negative(X if fine else -X)),
        (plain_assert.__code__, lambda fine: tf.debugging.Assert(tf.reduce_sum(X) > (0 if fine else 9), [X])),
        (plain_assert.__code__, lambda fine: tf.debugging.assert_near(X, X if fine else X + 1.0)),
    ],
)
def test_assertions_ask_one_tensor_for_its_truth(monkeypatch, code, ask):
    """It is the variable `condition` of one of two functions; where it holds, nothing more is done or returned."""
    asked, truth = [], ops._EagerTensorBase.__bool__

    def noting(self):
        frame = sys._getframe(1)
        asked.append((frame.f_code, frame.f_locals.get("condition") is self, dict(frame.f_locals)))
        return truth(self)

    assert ask(True) is None
    monkeypatch.setattr(ops._EagerTensorBase, "__bool__", noting)
    assert ask(True) is None
    assert [(where, is_it) for where, is_it, _ in asked] == [(code, True)]
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        ask(False)
    assert [(where, is_it) for where, is_it, _ in asked[:2]] == [(code, True)] * 2
    # Called once more with what its arguments are at that moment, it raises the same.
    names = code.co_varnames[: code.co_argcount]
    function = next(f for f in (binary_assert, plain_assert) if f.__code__ is code)
    with pytest.raises(tf.errors.InvalidArgumentError) as again:
        function(*[asked[1][2][name] for name in names])
    assert (again.value.message, again.value.op, again.value.node_def) == (caught.value.message, None, None)


def test_anonymous_variables():
    """Two of one name are two, and each is as other variables are."""
    name = context.anonymous_name()
    handles = [tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2], shared_name=name) for _ in range(2)]
    for number, handle in enumerate(handles):
        tf.raw_ops.AssignVariableOp(resource=handle, value=X * (number + 1.0))
    found = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32).numpy().tolist() for handle in handles]
    assert found == [[1.0, 2.0], [2.0, 4.0]]


# tf.data: what a dataset runs.


def test_the_functions_of_a_dataset():
    """Those of a dataset and of all that it is made of, with what they capture and which operations they have."""
    scale = tf.Variable(2.0)
    rows = tf.data.Dataset.range(4).map(lambda n: tf.cast(n, tf.float32) * scale)
    whole = tf.data.Dataset.zip((rows, tf.data.Dataset.range(4))).filter(lambda a, b: a > 0.0).batch(2)
    found = functions_of_dataset(whole)
    assert len(found) == 2
    captured = [t for function in found for t in function.captured_inputs]
    assert any(t is scale.handle for t in captured)
    operations = {node.op for function in found for node in function.graph.as_graph_def().node}
    assert {"Mul", "Greater", "ReadVariableOp"} <= operations
    assert functions_of_dataset(tf.data.Dataset.range(3)) == []


def test_keras_writes_into_errors_how_a_layer_was_called():
    """A layer's `call` runs in a frame of this code, with these names, which adds to the message and marks it."""
    assert private.code_inside(private.inject_argument_info).co_name == "error_handler"
    assert {"fn", "object_name"} <= set(private.code_inside(private.inject_argument_info).co_freevars)
    assert {"args", "kwargs"} <= set(private.code_inside(private.inject_argument_info).co_varnames)
    assert private.inject_argument_info(len).__code__ is private.code_inside(private.inject_argument_info)
    found = []

    class Layer(keras.layers.Layer):
        def call(self, x, how=None):
            frame = sys._getframe(1)
            found.append((frame.f_code, frame.f_locals["fn"] == self.call, frame.f_locals["object_name"]))
            raise tf.errors.InvalidArgumentError(None, None, "wrong")

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"calling Layer.call\(\)[^$]*wrong[^$]*how=1") as caught:
        Layer()(X, how=1)
    assert found == [(private.code_inside(private.inject_argument_info), True, "Layer.call()")]
    assert caught.value._keras_call_info_injected


# Python functions as operations.


def test_kernels_call_the_registry_of_python_functions(monkeypatch):
    """Kernels call the one registry, which Python looks up on its class, and hand on the eager tensors it gives."""
    asked, call = [], private.FuncRegistry.__call__

    def noting(self, token, device, args):
        asked.append((type(self), device, len(args)))
        return call(self, token, device, args)

    monkeypatch.setattr(private.FuncRegistry, "__call__", noting)
    assert tf.py_function(lambda x: x * 2.0, [X], tf.float32).numpy().tolist() == [2.0, 4.0]
    for function in (tf.py_function, tf.numpy_function):
        mapped = tf.data.Dataset.range(2).map(lambda n, function=function: function(lambda m: m + 1, [n], tf.int64))
        assert [int(n) for n in mapped] == [1, 2]
    assert {(kind, count) for kind, _, count in asked} == {(private.FuncRegistry, 1)}
    assert len(asked) == 5


def test_how_keras_variables_compute_and_are_written():
    """Operators call Keras' functions on the variable inside; scopes decide what that is; writes are one operation."""
    v = keras.Variable(X)
    assert isinstance(v, KerasVariable)
    assert type(v._value) is ResourceVariable
    scopes = vars(global_state.GLOBAL_STATE_TRACKER)
    assert scopes.get("autocast_scope") is None
    with keras.src.backend.AutocastScope("float16"):
        assert scopes["autocast_scope"] is not None
    with keras.StatelessScope():
        assert scopes["stateless_scope"] is not None
    assert scopes["stateless_scope"] is None
    for name in ("add", "subtract", "multiply", "true_divide", "power"):
        assert getattr(keras_numpy, name)(v.value, X).dtype is X.dtype
    plain = v._value
    assert plain._validate_shape
    gen_resource_variable_ops.assign_variable_op(plain._handle, X * 2.0, validate_shape=True)
    assert plain.numpy().tolist() == (X * 2.0).numpy().tolist()
    assert type(plain._lazy_read(None)) is type(plain.assign(X))


def test_what_writing_to_a_variable_returns():
    """It can be made again of what it keeps."""
    variable = tf.Variable([1.0, 2.0])
    lazy = variable._lazy_read(None)
    assert type(lazy) is UnreadVariable
    again = UnreadVariable(
        lazy._handle, dtype=lazy._dtype, shape=lazy._shape, in_graph_mode=lazy._in_graph_mode, parent_op=None,
        unique_id=lazy._unique_id,
    )  # fmt: skip
    np.testing.assert_array_equal(again.numpy(), lazy.numpy())
    assert again.dtype == lazy.dtype
    assert again.shape == lazy.shape
    assert repr(again) == repr(lazy)


def test_helpers_for_structures():
    with unhooked():
        assert inspect.signature(nest.flatten_with_tuple_paths).parameters.keys() == {"structure", "expand_composites"}
        for name, names in (
            ("_tf_core_map_structure", ["func", "structure", "kwargs"]),
            ("_tf_core_map_structure_with_tuple_paths_up_to", ["shallow_tree", "func", "inputs", "kwargs"]),
            ("_tf_core_pack_sequence_as", ["structure", "flat_sequence", "expand_composites", "sequence_fn"]),
        ):
            assert list(inspect.signature(getattr(nest_util, name)).parameters) == names
        walk = ["module", "recursive", "predicate", "attribute_traversal_key", "attributes_to_ignore", "with_path",
                "expand_composites", "module_path", "seen", "recursion_stack"]  # fmt: skip
        assert list(inspect.signature(tf_module._flatten_module).parameters) == walk
        assert is_nested([1])
        assert not is_nested(tf.RaggedTensor.from_row_splits([1], [0, 1]))
        assert is_nested_or_composite(tf.RaggedTensor.from_row_splits([1], [0, 1]))


def test_helpers_are_looked_up_where_they_are_replaced():
    with unhooked():
        for function, names in (
            (nest_util.map_structure, {"_tf_core_map_structure"}),
            (nest_util.map_structure_up_to, {"_tf_core_map_structure_with_tuple_paths_up_to"}),
            (nest_util.sequence_like, {"CustomNestProtocol"}),
            (tensor_util.is_tf_type, {"tf_type_classes"}),
            (tf.Module._flatten, {"_flatten_module"}),
        ):
            assert names <= set(function.__code__.co_names)
        assert tf.is_tensor is tensor_util.is_tf_type
        assert all(type(kind) is type for kind in tensor_util.tf_type_classes[:-1])
        for protocol in (tensor_util.tf_type_classes[-1], nest_util.CustomNestProtocol):
            assert protocol._is_runtime_protocol
            named = [name for name in vars(protocol) if name.startswith(("is_", "__tf_"))]
            assert all(callable(getattr(protocol, name)) for name in named)


def test_functional_models_convert_arrays_to_the_dtypes_of_their_inputs():
    x, ids = keras.Input((2,), name="x"), keras.Input((2,), dtype="int32", name="ids")
    model = keras.Model({"x": x, "ids": ids}, [x + 0.0, ids + 0])
    assert isinstance(model, private.KerasFunctional)
    assert type(model).call is private.KerasFunctional.call
    assert {name: value.dtype for name, value in model._inputs_struct.items()} == {"x": "float32", "ids": "int32"}
    one, other = model({"x": np.full((1, 2), 0.1), "ids": np.array([[1, 2**32 + 5]])})
    assert one.dtype == tf.float32
    assert other.dtype == tf.int32
    np.testing.assert_array_equal(other, [[1, 5]])  # converted without a dtype, and cast


def test_wrappers_of_loaded_operations_are_marked():
    source = inspect.getsource(tf.load_op_library)
    assert "setattr(module, '_IS_TENSORFLOW_PLUGIN', True)" in source


def test_a_graph_function_is_called_in_a_frame_of_its_atomic_function():
    seen, execute = [], pywrap_tfe.TFE_Py_Execute

    def look(handle, device, name, *args):
        frame = sys._getframe(1)
        while frame.f_code is not AtomicFunction.call_flat.__code__:
            frame = frame.f_back
        seen.append((frame.f_locals["self"], name))
        return execute(handle, device, name, *args)

    function = tf.function(lambda x: (x * 2.0, tf.shape(x)), input_signature=[tf.TensorSpec([None, 3])])
    function(tf.ones([2, 3]))
    pywrap_tfe.TFE_Py_Execute = look
    try:
        function(tf.ones([4, 3]))
    finally:
        pywrap_tfe.TFE_Py_Execute = execute
    ((called, name),) = seen
    assert called.name.decode() == name
    assert [(out.dtype, out.shape.as_list()) for out in called.function_type.flat_outputs] == [
        (tf.float32, [None, 3]), (tf.int32, [2])
    ]  # fmt: skip
    assert called.definition.signature.name == name


def test_functions_are_registered_as_often_as_they_are_added():
    function = tf.function(lambda x: x + 1.0).get_concrete_function(tf.TensorSpec([]))
    name, ctx = function._inference_function.name.decode(), context.context()
    ctx.add_function_def(ctx.get_function_def(name))
    del function
    gc.collect()
    assert ctx.has_function(name)
    ctx.remove_function(name)
    assert not ctx.has_function(name)


def test_the_error_of_a_call_is_completed_at_the_end_of_a_with():
    @tf.function
    def checking(x):
        return tf.debugging.check_numerics(x, "here")

    atomic = checking.get_concrete_function(tf.TensorSpec([]))._inference_function
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        pywrap_tfe.TFE_Py_Execute(context.context()._handle, None, atomic.name, [tf.constant(np.nan)], (), 1)
    error = raised.value
    assert "Detected at node" not in error.message
    InterpolateRuntimeError(atomic).__exit__(type(error), error, None)
    assert "Detected at node" in error.message
    assert "Detected at node" in str(error)
