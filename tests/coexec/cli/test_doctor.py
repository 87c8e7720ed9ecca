"""`python -m coexec doctor`: all is well here, and each planted fault is found, with its fix."""

import json

import pytest
import tensorflow as tf

from coexec import __main__
from coexec.cli import doctor
from coexec.compile import disk_store
from tracer import hooks, private


def found(name, state):
    """The findings of a check that are of this kind; each says how to mend it."""
    symptoms = [s for s in doctor.symptoms() if s.check == name and s.state == state]
    assert all(s.fix for s in symptoms)
    return symptoms


def only(monkeypatch, *checks):
    monkeypatch.setattr(doctor, "CHECKS", checks)


def test_all_is_well_here(capsys):
    """Followed and compiled programs give eager's values on each device; the exit status is 0."""
    assert __main__.main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not [symptom for symptom in told if symptom["state"] == "broken"]
    checks = {symptom["check"] for symptom in told}
    assert checks >= {"python", "tensorflow", "keras", "numpy", "private parts", "gpu", "xla on CPU:0",
                      "following on CPU:0", "xla flags", "cache", "threads"}  # fmt: skip


def test_findings_come_with_their_fix_and_status_1(monkeypatch, capsys):
    only(monkeypatch, doctor.versions)
    monkeypatch.setattr(tf, "__version__", "2.99.0")
    assert __main__.main(["doctor"]) == 1
    assert "broken tensorflow: 2.99.0\n       fix: pip install 'tensorflow==2.21.*'\n" in capsys.readouterr().out


def test_another_python(monkeypatch):
    only(monkeypatch, doctor.versions)
    monkeypatch.setattr(doctor.sys, "version_info", (3, 9, 1))
    assert [s.found for s in found("python", "broken")] == ["3.9"]


def test_a_private_part_that_is_gone(monkeypatch):
    only(monkeypatch, doctor.reliances)
    assert not found("private parts", "broken")
    monkeypatch.setattr(private, "record", None)
    (symptom,) = found("private parts", "broken")
    assert symptom.found == "missing: record"


def test_no_hook_stays_behind(monkeypatch):
    only(monkeypatch, doctor.reliances)
    before = [len(each.entries()) for each in hooks.registry]
    doctor.symptoms()
    assert [len(each.entries()) for each in hooks.registry] == before


@pytest.fixture
def gpu(monkeypatch):
    """A machine that TensorFlow finds a GPU in, and nothing of CUDA's."""
    only(monkeypatch, doctor.devices)
    monkeypatch.setattr(doctor.tf.config, "list_physical_devices", lambda kind: ["GPU:0"])
    monkeypatch.setattr(doctor, "cuda_roots", list)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr(doctor.sys, "path", [])
    monkeypatch.setenv("LD_LIBRARY_PATH", "")


def test_a_gpu_without_its_tools(gpu):
    assert len(found("libdevice", "broken")) == len(found("ptxas", "broken")) == 1


@pytest.mark.parametrize("where", ["pip", "loader", "path"])
def test_libraries_that_are_missing_are_named(gpu, monkeypatch, tmp_path, where):
    """Wherever the others are."""
    (symptom,) = found("cuda libraries", "slow")
    assert symptom.found == "not found: cudart, cublas, cudnn, cufft, cusolver, cusparse"
    there = set(doctor.LIBRARIES) - {"cudnn"}
    for name in there:
        folder = tmp_path / "nvidia" / name / "lib" if where == "pip" else tmp_path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"lib{name}.so.12").touch()
    if where == "pip":
        monkeypatch.setattr(doctor.sys, "path", [str(tmp_path)])
    elif where == "path":
        monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    else:
        monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: name if name in there else None)
    (symptom,) = found("cuda libraries", "slow")
    assert symptom.found == "not found: cudnn"
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: name)
    assert not found("cuda libraries", "slow")


def test_a_gpu_with_its_tools(gpu, monkeypatch, tmp_path):
    for path in ("nvvm/libdevice/libdevice.10.bc", "bin/ptxas"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    monkeypatch.undo()
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_cuda_data_dir={tmp_path} --other")
    assert doctor.cuda_roots()[0] == tmp_path
    monkeypatch.setattr(doctor.tf.config, "list_physical_devices", lambda kind: ["GPU:0"])
    monkeypatch.setattr(doctor, "has_library", lambda name: True)
    only(monkeypatch, doctor.devices)
    assert [s.state for s in doctor.symptoms() if s.check != "driver"] == ["ok"] * 4


def test_a_driver_that_tensorflow_does_not_use(monkeypatch, tmp_path):
    only(monkeypatch, doctor.devices)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(doctor.tf.config, "list_physical_devices", lambda kind: [])
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15\nGCC version: 12\n")
    monkeypatch.setattr(doctor, "has_library", lambda name: name != "cublas")
    (symptom,) = found("gpu", "slow")
    assert symptom.found == "there is a driver, but TensorFlow finds no GPU; not found: cublas"
    assert [s.found for s in doctor.symptoms() if s.check == "driver"] == [
        "NVIDIA UNIX x86_64 Kernel Module  550.54.15"
    ]


@pytest.mark.parametrize("how", ["raises", "is wrong"])
def test_a_compiler_that_does_not_work(monkeypatch, how):
    """What XLA raises, or gives otherwise than eager, is told; the other checks go on."""
    original = tf.function

    def planted(function, jit_compile=False):
        if function is not doctor._program:
            return original(function, jit_compile=jit_compile)
        if how == "is wrong":
            return lambda x: 1e6
        raise_it = tf.errors.InternalError(None, None, "libdevice not found")

        def run(x):
            raise raise_it

        return run

    only(monkeypatch, doctor.compilers)
    monkeypatch.setattr(doctor.tf, "function", planted)
    (symptom,) = found("xla on CPU:0", "broken")
    assert ("libdevice not found" in symptom.found) == (how == "raises")
    assert not found("following on CPU:0", "broken")


def test_flags_that_were_taken_back(monkeypatch):
    only(monkeypatch, doctor.compilers)
    assert not found("xla flags", "broken")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    (symptom,) = found("xla flags", "broken")
    assert "--xla_dump_to=/nowhere" in symptom.found


def test_a_cache_that_others_may_write(monkeypatch, tmp_path):
    only(monkeypatch, doctor.disk)
    assert [s.found for s in found("cache", "slow")] == ["off: every process compiles anew"]
    kept = disk_store.Store(str(tmp_path), "0" * 32)
    monkeypatch.setattr(doctor, "store", lambda: kept)
    assert [s.state for s in doctor.symptoms()] == ["ok"]
    assert kept.entries() == []
    tmp_path.chmod(0o777)
    (symptom,) = found("cache", "slow")
    assert "is open to others (mode 777)" in symptom.found


@pytest.mark.parametrize(
    ("name", "value"), [("OMP_NUM_THREADS", "1"), ("TF_NUM_INTRAOP_THREADS", "1"), ("OMP_PROC_BIND", "true")]
)
def test_settings_that_leave_cores_idle(monkeypatch, name, value):
    only(monkeypatch, doctor.threads)
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: range(8))
    for each in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "OMP_PROC_BIND"):
        monkeypatch.delenv(each, raising=False)
    assert not found("threads", "slow")
    monkeypatch.setenv(name, value)
    (symptom,) = found("threads", "slow")
    assert name in symptom.found
    assert symptom.fix == f"unset {name}"


def test_a_check_that_fails_is_a_finding(monkeypatch):
    def broken():
        raise KeyError("planned")

    only(monkeypatch, broken, doctor.threads)
    assert [s.check for s in doctor.symptoms()] == ["broken", "threads"]
