"""Machine code: what XLA has compiled, kept between processes.

TensorFlow can keep XLA's code itself, in a directory named in `TF_XLA_FLAGS`. But there it believes every file, and a
disk that is full, or a file cut short, makes compiling fail, that of other code in the process, too. So the directory
that it is given is one in memory, which never fails; code goes from there to the `store`, and from the store to there,
around the very compilation that makes or needs it.

Relies on how TensorFlow names the files: by a hash of the function's name, the shapes and XLA's program. It compares
all of those with what it is to compile before it takes a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator

import tensorflow as tf

from coexec.compile.environment import circumstances
from coexec.compile.store import root_of_store, store
from tracer.private import context, pywrap_tf_session, quiet

_DIRECTORY = "ram://coexec"
# For the CPU only: elsewhere TensorFlow may compile once more for what it keeps, and fail where that fails.
_FLAGS = (
    f"--tf_xla_persistent_cache_directory={_DIRECTORY} --tf_xla_persistent_cache_prefix=coexec "
    "--tf_xla_persistent_cache_device_types=CPU"
)
_PROBE = "--tf_xla_disable_constant_folding=true"  # of all flags the one that can be asked for, and set back
_SUFFIX = ".pb"
_seen: dict[str, float] = {}  # the files in memory, and since when
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)

# Seconds that files stay in memory: another thread may be about to read one.
LINGERING = 60.0


class Code:
    """What became of one compilation: whether XLA's code was there already."""

    def __init__(self) -> None:
        self.loaded = False


def install() -> bool:
    """Has TensorFlow keep XLA's code for the CPU in memory; returns whether it does.

    It reads its flags once: when its first operation runs, if nothing asks for one of them before.
    """
    flags = os.environ.get("TF_XLA_FLAGS")
    if root_of_store() is None or any(f in (flags or "") for f in ("persistent_cache", "constant_folding")):
        return False
    os.environ["TF_XLA_FLAGS"] = f"{flags or ''} {_FLAGS} {_PROBE}".strip()
    try:
        active = bool(pywrap_tf_session.TF_GetXlaConstantFoldingDisabled())
    finally:  # other processes do not inherit it
        if flags is None:
            del os.environ["TF_XLA_FLAGS"]
        else:
            os.environ["TF_XLA_FLAGS"] = flags
    if active:
        pywrap_tf_session.TF_SetXlaConstantFoldingDisabled(False)
    return active


@contextlib.contextmanager
def kept(function: str) -> Iterator[Code]:
    """Lets XLA, which compiles the function of this name inside, use code of earlier processes, or keeps its own."""
    code, where = Code(), store()
    if where is None or not active:
        yield code
        return
    entry = f"{function}.{circumstances(context.context().device_name)}.code"
    tidy_up()
    before = set(_names())
    given = _unpack(where.read(entry))
    for name, content in (given or {}).items():
        if name not in before:  # what is there may be being read
            with contextlib.suppress(tf.errors.OpError):
                _put(name, content)
    try:
        # XLA warns that code was made for machines with "prefer-no-scatter": which is advice to XLA, and no feature.
        with quiet() if given else contextlib.nullcontext():
            yield code
    except Exception:
        if given:  # XLA does not take it, and will not the next time
            where.write(entry, _pack({}))
        raise
    made = _holding(function, [name for name in _names() if name not in before or name in (given or ())])
    code.loaded = bool(given) and made == given
    if made and made != given and given != {}:
        where.write(entry, _pack(made))


def _put(name: str, content: bytes) -> None:
    """Gives TensorFlow a file, at once and as a whole: what another thread compiles fails by a part of one."""
    temporary = f"{_DIRECTORY}/{threading.get_ident()}.tmp"
    tf.io.gfile.makedirs(_DIRECTORY)
    with tf.io.gfile.GFile(temporary, "wb") as file:
        file.write(content)
    tf.io.gfile.rename(temporary, f"{_DIRECTORY}/{name}", overwrite=True)


def _holding(function: str, names: list[str]) -> dict[str, bytes]:
    """Returns those of these files in memory that hold code of this function: others compile at the same time."""
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
    except tf.errors.OpError:  # nothing was compiled, or the flags were read before
        return []


def tidy_up() -> None:
    """Removes from memory what has been there for a while: it is on disk, or of functions that are not ours."""
    if not active:
        return
    with _lock:
        now, names = time.monotonic(), _names()
        for name in names:
            if now - _seen.setdefault(name, now) > LINGERING:
                with contextlib.suppress(tf.errors.OpError):
                    tf.io.gfile.remove(f"{_DIRECTORY}/{name}")
        for name in _seen.keys() - names:
            del _seen[name]


def _pack(files: dict[str, bytes]) -> bytes:
    head = json.dumps([[name, len(content)] for name, content in files.items()])
    return b"".join([head.encode(), b"\n", *files.values()])


def _unpack(payload: bytes | None) -> dict[str, bytes] | None:
    if payload is None:
        return None
    head, _, body = payload.partition(b"\n")
    files, at = {}, 0
    for name, size in json.loads(head):
        files[name] = body[at : at + size]
        at += size
    return files


# Whether TensorFlow heeds all this: not if it has run operations before this module was imported.
active = install()
