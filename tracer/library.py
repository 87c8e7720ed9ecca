"""Library: wrappers of the entry points of Keras, of TensorFlow's gradients and of registered libraries.

A wrapper replaces a method of a public class, or a function, and calls the running thread's handler first:
`handler.library(function, args, kwargs)` may answer by a memoized call. Without a handler, and inside another wrapped
call, the original runs as usual. Functions that issue a single operation are wrapped by `answers` instead.

Relies on: lookup of `keras.layers.Layer.__call__` and the like on the classes; Keras' thread-local global state
(`global_state.GLOBAL_STATE_TRACKER`, replaced by `clear_session`), part of what `environment` returns.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import types
import weakref
from typing import Any

import keras
import tensorflow as tf

from tracer import gradients, hooks, keras_packages, memory, structures, versions
from tracer.answers import answered
from tracer.effects import registered, written
from tracer.faults import absorbs, call, passes
from tracer.intercept import current_handler
from tracer.private import context, custom_objects, global_state, keras_config, ops

_WRAPPED: list[tuple[type, str]] = [
    (keras.layers.Layer, "__call__"),
    (keras.losses.Loss, "__call__"),
    (keras.metrics.Metric, "__call__"),
    *((kind, name) for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)
      for name in ("apply", "apply_gradients")),
    (tf.GradientTape, "gradient"),
    *((keras.Model, f"{name}_step") for name in ("train", "test", "predict")),
]  # fmt: skip
# Metrics override these methods.
_WRAPPED += [
    (kind, name)
    for kind in vars(keras.metrics).values()
    if isinstance(kind, type) and issubclass(kind, keras.metrics.Metric)
    for name in ("update_state", "result")
]


def _of_legacy_keras(package: Any) -> list[tuple[type, str]]:
    """Returns the same of Keras 2, whose metrics have methods of their own."""
    optimizers = package.optimizers.Optimizer, package.optimizers.legacy.Optimizer
    return [
        (package.layers.Layer, "__call__"),
        (package.losses.Loss, "__call__"),
        *((kind, "apply_gradients") for kind in optimizers),
    ]


# TensorFlow functions, by module, that spend tens of us of Python or more on their operations (`signal.stft` 1.2 ms,
# where they are followed one by one: `python -m tests.public`); a memoized call takes 4. Those that read values, or
# that issue operations which run on their own, are not worth it.
_FUNCTIONS = {
    "": """
        clip_by_global_norm clip_by_norm clip_by_value einsum histogram_fixed_width_bins linspace meshgrid one_hot ones
        pad range repeat sort tensordot zeros
    """,
    "debugging": """
        assert_all_finite assert_equal assert_greater assert_greater_equal assert_less assert_less_equal
        assert_near assert_negative assert_non_negative assert_non_positive assert_none_equal assert_positive
    """,
    "image": """
        adjust_brightness central_crop crop_to_bounding_box extract_patches flip_left_right flip_up_down
        grayscale_to_rgb image_gradients pad_to_bounding_box per_image_standardization psnr random_brightness
        random_contrast random_crop random_flip_left_right random_flip_up_down random_saturation resize
        resize_with_crop_or_pad rgb_to_grayscale rgb_to_yiq rgb_to_yuv rot90 sobel_edges ssim
        stateless_random_brightness stateless_random_contrast stateless_random_crop
        stateless_random_flip_left_right stateless_random_flip_up_down stateless_random_saturation
        total_variation yiq_to_rgb yuv_to_rgb
    """,
    "linalg": """
        eye global_norm logdet lstsq lu_solve matvec norm normalize pinv trace tridiagonal_matmul
    """,
    "math": """
        confusion_matrix count_nonzero is_non_decreasing is_strictly_increasing lbeta polyval reduce_logsumexp
        reduce_std reduce_variance unsorted_segment_mean unsorted_segment_sqrt_n zero_fraction
    """,
    "nn": """
        atrous_conv2d avg_pool1d batch_normalization conv1d conv1d_transpose crelu depthwise_conv2d dropout gelu
        l2_normalize log_poisson_loss max_pool1d moments normalize_moments pool separable_conv2d
        sigmoid_cross_entropy_with_logits silu softmax_cross_entropy_with_logits
        sparse_softmax_cross_entropy_with_logits sufficient_statistics weighted_cross_entropy_with_logits
        weighted_moments
    """,
    "random": """
        fold_in normal split stateless_normal stateless_truncated_normal stateless_uniform truncated_normal
        uniform
    """,
    "signal": """
        fft fft2d fftshift frame hamming_window hann_window ifft ifft2d ifftshift inverse_stft irfft irfft2d
        linear_to_mel_weight_matrix overlap_and_add rfft rfft2d stft vorbis_window
    """,
}
# The same of Keras, which converts, promotes and looks for masks and sparse tensors.
_KERAS_FUNCTIONS = {
    "losses": """
        binary_crossentropy binary_focal_crossentropy categorical_crossentropy categorical_focal_crossentropy
        categorical_generalized_cross_entropy categorical_hinge cosine_similarity dice huber kl_divergence
        log_cosh mean_absolute_error mean_absolute_percentage_error mean_squared_error
        mean_squared_logarithmic_error poisson sparse_categorical_crossentropy tversky
    """,
    "metrics": """
        binary_accuracy categorical_accuracy sparse_categorical_accuracy sparse_top_k_categorical_accuracy
        top_k_categorical_accuracy
    """,
    "ops": """
        amax amin append argmax argmin binary_crossentropy categorical_crossentropy conv conv_transpose
        corrcoef cross diff dot dot_product_attention dstack einsum eye fft fft2 fmax fmin hstack
        hypot identity inner isclose istft kron layer_normalization linspace matmul max max_pool mean median min
        multi_hot nan_to_num nanmax nanmean nanmin nanstd nansum nanvar norm normalize one_hot outer pad polar
        psnr rfft irfft rms_normalization rot90 select silu sparse_categorical_crossentropy stft take_along_axis
        tensordot trace unfold var vdot vstack where
    """,
}


# Those of them whose arrays of integers are labels or indices, which they convert to tensors as they are.
_LABELLED = {
    "": "one_hot",
    "math": "unsorted_segment_mean unsorted_segment_sqrt_n",
    "nn": "sparse_softmax_cross_entropy_with_logits",
}
_KERAS_LABELLED = {
    "losses": "sparse_categorical_crossentropy",
    "metrics": "sparse_categorical_accuracy sparse_top_k_categorical_accuracy",
    "ops": "one_hot sparse_categorical_crossentropy",
}


def _functions(package: Any, table: dict[str, str]) -> dict[str, Any]:
    """Returns the functions of a table by path, without those that this version of the package does not have."""
    paths = [f"{module}.{name}".lstrip(".") for module, names in table.items() for name in names.split()]
    found = {path: functools.reduce(lambda v, name: getattr(v, name, None), path.split("."), package) for path in paths}
    return {path: function for path, function in found.items() if function is not None}


# These depend only on their arguments and the device, not on Keras' scopes, unless the arguments hold objects.
plain: frozenset[Any] = frozenset(_functions(tf, _FUNCTIONS).values())

# Functions, in contrast to methods of objects.
functions: frozenset[Any] = plain.union(_functions(keras, _KERAS_FUNCTIONS).values())

labelled: frozenset[Any] = frozenset(
    [*_functions(tf, _LABELLED).values(), *_functions(keras, _KERAS_LABELLED).values()]
)

# The state of `keras.config`, read directly: its functions would be a call each, and every memoized call needs all.
_CONFIG: dict[str, Any] = vars(keras_config)

# The originals.
gradient = tf.GradientTape.gradient
layer_call = keras.layers.Layer.__call__
layer_calls = {layer_call}  # and Keras 2's
loss_call = keras.losses.Loss.__call__  # Keras 2's converts nothing

# Names kept in Keras' global state, on which no value depends.
_NAMES = frozenset({"name_scope_stack", "object_name_uids", "keras_name_uids", "_learning_phase"})

_hooks = hooks.HookSet(
    __name__,
    "`__call__` and the like of Keras' public classes, `tf.GradientTape.gradient`, `Layer.add_loss`; the same of Keras "
    "2, and AutoGraph's `tf_convert`, once the program has imported it; functions of TensorFlow's, and of registered "
    "modules",
    "a handler may follow the call as a whole, or answer it where it is one operation",
    hooks.PROCESS,
)
_wrappers: dict[Any, Any] = {}  # wrappers of functions, by original
_adopted: set[types.ModuleType] = set()  # public modules, whose functions are wrapped
_IS_PUBLIC = re.compile(
    r"tensorflow(\._api\..*)?|keras(\.api)?(\._tf_keras\.keras)?\.(losses|metrics|ops(\.\w+)?)"
).fullmatch
_imported = 0  # how many modules there were when they were looked through
# Made where they are first imported. `import tensorflow.nn` runs a module's code once more, under this name, and makes
# the new module `tf.nn`.
_API = "tensorflow._api.v2."
_LATE = (
    "tensorflow.compat.v2", *(f"keras._tf_keras.keras.{name}" for name in ("losses", "metrics", "ops")),
    *(f"tensorflow.{name[len(_API):]}" for name in sys.modules if name.startswith(_API) and "compat" not in name),
)  # fmt: skip


def install() -> None:
    """Installs the wrappers for good; without a handler one costs 0.2 us per call."""
    with hooks.installing:  # two threads may decorate their first functions at once
        if versions.UNTESTED:
            return
        if _hooks.users:
            _adopt_names()
            return
        _wrap_methods(_WRAPPED)
        for package, table in (tf, _FUNCTIONS), (keras, _KERAS_FUNCTIONS):
            for path, function in _functions(package, table).items():
                _name(_wrap_function(function), package, path)
        for paths, function, wrapper in answered():
            _name(wrapper, tf, paths[0])
            _wrappers[function] = wrapper
        _adopt_names()
        structures.install()
        # A write without `__setattr__`: it appends to a list.
        _hooks.add(keras.layers.Layer, "add_loss", _telling(keras.layers.Layer.add_loss))
        gradients.install()
        _hooks.hold()
        if keras_packages.legacy is not None:  # after `uninstall`
            _install_legacy(keras_packages.legacy.package)


def adopt_imports() -> None:
    """Does the same for modules that the program has imported since, Keras 2 among them; without wrappers, nothing."""
    global _imported
    if len(sys.modules) != _imported and _hooks.users:  # asked in each call
        with hooks.installing:
            _imported = len(sys.modules)
            _adopt_names()
            adopted = keras_packages.adopt_legacy() if keras_packages.legacy is None else None
            if adopted is not None:
                _install_legacy(adopted.package)


def _install_legacy(package: Any) -> None:
    _wrap_methods(_of_legacy_keras(package))
    _hooks.add(package.layers.Layer, "add_loss", _telling(package.layers.Layer.add_loss))
    autograph = keras_packages.legacy_autograph()
    _hooks.add(autograph, "tf_convert", _converting(autograph.tf_convert, package.metrics.Metric))
    layer_calls.add(behind(package.layers.Layer.__call__))
    if keras_packages.legacy is not None:
        _names_of_objects.append(keras_packages.legacy.custom_objects)


def _wrap_methods(wrapped: list[tuple[type, str]]) -> None:
    known = set()
    for kind, name in wrapped:
        owner = next(base for base in kind.__mro__ if name in vars(base))
        if (owner, name) not in known:
            known.add((owner, name))
            _hooks.add(owner, name, _wrap(vars(owner)[name]))


def _adopt_names() -> None:
    """Wraps functions under all of their public names, in modules that have been imported since, too.

    Libraries import `tensorflow.compat.v2` as `tf`: a module of its own, as are those below it. (`compat.v1` is left
    out: its modules are objects in C++ that keep what they have been asked for.)
    """
    names = () if _adopted else [name for name in list(sys.modules) if _IS_PUBLIC(name)]
    for module in [sys.modules[name] for name in (*names, *_LATE) if name in sys.modules]:
        if type(module) is types.ModuleType and module not in _adopted:
            _adopted.add(module)
            for key, value in list(vars(module).items()):
                if type(value) is types.FunctionType and value in _wrappers:
                    _hooks.add(module, key, _wrappers[value])


def _name(wrapper: Any, package: types.ModuleType, path: str) -> None:
    # The name by which `pickle` finds it. The original keeps its own, for imports from its defining module.
    wrapper.__module__, wrapper.__qualname__ = package.__name__, path


def _wrap_function(original: Any) -> Any:
    """Returns the wrapper of a function; all of its names share it."""
    wrapper = _wrappers.get(original)
    if wrapper is None:
        wrapper = _wrappers[original] = _wrap(original)
    return wrapper


def register(module: types.ModuleType) -> None:
    """Treats a module as a library: calls of its public functions may be memoized, and its Python skipped."""
    if module.__name__ in registered:
        return
    registered.add(module.__name__)
    for name, value in list(vars(module).items()):
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__ and not name.startswith("_"):
            _hooks.add(module, name, _wrap_function(value))


def wrap_pure(function: types.FunctionType) -> Any:
    """Returns a wrapper of a function of the program that only computes."""
    wrapper = _wrap(function)
    _pure.add(function)
    return wrapper


def behind(function: types.FunctionType) -> Any:
    """Returns the original of a wrapper; other functions unchanged."""
    return function.__wrapped__ if function.__code__ is _WRAPPER_CODE else function  # type: ignore[attr-defined]


def is_wrapper(function: types.FunctionType) -> bool:
    """Returns whether calls of a function already go to the handler."""
    return function.__code__ is _WRAPPER_CODE


def is_pure(function: Any) -> bool:
    """Returns whether this is a function that `wrap_pure` has wrapped."""
    return type(function) is types.FunctionType and function in _pure


def without_iterators(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of a library call with a list for the pairs of `apply_gradients`, usually a `zip`."""
    if len(args) > 1 and hasattr(args[1], "__next__") and function.__name__ == "apply_gradients":
        return args[0], call(list, (args[1],), {}), *args[2:]
    return args


