"""coexec: imperative TensorFlow programs at the speed of compiled ones, their Python left as it is."""

from coexec.api import Function, clear, function, pure, register_library
from coexec.dynamic import dynamic
from coexec.events import Stats
from coexec.export import ExportError
from coexec.modes import debug_nans, fail_on_divergence, fail_on_retrace, imperative, opaque, validate
from coexec.options import Divergence
from coexec.runtime.watch import NonFiniteError
from coexec.training.accelerate import accelerate
from coexec.training.checkpoint import Checkpoint, CheckpointError
from coexec.training.loop import Loop, loop
from coexec.training.trainer import Trainer
from coexec.training.writer import WriteError

__all__ = [
    "Checkpoint", "CheckpointError", "Divergence", "ExportError", "Function", "Loop", "NonFiniteError", "Stats",
    "Trainer", "WriteError", "accelerate", "clear", "debug_nans", "dynamic", "fail_on_divergence", "fail_on_retrace",
    "function", "imperative", "loop", "opaque", "pure", "register_library",
    "validate",
]  # fmt: skip
__version__ = "0.1.0"
