"""XLA code cache: XLA's machine code, persisted between processes.

TensorFlow has a persistent cache of its own, in a directory named in `TF_XLA_FLAGS`. But it trusts every file there,
and a full disk or a truncated file makes compilation fail, also of other code in the process. So it gets an in-memory
directory, which does not fail; around each compilation code is copied between there and the `disk_store`.

Relies on how TensorFlow names the files: by a hash of the function's name, the shapes and XLA's program. TensorFlow
compares all of those with what it compiles before it uses a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator

import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.compile.disk_store import root_of_store, store
from coexec.compile.platform_key import circumstances
from tracer import hooks
from tracer.private import context, pywrap_tf_session, quiet

_DIRECTORY = "ram://coexec"
# CPU only: on other devices TensorFlow may compile again in order to serialise, and fail if that fails.
_FLAGS = (
    f"--tf_xla_persistent_cache_directory={_DIRECTORY} --tf_xla_persistent_cache_prefix=coexec "
    "--tf_xla_persistent_cache_device_types=CPU"
)
_PROBE = "--tf_xla_disable_constant_folding=true"  # the one flag that can be queried, and reset
_SUFFIX = ".pb"
_seen: dict[str, float] = {}  # files in memory, with the time they were first seen
_lock = threading.Lock()
hooks.held_by_fork(__name__, _lock)


class Code:
    """The outcome of one compilation: whether XLA's code was loaded from disk."""

    def __init__(self) -> None:
        self.loaded = False


def install() -> bool:
    """Makes TensorFlow cache XLA's CPU code in memory; returns whether it does.

    TensorFlow reads its flags once: when the first operation runs, or when a flag is queried.
    """
    flags = os.environ.get("TF_XLA_FLAGS")
    if root_of_store() is None or any(f in (flags or "") for f in ("persistent_cache", "constant_folding")):
        return False
    os.environ["TF_XLA_FLAGS"] = f"{flags or ''} {_FLAGS} {_PROBE}".strip()
    try:
        active = bool(pywrap_tf_session.TF_GetXlaConstantFoldingDisabled())
    finally:  # child processes must not inherit it
        if flags is None:
            del os.environ["TF_XLA_FLAGS"]
        else:
            os.environ["TF_XLA_FLAGS"] = flags
    if active:
        pywrap_tf_session.TF_SetXlaConstantFoldingDisabled(False)
    return active


@contextlib.contextmanager
def kept(function: str) -> Iterator[Code]:
    """Wraps the compilation of the function of this name: loads code of earlier processes, or stores the new code."""
    code, where = Code(), store()
    if where is None or not active:
        yield code
        return
    entry = f"{function}.{circumstances(context.context().device_name)}.code"
    tidy_up()
    before = set(_names())
    given = _unpack(where.read(entry))
    for name, content in (given or {}).items():
        if name not in before:  # an existing file may be in use
            with contextlib.suppress(tf.errors.OpError):
                _put(name, content)
    try:
        # XLA warns that the code needs the CPU feature "prefer-no-scatter", which is only a tuning hint.
        with quiet() if given else contextlib.nullcontext():
            yield code
    except Exception:
        if given:  # XLA rejects it, and would do so next time
            where.write(entry, _pack({}))
        raise
    made = _holding(function, [name for name in _names() if name not in before or name in (given or ())])
    code.loaded = bool(given) and made == given
    if made and made != given and given != {}:
        where.write(entry, _pack(made))


def _put(name: str, content: bytes) -> None:
    """Puts a file into TensorFlow's directory atomically: a partial one would fail a compilation on another thread."""
    temporary = f"{_DIRECTORY}/{threading.get_ident()}.tmp"
    tf.io.gfile.makedirs(_DIRECTORY)
    with tf.io.gfile.GFile(temporary, "wb") as file:
        file.write(content)
    tf.io.gfile.rename(temporary, f"{_DIRECTORY}/{name}", overwrite=True)


def _holding(function: str, names: list[str]) -> dict[str, bytes]:
    """Returns those of these files that hold code of this function; other threads may compile at the same time."""
    found = {}
    for name in names:
        with contextlib.suppress(tf.errors.OpError), tf.io.gfile.GFile(f"{_DIRECTORY}/{name}", "rb") as file:
            content = file.read()
            if function.encode() in content:
                found[name] = content
    return found


def _names() -> list[str]:
    try:
        return [n for n in tf.io.gfile.listdir(_DIRECTORY) if n.endswith(_SUFFIX)]
    except tf.errors.OpError:  # nothing compiled yet, or the flags were read too early
        return []


def tidy_up() -> None:
    """Deletes files that have been in memory for a while: they are on disk by now, or belong to other functions."""
    if not active:
        return
    with _lock:
        now, names = time.monotonic(), _names()
        for name in names:
            if now - _seen.setdefault(name, now) > tuning.code_lingers:
                with contextlib.suppress(tf.errors.OpError):
                    tf.io.gfile.remove(f"{_DIRECTORY}/{name}")
        for name in _seen.keys() - names:
            del _seen[name]


def _pack(files: dict[str, bytes]) -> bytes:
    """Serialises files as one payload: a JSON line of names and sizes, then the contents."""
    head = json.dumps([[name, len(content)] for name, content in files.items()])
    return b"".join([head.encode(), b"\n", *files.values()])


def _unpack(payload: bytes | None) -> dict[str, bytes] | None:
    """Returns the files of a payload from `_pack`; None for None."""
    if payload is None:
        return None
    head, _, body = payload.partition(b"\n")
    files, at = {}, 0
    for name, size in json.loads(head):
        files[name] = body[at : at + size]
        at += size
    return files


hooks.Hooks(
    __name__, "`TF_XLA_FLAGS`, unset again at once", "TensorFlow keeps XLA's code where it is told to", hooks.LASTING
)

# Whether the cache is in effect: not if TensorFlow ran operations before this module was imported.
active = install()
