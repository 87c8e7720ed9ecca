"""Versions: those of TensorFlow and Keras that coexec is tested with, and what differs between them and NumPy's.

What differs is asked of what is there, not of the number of the version:

* `TFE_DlpackDevice`: since 2.20; before, eager tensors have no `__dlpack_device__`.
* `DT_INT2`, `DT_UINT2`: dtypes since 2.20.
* `stablehlo`, a stage of XLA's program that TensorFlow prints: since 2.19.
* The names of Abseil's functions, which have its release in them: 20230802 up to 2.19, 20250127 in 2.20, 20250814 in
  2.21.
* `byte_bounds`: in `numpy.lib.array_utils` since NumPy 2, in `numpy` before.

With any other version functions run plainly: private parts that it has under the same names may do something else.
Keras before 3.8 lacks some of those parts.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Each is run by `make test-versions`; pyproject.toml allows the same.
TESTED = ("2.18", "2.19", "2.20", "2.21")
KERAS = 3, 8  # the first of its major version; later ones are taken on trust
# Set to 1, calls are followed with whichever version there is: for whoever tries a new one.
VARIABLE = "COEXEC_ANY_TENSORFLOW"

# Abseil's `MinLogLevel` and `SetMinLogLevel`, by the names that they may have.
ABSEIL = [
    [f"_ZN4absl12lts_{release}{name}" for release in ("20250814", "20250127", "20230802")]
    for name in ("11MinLogLevelEv", "14SetMinLogLevelENS0_18LogSeverityAtLeastE")
]

# The first address of an array's data, and the one behind the last.
byte_bounds: Any = getattr(np.lib, "array_utils", np).byte_bounds


def is_tested(version: str) -> bool:
    """Whether this is a release of a tested minor version."""
    return any(version.startswith(f"{tested}.") for tested in TESTED)


def has_tested_keras(version: str) -> bool:
    """Whether this is a release of Keras 3 that has all that is relied on."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return major == str(KERAS[0]) and minor.isdigit() and int(minor) >= KERAS[1]


def _untested() -> str:
    if os.environ.get(VARIABLE, "0") not in ("", "0"):
        return ""
    if not is_tested(tf.__version__):
        return f"TensorFlow {tf.__version__}"
    return "" if has_tested_keras(keras.__version__) else f"Keras {keras.__version__}"


# What functions must run plainly with, or "".
UNTESTED = _untested()


def advice() -> str:
    """Returns what was found, which versions are tested, and what to do."""
    wanted = f"{KERAS[0]}.{KERAS[1]}"
    return (
        f"coexec is tested with TensorFlow {TESTED[0]} to {TESTED[-1]} and Keras from {wanted} on, and this is "
        f"{UNTESTED}. Install what is tested: pip install 'tensorflow=={TESTED[-1]}.*' "
        f"'keras>={wanted},<{KERAS[0] + 1}'; or set {VARIABLE}=1 to try this one, at your own risk"
    )


def warn_if_untested() -> None:
    """Warns that functions run plainly, if they do so because of the version; for the importing line."""
    if UNTESTED:
        warnings.warn(f"co-executed functions run plainly: {advice()}", RuntimeWarning, stacklevel=3)


def present(holder: Any, *names: str) -> list[str]:
    """Returns those of these names that a module or library has in this version."""
    return [name for name in names if hasattr(holder, name)]
