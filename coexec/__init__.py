"""coexec: runs imperative TensorFlow programs at compiled speed, with their Python unchanged."""

from tracer import versions as _versions

try:
    from coexec.api import Function, clear, explain, function, pure, register_library, report
    from coexec.base.modes import debug_nans, fail_on_divergence, fail_on_retrace, imperative, opaque, validate
    from coexec.base.options import Divergence
    from coexec.base.stats import Stats
    from coexec.debug.nan_watch import NonFiniteError
    from coexec.dispatch.padding import dynamic
    from coexec.export.export import ExportError
    from coexec.notebook import load_ipython_extension as load_ipython_extension
    from coexec.notebook import unload_ipython_extension as unload_ipython_extension
    from coexec.training.checkpoint.checkpoint import Checkpoint, CheckpointError
    from coexec.training.checkpoint.checkpoint_writer import WriteError
    from coexec.training.keras.accelerate import accelerate
    from coexec.training.loop.loop import Loop, loop
    from coexec.training.loop.trainer import Trainer
except (AttributeError, ImportError) as error:
    if _versions.UNTESTED:  # which lacks even what functions that run plainly need
        raise ImportError(f"coexec cannot be imported: {error}. {_versions.advice()}") from error
    raise
_versions.warn_if_untested()

__all__ = [
    "Checkpoint", "CheckpointError", "Divergence", "ExportError", "Function", "Loop", "NonFiniteError", "Stats",
    "Trainer", "WriteError", "accelerate", "clear", "debug_nans", "dynamic", "explain", "fail_on_divergence",
    "fail_on_retrace", "function", "imperative", "loop", "opaque", "pure", "register_library", "report",
    "validate",
]  # fmt: skip
__version__ = "0.1.0"
