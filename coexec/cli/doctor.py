"""`doctor`: finds what keeps coexec from working, or from being fast, on this machine, and says how to fix it."""

from __future__ import annotations

import argparse
import ctypes.util
import dataclasses
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from coexec.api import function
from coexec.compile.disk_store import store
from coexec.testing import compile_everything
from tracer import hooks, intercept, private
from tracer.versions import KERAS, TESTED, has_tested_keras, is_tested

PYTHONS = (3, 10), (3, 13)
DRIVER = Path("/proc/driver/nvidia/version")
LIBRARIES = ("cudart", "cublas", "cudnn", "cufft", "cusolver", "cusparse")
OK, SLOW, BROKEN = "ok", "slow", "broken"


@dataclass(frozen=True)
class Symptom:
    """One finding: its check, how bad it is, what was found, and the fix, if one is needed."""

    check: str
    state: str  # "ok", "slow" (it works), or "broken"
    found: str
    fix: str = ""


def versions() -> Iterator[Symptom]:
    """Python, TensorFlow, Keras and NumPy against what is supported."""
    python = sys.version_info[:2]
    right = PYTHONS[0] <= python <= PYTHONS[1]
    fix = "" if right else "use Python 3.10 to 3.13"
    yield Symptom("python", OK if right else BROKEN, ".".join(map(str, python)), fix)
    for name, fits, wanted in (
        ("tensorflow", is_tested, f"=={TESTED[-1]}.*"),
        ("keras", has_tested_keras, f">={KERAS[0]}.{KERAS[1]},<{KERAS[0] + 1}"),
        ("numpy", bool, ""),
    ):
        found = version_of(name)
        right = fits(found)
        fix = "" if right else f"pip install '{name}{wanted}'"
        yield Symptom(name, OK if right else BROKEN, found or "not installed as a package", fix)


