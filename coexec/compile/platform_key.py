"""Platform key: digests of what compiled code and its speed depend on besides the program; cache keys on disk."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys

import keras
import numpy as np
import tensorflow as tf

VERSION = 1  # of the entries' format

# Lines of /proc/cpuinfo that machine code depends on; others change over time, such as clock rates.
_CPU_LINES = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")


@functools.cache
def environment() -> str:
    """Returns a digest of versions, machine, devices and flags, equal in all processes that may share code."""
    flags = {k: v for k, v in os.environ.items() if k.startswith(("XLA_", "TF_")) and not k.startswith("TF_CPP_")}
    gpus = tf.config.list_physical_devices("GPU")
    parts = (
        VERSION,
        *(tf.version.VERSION, tf.version.GIT_VERSION, np.__version__, keras.__version__),
        *(sys.implementation.cache_tag, platform.python_version(), sys.byteorder),
        *(platform.system(), platform.machine(), _cpu(), sorted(os.sched_getaffinity(0))),
        sorted(flags.items()),
        [sorted(map(str, tf.config.experimental.get_device_details(gpu).items())) for gpu in gpus],
    )
    return digest(repr(parts).encode())


def circumstances(device: str | None) -> str:
    """Returns a digest of settings that XLA's code depends on and that a program may change while it runs."""
    threads = tf.config.threading
    parts = (
        device,
        threads.get_intra_op_parallelism_threads(),
        threads.get_inter_op_parallelism_threads(),
        tf.config.experimental.tensor_float_32_execution_enabled(),
    )
    return digest(repr(parts).encode())[:8]


def digest(data: bytes) -> str:
    """Returns a 128-bit hash of the data, as 32 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:32]


def _cpu() -> list[str]:
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read().partition("\n\n")[0]
    except OSError:
        return [platform.processor()]
    return [line for line in first.splitlines() if line.startswith(_CPU_LINES)]