def uninstall() -> None:
    """Restores methods and functions, and forgets registered libraries."""
    registered.clear()
    _hooks.clear()
    _wrappers.clear()
    _adopted.clear()


def _wrap(original: Any) -> Any:
    @functools.wraps(original)
    @passes
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handler = None
        try:
            handler = current_handler()
            if handler is None or not (handler.open or handler.records):
                return original(*args, **kwargs)
            return handler.library(original, args, kwargs)
        except Exception as error:
            if not (absorbs(error) if handler is None else handler.fault(error)):
                raise
        return original(*args, **kwargs)

    return wrapper


_WRAPPER_CODE = _wrap(layer_call).__code__  # shared by all wrappers


def is_call(code: types.CodeType) -> bool:
    """Returns whether a frame of this code makes a library call, which may be memoized."""
    return code is _WRAPPER_CODE


_pure: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()


def _telling(original: Any) -> Any:
    @functools.wraps(original)
    @passes
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        written(self, original.__name__)
        return original(self, *args, **kwargs)

    return write


def _converting(original: Any, metric: type) -> Any:
    """Wraps AutoGraph's conversion, by which each metric of Keras 2 runs its `update_state` and `result`.

    A metric replaces these methods of its class by closures of its own, which look this function up on each call.
    """

    @functools.wraps(original)
    @passes
    def tf_convert(f: Any, *args: Any, **kwargs: Any) -> Any:
        handler = current_handler()
        if handler is None or not handler.open or not context.executing_eagerly():
            return original(f, *args, **kwargs)
        if type(f) is types.MethodType and issubclass(type(f.__self__), metric):
            function = f.__func__
            if str(function.__module__).startswith(keras_packages.MODULES):  # eagerly, nothing of it is converted
                return functools.partial(_wrap_function(function), f.__self__)
        return original(f, *args, **kwargs)

    return tf_convert


