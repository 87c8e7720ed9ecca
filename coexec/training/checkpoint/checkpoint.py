"""Checkpoint: everything a loop needs to resume in another process as if it had never stopped.

A checkpoint is TensorFlow's: variables and the iterator of a tf.data pipeline by name, and one string with all Python
state. It is complete or absent, since `tf.train.CheckpointManager` lists it only after it is written.

A snapshot is taken between two steps and written during the next ones. That of a variable is a reference to its value,
which TensorFlow copies on write.
"""

from __future__ import annotations

import collections
import os
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from coexec.training.checkpoint import random_state
from coexec.training.checkpoint.checkpoint_writer import CheckpointWriter
from tracer.private import Trackable

FORMAT = 1
_PYTHON = "python/.ATTRIBUTES/py_state"


class CheckpointError(RuntimeError):
    """No checkpoint in a directory can be used; the message says why, for each.

    The directory is another program's, other objects were saved, or files are damaged. Name another directory, pass the
    objects that were saved, or remove the directory to start over.
    """


class Saved(NamedTuple):
    """A usable checkpoint: its path, and its Python state."""

    path: str
    python: dict[str, Any]


class Checkpoint:
    """Saves objects in a directory and restores them: those of TensorFlow, Keras and Python, with all random states.

        coexec.loop(data, checkpoint=coexec.Checkpoint("runs/1", every=100, model=model, optimizer=optimizer, log=log))

    Args:
      directory: created if missing. Contents are Python pickles: restore only what you trust.
      every: the number of steps between checkpoints, each written while the next steps run, at most one at a time;
        None: one at the end of each epoch.
      keep: how many checkpoints to keep; older ones are removed.
      **objects: models, layers, optimizers, metrics, modules, variables, random generators; lists, dicts, sets, deques
        and arrays, which are filled in place; and anything with `state_dict` and `load_state_dict`. Models and
        optimizers must be built (`optimizer.build(model.trainable_variables)`) before saving and restoring.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, every: int | None = None, keep: int = 3, **objects: Any
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every is a number of steps from 1 on, or None, not {every}")
        self.directory = os.fspath(directory)
        self.every, self.keep = every, keep
        self.objects = dict(objects)
        self.writer = CheckpointWriter()
        for name, value in objects.items():
            if not has_state(value):
                raise TypeError(
                    f"{name} is a {type(value).__name__}, of which a checkpoint knows no state. Give it methods "
                    "state_dict and load_state_dict, or keep its state in lists, dicts, arrays or variables."
                )

    def keeping(self, **more: Any) -> Checkpoint:
        """Returns a checkpoint of the same directory that saves these objects, too."""
        return Checkpoint(self.directory, every=self.every, keep=self.keep, **self.objects, **more)

    def save(self, step: int, position: Any = None, iterator: Any = None) -> None:
        """Takes a snapshot of everything, and writes it in the background; `wait` waits for that.

        `load` returns `position`, and restores a tf.data `iterator`. Raises `WriteError` if the previous checkpoint
        could not be written.
        """
        self.wait()
        python = {
            "format": FORMAT,
            "position": position,
            "random": random_state.capture(),
            "states": {n: _state_of(v)[0] for n, v in self.objects.items() if _variables_of(v) is None},  # type: ignore[index]
            "variables": self._signature(),
        }
        try:
            taken = self._values(pickle.dumps(python), iterator, _Taken)
        except tf.errors.FailedPreconditionError as error:
            raise TypeError(
                "the dataset holds Python code (from_generator, py_function), whose state TensorFlow cannot save: give "
                "coexec.loop a Python iterable with state_dict and load_state_dict instead"
            ) from error

        def write() -> None:
            tf.train.CheckpointManager(taken, self.directory, self.keep).save(checkpoint_number=step)

        self.writer.write(f"the checkpoint of step {step} in {self.directory}", write)

    def wait(self) -> None:
        """Waits until the checkpoint taken last is written; raises `WriteError` if that failed."""
        self.writer.wait()

    def find(self) -> Saved | None:
        """Returns the latest usable checkpoint, after reading all of it; None if there is none.

        Warns about unusable ones; raises `CheckpointError` if there are no others.
        """
        self.wait()
        state = tf.train.get_checkpoint_state(self.directory)
        paths = list(state.all_model_checkpoint_paths)[::-1] if state is not None else []
        refused = []
        for path in paths:
            try:
                saved = Saved(path, self._read(path))
            except CheckpointError as error:
                refused.append(f"{path}: {error}")
                continue
            for reason in refused:
                warnings.warn(f"a checkpoint is passed over for the one before: {reason}", stacklevel=2)
            return saved
        if refused:
            raise CheckpointError("no checkpoint can be used\n  " + "\n  ".join(refused))
        return None

    def load(self, saved: Saved, iterator: Any = None) -> Any:
        """Restores everything; returns the position."""
        status = self._values(b"", iterator).read(saved.path)
        status.assert_existing_objects_matched()
        for name, state in saved.python["states"].items():
            _put_back(self.objects[name], state)
        random_state.restore(saved.python["random"])
        return saved.python["position"]

    def _values(
        self, python: bytes, iterator: Any, form: Callable[[Any], Any] = lambda value: value
    ) -> tf.train.Checkpoint:
        """Returns all values by name, as TensorFlow writes and reads them, each wrapped by `form`."""
        variables = {name: _variables_of(value) for name, value in self.objects.items()}
        kept = {name: {k: form(v) for k, v in _numbered(found)} for name, found in variables.items() if found}
        more = {} if iterator is None else {"iterator": form(iterator)}
        return tf.train.Checkpoint(python=_Text(python), variables=kept, **more)

    def _signature(self) -> dict[str, list[tuple[Any, str]]]:
        """Returns the shapes and dtypes of all variables, by object."""
        found = {name: _variables_of(value) for name, value in self.objects.items()}
        return {
            name: [(tuple(v.shape), tf.as_dtype(v.dtype).name) for v in variables]
            for name, variables in found.items()
            if variables is not None
        }

    def _read(self, path: str) -> dict[str, Any]:
        """Reads a whole checkpoint, which verifies its checksums; returns its Python state."""
        try:
            reader = tf.train.load_checkpoint(path)
            kinds = reader.get_variable_to_dtype_map()
            if _PYTHON not in kinds:
                raise CheckpointError("it was not written by coexec.Checkpoint")
            for name, kind in kinds.items():
                tf.raw_ops.RestoreV2(prefix=path, tensor_names=[name], shape_and_slices=[""], dtypes=[kind])
            python = pickle.loads(reader.get_tensor(_PYTHON))
        except CheckpointError:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"it is damaged or incomplete ({reason})") from error
        if python.get("format") != FORMAT:
            raise CheckpointError(f"its format is {python.get('format')}, this is {FORMAT}")
        self._compare(python)
        known: dict[str, Any] = python
        return known

    def _compare(self, python: dict[str, Any]) -> None:
        """Raises `CheckpointError` unless a checkpoint holds this program's objects, with the same variables."""
        there = {**python["variables"], **dict.fromkeys(python["states"])}
        if there.keys() != self.objects.keys():
            raise CheckpointError(f"it holds {sorted(there)}, and is to hold {sorted(self.objects)}")
        signature = self._signature()
        for name, saved in there.items():
            mine = signature.get(name)
            if saved is None and mine is None:
                continue
            if saved is None or mine is None:
                raise CheckpointError(f"{name} has variables or had some: it was, or is, an object of Python only")
            if len(saved) != len(mine):
                raise CheckpointError(
                    f"{name} has {len(mine)} variables, and had {len(saved)}: build it before it is brought back "
                    "(optimizer.build(model.trainable_variables); call the model, or give it an Input)"
                )
            if saved != mine:
                one, other = next((a, b) for a, b in zip(saved, mine, strict=True) if a != b)
                raise CheckpointError(f"a variable of {name} is {other[1]}{other[0]}, and was {one[1]}{one[0]}")