def version_of(name: str) -> str:
    """Returns the version of what is imported by this name."""
    module = sys.modules.get(name)
    try:
        return str(getattr(module, "__version__", "") or importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return ""


def reliances() -> Iterator[Symptom]:
    """The private parts of TensorFlow and Keras that coexec relies on, and the hooks that it puts there."""
    gone = [name for name in private.__all__ if getattr(private, name, None) is None]
    gone += [f"{target.__name__}.{name}" for target, name in _hooked() if not hasattr(target, name)]
    fix = f"install TensorFlow as it was released: pip install --force-reinstall 'tensorflow=={TESTED[-1]}.*'"
    if gone:
        yield Symptom("private parts", BROKEN, f"missing: {', '.join(gone)}", fix)
    else:
        yield Symptom("private parts", OK, f"{len(private.__all__)} there, {len(hooks.registry)} hooks registered")


def _hooked() -> list[tuple[Any, str]]:
    intercept.hold()
    try:
        return [entry for each in hooks.registry for entry in each.entries()]
    finally:
        intercept.release()


def devices() -> Iterator[Symptom]:
    """GPUs, their driver, CUDA's libraries, and what XLA needs: libdevice and ptxas."""
    gpus, built = tf.config.list_physical_devices("GPU"), tf.sysconfig.get_build_info()
    if DRIVER.is_file():
        yield Symptom("driver", OK, DRIVER.read_text().partition("\n")[0].partition(": ")[2].strip() or "there")
    if not gpus:
        if DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "-1":
            missing = ", ".join(name for name in LIBRARIES if not has_library(name))
            found = f"there is a driver, but TensorFlow finds no GPU{f'; not found: {missing}' if missing else ''}"
            fix = "pip install 'tensorflow[and-cuda]', and look for what TensorFlow cannot load in its log"
            yield Symptom("gpu", SLOW, found, fix)
        else:
            yield Symptom("gpu", OK, "none: the CPU is used")
        return
    cuda = f"CUDA {built.get('cuda_version', '?')}, cuDNN {built.get('cudnn_version', '?')}"
    yield Symptom("gpu", OK, f"{len(gpus)}; TensorFlow is built for {cuda}")
    missing = ", ".join(name for name in LIBRARIES if not has_library(name))
    fix = "pip install 'tensorflow[and-cuda]', or have ldconfig or LD_LIBRARY_PATH find CUDA's libraries"
    there = f"lib{', lib'.join(LIBRARIES)}"
    yield Symptom(
        "cuda libraries", SLOW if missing else OK, f"not found: {missing}" if missing else there, fix if missing else ""
    )
    for name, path in (("libdevice", "nvvm/libdevice/libdevice.10.bc"), ("ptxas", "bin/ptxas")):
        found = next((str(root / path) for root in cuda_roots() if (root / path).is_file()), "")
        found = found or (shutil.which("ptxas") or "" if name == "ptxas" else "")
        fix = "pip install 'tensorflow[and-cuda]', or XLA_FLAGS=--xla_gpu_cuda_data_dir=/path/of/cuda"
        yield Symptom(name, OK if found else BROKEN, found or "not found", "" if found else fix)


def has_library(name: str) -> bool:
    """Returns whether one of CUDA's libraries is where TensorFlow looks: installed by pip, or known to the loader."""
    folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for folder in sys.path:
        folders += Path(folder).glob("nvidia/*/lib")
    folders += [root / "lib64" for root in cuda_roots()]
    return any(any(folder.glob(f"lib{name}.so*")) for folder in folders) or bool(ctypes.util.find_library(name))


def cuda_roots() -> list[Path]:
    """Returns the folders in which XLA looks for CUDA's files, most specific first."""
    flags = dict(flag.split("=", 1) for flag in os.environ.get("XLA_FLAGS", "").split() if "=" in flag)
    given = [flags.get("--xla_gpu_cuda_data_dir", ""), os.environ.get("CUDA_HOME", "")]
    installed = [Path(folder) / "nvidia" / "cuda_nvcc" for folder in sys.path]
    return [*(Path(each) for each in given if each), *installed, Path("/usr/local/cuda"), Path("/opt/cuda")]


def compilers() -> Iterator[Symptom]:
    """A small program on each device: by XLA, and followed, both against eager."""
    for device in tf.config.list_logical_devices():
        if device.device_type not in ("CPU", "GPU"):
            continue
        name = f"{device.device_type}:{device.name.rpartition(':')[2]}"
        with tf.device(device.name):
            fix = "see TensorFlow's log; a GPU needs libdevice and ptxas; or coexec.function(jit_compile=False)"
            yield _compared(f"xla on {name}", tf.function(_program, jit_compile=True), fix)
            followed = function(name="doctor", jit_compile=False)(_program)
            with compile_everything():
                for _ in range(3):
                    followed(tf.ones([4]))
                yield _compared(f"following on {name}", followed, "report it, with this output")
    flags = os.environ.get("XLA_FLAGS", "")
    nan = tf.function(lambda x: tf.maximum(x, 1.0), jit_compile=True)(tf.constant([float("nan"), 2.0]))
    fix = "import coexec before TensorFlow's first operation, and set XLA_FLAGS before that, or not at all"
    if bool(tf.math.is_nan(nan[0])) and "--xla_cpu_enable_fast_min_max=false" in flags:
        yield Symptom("xla flags", OK, flags)
    else:
        yield Symptom("xla flags", BROKEN, f"changed too late, or taken back: XLA_FLAGS={flags!r}", fix)


def _program(x: Any) -> Any:
    for _ in range(4):
        x = tf.tanh(x) * 1.5 + 0.25
    return tf.reduce_sum(x)


def _compared(check: str, compiled: Callable[[Any], Any], fix: str) -> Symptom:
    given = tf.ones([4])
    try:
        found, expected = float(compiled(given)), float(_program(given))
    except Exception as error:  # whatever a compiler raises is the finding
        return Symptom(check, BROKEN, f"{type(error).__name__}: {str(error)[:200]}", fix)
    if abs(found - expected) > 1e-4 * abs(expected):
        return Symptom(check, BROKEN, f"gives {found}, eager {expected}", fix)
    return Symptom(check, OK, "as eager")


def disk() -> Iterator[Symptom]:
    """Whether what is compiled can be kept for later processes."""
    kept = store()
    if kept is None:
        yield Symptom("cache", SLOW, "off: every process compiles anew", "unset COEXEC_CACHE_DIR")
        return
    why = kept.why_not_writable()
    fix = f"make {kept.root} a directory of your own, with mode 0700, or name another in COEXEC_CACHE_DIR"
    yield Symptom("cache", SLOW if why else OK, why or kept.root, fix if why else "")


def threads() -> Iterator[Symptom]:
    """Settings that leave cores idle."""
    cores, allowed = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    found = False
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
        given = os.environ.get(name, "")
        if given.isdigit() and 0 < int(given) < allowed:
            found = True
            yield Symptom("threads", SLOW, f"{name}={given}, of {allowed} cores", f"unset {name}")
    if os.environ.get("OMP_PROC_BIND", "false").lower() not in ("false", ""):
        found = True
        text = f"OMP_PROC_BIND={os.environ['OMP_PROC_BIND']} ties TensorFlow's threads to few cores"
        yield Symptom("threads", SLOW, text, "unset OMP_PROC_BIND")
    if not found:
        yield Symptom("threads", OK, f"{allowed} of {cores} cores")


CHECKS = (versions, reliances, devices, compilers, disk, threads)


def symptoms() -> list[Symptom]:
    """Runs all checks; one that fails itself is a finding."""
    found: list[Symptom] = []
    for check in CHECKS:
        try:
            found += check()
        except Exception as error:  # the other checks still run
            text = f"the check failed: {type(error).__name__}: {str(error)[:200]}"
            found.append(Symptom(check.__name__, BROKEN, text, "report it, with this output"))
    return found


def add(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser("doctor", help="check versions, devices, compilers, cache and settings")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints all findings, each with its fix; the exit status is 1 if something is broken."""
    found = symptoms()
    if options.json:
        print(json.dumps([dataclasses.asdict(symptom) for symptom in found]))
    else:
        for symptom in found:
            print(f"{symptom.state:6} {symptom.check}: {symptom.found}")
            if symptom.fix:
                print(f"       fix: {symptom.fix}")
    return int(any(symptom.state == BROKEN for symptom in found))