def environment(kept: list[Any]) -> tuple[Any, ...]:
    """Returns what a library call depends on besides its arguments and objects: scopes, policies, the device.

    Objects are represented by id and appended to `kept`, which must outlive every comparison of the result.
    """
    context = vars(global_state.GLOBAL_STATE_TRACKER).get(_CALL)
    return (*_scopes(kept), *(() if context is None else _told(context, kept)), *_legacy(kept))


def _scopes(kept: list[Any]) -> tuple[Any, ...]:
    """Returns the same without the call context, which layers write to while they run."""
    parts: list[Any] = [*_settings()]
    for name, value in vars(global_state.GLOBAL_STATE_TRACKER).items():
        if value is None or name in _NAMES or name == _CALL:
            continue
        if name == "autocast_scope":
            parts.append((name, value.dtype))
        elif name != _WAITING or value:
            parts.append((name, id(value)))
            kept.append(value)
    return tuple(parts)


_CALL = "current_call_ctx"  # the only mutable one among these objects, but for:
_WAITING = "uninitialized_variables"  # the end of each `StatelessScope` puts another empty list there


def call_context() -> dict[str, Any] | None:
    """Returns what the current outermost layer and those inside it have set for later layers, or None.

    For example, each layer sets whether it is training, the default for layers without that argument.
    """
    context = vars(global_state.GLOBAL_STATE_TRACKER).get(_CALL)
    return None if context is None else vars(context)