class _Taken(Trackable):
    """The snapshot of a variable or a tf.data iterator, written under its holder's name."""

    def __init__(self, holder: Any) -> None:
        if isinstance(holder, tf.Variable):
            self._tensors = {"VARIABLE_VALUE": holder.read_value()}
        else:
            self._tensors = holder._serialize_to_tensors()
            self._LEGACY_SAVEABLE_NAME = holder._LEGACY_SAVEABLE_NAME  # part of the names

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return self._tensors


class _Text(tf.train.experimental.PythonState):
    """The Python state, as TensorFlow stores it."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    def serialize(self) -> bytes:
        """Returns the text."""
        return self.text

    def deserialize(self, text: bytes) -> None:
        """Sets the text."""
        self.text = text


def has_state(value: Any) -> bool:
    """Returns whether a checkpoint can save this object."""
    return _variables_of(value) is not None or _state_of(value) is not None


def _numbered(variables: list[Any]) -> list[tuple[str, Any]]:
    return [(f"{number:05d}", v.value if isinstance(v, keras.Variable) else v) for number, v in enumerate(variables)]


def _variables_of(value: Any) -> list[Any] | None:
    """Returns the variables that make up an object's state; None if it is not TensorFlow's or Keras'."""
    if isinstance(value, (tf.Variable, keras.Variable)):
        return [value]
    if isinstance(value, (tf.random.Generator, keras.random.SeedGenerator)):
        return [value.state]
    kinds = (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, tf.Module)
    return list(value.variables) if isinstance(value, kinds) else None


def _state_of(value: Any) -> tuple[Any] | None:
    """Returns a Python object's state, in a tuple; None if it has no known state."""
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return (value.state_dict(),)
    if isinstance(value, random.Random):
        return (value.getstate(),)
    if isinstance(value, np.random.Generator):
        return (value.bit_generator.state,)
    return (value,) if isinstance(value, (list, dict, set, collections.deque, np.ndarray)) else None


def _put_back(value: Any, state: Any) -> None:
    if hasattr(value, "load_state_dict"):
        value.load_state_dict(state)
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, np.ndarray):
        value[...] = state
    else:
        value.clear()
        value.extend(state) if hasattr(value, "extend") else value.update(state)
