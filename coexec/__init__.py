"""coexec: imperative TensorFlow programs at the speed of compiled ones, their Python left as it is."""

from coexec.api import Function, clear, function
from coexec.events import Stats
from coexec.options import Divergence

__all__ = ["Divergence", "Function", "Stats", "clear", "function"]
__version__ = "0.1.0"