def _legacy(kept: list[Any]) -> tuple[Any, ...]:
    return () if keras_packages.legacy is None else keras_packages.legacy.surroundings(kept)


def _settings() -> tuple[Any, ...]:
    ctx = context.context()
    local, config = ctx._thread_local_data, _CONFIG
    no_seeds = ctx._seed is None  # then TensorFlow draws none for operations
    formats = config["_EPSILON"], config["_FLOATX"], config["_IMAGE_DATA_FORMAT"]
    levels = _LOGGER.level, _LOGGER.disabled, _MANAGER.disable  # what is logged is an effect
    names = [memory.word(*memory.dict_places(each)) for each in _names_of_objects if each] if memory.KNOWN else ()
    return local.is_eager, local.device_name, *formats, no_seeds, *levels, *names


_LOGGER, _MANAGER = tf.get_logger(), logging.root.manager
_names_of_objects: list[dict[str, Any]] = [custom_objects]  # what the program has registered for names


def has_strategy() -> bool:
    """Returns `tf.distribute.has_strategy()`, with a fast path for the common False."""
    return bool(ops.get_default_graph()._distribution_strategy_stack) and tf.distribute.has_strategy()


def _told(context: Any, kept: list[Any]) -> list[Any]:
    """Returns the contents of a call context, as part of the environment."""
    parts: list[Any] = []
    for name, given in vars(context).items():
        if name == "entry_layer" or given is None or given is True or given is False:
            parts.append((name, given is not None, given is True))
        else:
            parts.append((name, id(given)))
            kept.append(given)
    return parts


class Surroundings:
    """Memoizes `environment` from call to call, recomputing it only if the state has changed."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = ()
        self._environment: tuple[Any, ...] = ()
        self._kept: list[Any] = []
        self._held: tuple[Any, ...] = ()  # keeps ids in `_seen` from being reused

    def environment(self, kept: list[Any]) -> tuple[Any, ...]:
        """Returns the same as the function `environment`."""
        state = vars(global_state.GLOBAL_STATE_TRACKER)
        seen = (*_settings(), *state, *map(id, state.values()))
        if seen != self._seen:
            self._kept, self._held = [], tuple(state.values())
            self._environment, self._seen = _scopes(self._kept), seen
        kept += self._kept
        context = state.get(_CALL)
        if context is None and keras_packages.legacy is None:
            return self._environment
        return (*self._environment, *(() if context is None else _told(context, kept)), *_legacy(kept))
