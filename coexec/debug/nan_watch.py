"""NaN watch: finds the operation, line and inputs that produce the first NaN or infinity."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.debug.repro_script import SCRIPT, Unwritable, write
from tracer import intercept
from tracer.inputs import array_of, settle
from tracer.location import Location, call_stack
from tracer.nodedef import grouped
from tracer.op import plain_name, signature_of
from tracer.private import EagerTensor, gradient_code, record
from tracer.spec import RESOURCE, spec_of
from tracer.variable_ops import is_variable_op

# Outputs of these after the first are saved for the gradient, and not meant to be read.
_FIRST_ONLY = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
_UNINITIALIZED = ("Empty", "TemporaryVariable")  # results are uninitialised memory


class NonFiniteError(FloatingPointError):
    """Raised under `coexec.debug_nans()` if an operation returns NaN, or infinity for finite inputs.

    It is a `FloatingPointError`, as Python and NumPy raise for failed arithmetic, and not a TensorFlow error: programs
    may catch those, and this one must reach the user who is debugging.

    Attributes:
      op: the operation's type, such as "RealDiv".
      location: where the program issued it: `location.frames[0].line`.
      inputs: its inputs as arrays; None for a variable's handle.
      output: its output, or the new value of the variable that it wrote.
      reproduction: the directory with the files to rerun the operation, if `debug_nans` was given one.
    """

    # Otherwise Keras would replace it by an error of another class that names the layer.
    _keras_call_info_injected = True

    def __init__(
        self, message: str, op: str, location: Location, inputs: list[Any], output: Any, reproduction: str | None
    ) -> None:
        super().__init__(message)
        self.op = op
        self.location = location
        self.inputs = inputs
        self.output = output
        self.reproduction = reproduction


class _Issued(NamedTuple):
    """An operation, and the previous value of its variable, if a reproduction would need it."""

    op: str
    given: tuple[Any, ...]
    attrs: tuple[Any, ...]
    before: Any = None


class NanWatch:
    """Handler of a call that runs operation by operation; checks each result.

    `directory`: where to write reproductions, if anywhere.
    """

    device: str | None = None  # operations that the program places on a device are checked, too
    open = records = False
    watches = None
    tapes: Any = None

    def __init__(self, directory: str | None = None) -> None:
        self.directory = directory

    def fast(self, op: str, name: Any, args: tuple[Any, ...]) -> Any:
        """Runs an operation issued by a generated wrapper."""
        signature = signature_of(op)
        if op == "EagerPyFunc" or signature is None:  # TensorFlow would convert an error raised in its Python
            with intercept.handling(None):
                return intercept.run_fast(op, name, args)
        given, args = args, settle(signature, args)  # reads variables as operations of their own, which are checked
        count = len(signature.inputs)
        known = self.directory is not None and is_variable_op(op) and isinstance(args[0], EagerTensor)
        before = _behind(args[0]) if known else None
        result = intercept.run_settled(op, name, args, given)
        self._look(_Issued(op, args[:count], args[count:], before), result)
        return result

    def execute(self, device: Any, op: Any, inputs: Any, attrs: Any, outputs: int, cancel: Any) -> Any:
        """Runs an operation or a graph function issued by name."""
        with intercept.handling(None):
            result = intercept.run_execute(device, op, inputs, attrs, outputs, cancel)
        name = plain_name(op)
        given, attrs = tuple(inputs), tuple(attrs or ())
        if signature_of(name) is not None:
            given = tuple(grouped(name, attrs, list(inputs)))
        self._look(_Issued(name, given, attrs), result)
        return result

    def expected(self, op: str, args: tuple[Any, ...]) -> Any:
        """Returns None: no operation is expected."""
        return None

    def fault(self, error: BaseException) -> bool:
        """Returns False: all errors are raised, since the user is debugging."""
        return False

    def constant(self, value: Any, dtype: Any) -> Any:
        """Returns a Python value as a tensor."""
        return intercept.make_constant(value, dtype)

    def index(self, index: tuple[tuple[int, ...], ...]) -> None:
        """Leaves the index to TensorFlow."""

    def library(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a library call; its operations are checked."""
        return function(*args, **kwargs)

    def aside(self, inputs: Any, run: Callable[[], Any]) -> Any:
        """Runs code unwatched."""
        with intercept.handling(None):
            return run()

    def _look(self, issued: _Issued, result: Any) -> None:
        """Checks the float outputs of an operation, or the variable that it wrote; raises `NonFiniteError`."""
        op, given = issued.op, issued.given
        if op in _UNINITIALIZED:
            return
        outputs = intercept.flat_outputs(result)
        if op in _FIRST_ONLY:
            outputs = outputs[:1]
        for number, tensor in enumerate(outputs):
            array = _floats(tensor)
            if array is not None:
                self._judge(issued, array, f"output {number}" if len(outputs) > 1 else "its output")
        if not outputs and is_variable_op(op) and isinstance(given[0], EagerTensor):
            array = _behind(given[0])
            if array is not None:
                self._judge(issued, array, "the variable")

    def _judge(self, issued: _Issued, array: Any, what: str) -> None:
        """Raises `NonFiniteError` if `array` has NaN, or infinity though all inputs are finite."""
        with np.errstate(all="ignore"):
            if np.isfinite(array).all():
                return
            nan = bool(np.isnan(array).any())
        op = issued.op
        inputs = [_as_array(value) for value in _flat(issued.given)]
        infinite = [i for i in inputs if i is not None and _is_float(i.dtype) and not np.isfinite(i).all()]
        if not nan and infinite:
            return  # from an input, such as a mask
        location = Location(call_stack()[0], 0)
        kind = "NaN" if nan else "infinity"
        wrong = np.isnan(array) if nan else np.isinf(array)
        lines = [
            f"{kind} from {op}{_of_gradient()} at {location}: {what}, {_describe(array)}, has "
            f"{np.count_nonzero(wrong)} of {array.size}, at {[int(k) for k in np.argwhere(wrong)[0]]}"
        ]
        lines += [f"  input {n}: {_describe(value)}" for n, value in enumerate(inputs)]
        if infinite:
            lines.append("  an input has it already: from outside, a constant, a variable, or what is not looked at")
        lines.append("  the error's `inputs` and `output` hold the values")
        reproduction = None
        if self.directory is not None:
            try:
                with intercept.handling(None):
                    reproduction = write(self.directory, op, issued.given, issued.attrs, issued.before, lines)
                lines.append(f"  to run this operation again: python {os.path.join(reproduction, SCRIPT)}")
            except (Unwritable, OSError) as error:
                lines.append(f"  what it takes to run it again could not be written: {error}")
        raise NonFiniteError("\n".join(lines), op, location, inputs, array, reproduction)


def _of_gradient() -> str:
    """Returns a phrase that names the operation whose gradient is being computed, or an empty string."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is gradient_code:
            name = frame.f_locals["op_name"]
            return f" in the gradient of {name.decode() if isinstance(name, bytes) else name}"
        frame = frame.f_back
    return ""


def _is_float(dtype: Any) -> bool:
    dtype = tf.dtypes.as_dtype(dtype)
    return bool(dtype.is_floating or dtype.is_complex)


def _floats(tensor: Any) -> Any:
    """Returns the array of a float or complex tensor; None for any other value."""
    return array_of(tensor) if isinstance(tensor, tf.Tensor) and _is_float(tensor.dtype) else None


def _behind(handle: Any) -> Any:
    """Returns the array that a float or complex variable holds; None for any other handle."""
    held = spec_of(handle).handle if handle._datatype_enum() == RESOURCE else None
    if not held or not _is_float(held[0][0]):
        return None
    with intercept.handling(None), record.stop_recording():
        return array_of(tf.raw_ops.ReadVariableOp(resource=handle, dtype=held[0][0]))


def _flat(given: Any) -> list[Any]:
    """Returns the inputs with lists of tensors flattened."""
    flat: list[Any] = []
    for value in given:
        listed = isinstance(value, (list, tuple)) and any(isinstance(v, tf.Tensor) for v in value)
        flat.extend(value) if listed else flat.append(value)
    return flat


def _as_array(value: Any) -> Any:
    """Returns an input as an array; None for resources, variants and strings."""
    if not isinstance(value, tf.Tensor):
        value = intercept.make_constant(value, None)
    return None if value.dtype in (tf.resource, tf.variant, tf.string) else array_of(value)


def _describe(value: Any) -> str:
    """Describes an array by dtype, shape, and its range, or its values if it is small."""
    if value is None:
        return "a resource"
    text = f"{value.dtype.name}{list(value.shape)}"
    if value.size <= tuning.nan_values_shown:
        return f"{text} {value.tolist()}"
    if not _is_float(value.dtype):
        return f"{text} from {value.min()} to {value.max()}"
    finite = value[np.isfinite(value)]
    if np.iscomplexobj(finite):
        finite = np.abs(finite)
    between = f"from {finite.min()} to {finite.max()}" if finite.size else "without a finite value"
    zeros = int(np.count_nonzero(value == 0))
    return f"{text} {between}" + (f", {zeros} of {value.size} are zero" if zeros else "")
