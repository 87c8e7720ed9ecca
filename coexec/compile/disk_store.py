"""Disk store: entries that outlive the process, in files that only this user can write.

An entry is used only if this user owns its directory and file, no other user may write to them, and its digest matches;
otherwise it counts as missing. Entries are bytes, never unpickled or executed by Python. If the disk is full or
read-only, nothing is stored, without an error.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

from coexec.base.tuning import tuning
from coexec.compile.platform_key import environment

_log = logging.getLogger("coexec")
_MAGIC = b"coexec 1\n"
_numbers = itertools.count()


class StoredEntry(NamedTuple):
    """One stored entry, as `Store.entries` lists it."""

    name: str
    environment: str
    size: int  # in bytes, of the file
    used: float  # seconds since the epoch


class Store:
    """Entries by name, in the directory `environment` inside `root`; safe to use from several processes at once."""

    def __init__(self, root: str, environment: str) -> None:
        self.root = root
        self.environment = environment
        self._writable = True
        self._unchecked = tuning.store_bytes  # bytes written since the last size check; starts high to force one

    def read(self, name: str) -> bytes | None:
        """Returns the payload stored under this name; None if it is missing or not to be trusted."""
        with contextlib.suppress(OSError), self._directory(create=False) as directory:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
            try:
                found = os.fstat(file)
                regular, mine = stat.S_ISREG(found.st_mode), found.st_uid == os.geteuid()
                if not (regular and mine) or found.st_size > tuning.store_bytes:
                    return None
                with os.fdopen(os.dup(file), "rb") as stream:
                    content = stream.read()
                payload = content[len(_MAGIC) + 32 :]
                if content[: len(_MAGIC) + 32] != _head(name, payload):
                    self.remove(name)
                    return None
                with contextlib.suppress(OSError):  # a read-only disk
                    os.utime(file)  # mark as recently used
                return payload
            finally:
                os.close(file)
        return None

    def write(self, name: str, payload: bytes) -> bool:
        """Stores `payload` under this name atomically; returns whether it could."""
        if not self._writable or len(payload) > tuning.store_bytes // 4:
            return False
        try:
            with self._directory(create=True) as directory:
                self._replace(directory, name, _head(name, payload) + payload)
        except OSError as error:  # the disk is full or read-only, or another user owns the directory
            _log.info("nothing is kept for later processes: %s", error)
            self._writable = False
            return False
        self._unchecked += len(payload)
        if self._unchecked > tuning.store_bytes // 20:
            self._unchecked = 0
            self.evict()
        return True

    def remove(self, name: str) -> None:
        """Deletes an entry, if it exists."""
        with contextlib.suppress(OSError), self._directory(create=False) as directory:
            os.unlink(name, dir_fd=directory)

    def entries(self) -> list[StoredEntry]:
        """Returns what is stored, in all environments, most recently used first."""
        found = [
            StoredEntry(os.path.basename(path), os.path.basename(os.path.dirname(path)), info.st_size, info.st_mtime)
            for path, info in self._files()
            if not path.endswith(".tmp")
        ]
        return sorted(found, key=lambda entry: -entry.used)

    def why_not_writable(self) -> str:
        """Returns why the store is not writable; an empty string if it is."""
        try:
            with self._directory(create=True) as directory:
                self._replace(directory, "probe", _head("probe", b"") + b"")
                os.unlink("probe", dir_fd=directory)
        except OSError as error:
            return str(error)
        return ""

    def clear(self) -> None:
        """Deletes all entries, including those of other environments."""
        for path, _ in self._files():
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._remove_empty()

    def evict(self) -> None:
        """Deletes least recently used entries once there are more than `tuning.store_bytes`, until a fifth is free."""
        found = []
        for path, info in self._files():
            if path.endswith(".tmp"):
                if time.time() - info.st_mtime > tuning.store_abandoned:
                    with contextlib.suppress(OSError):
                        os.unlink(path)
            else:
                found.append((info.st_mtime, info.st_size, path))
        total = sum(size for _, size, _ in found)
        if total <= tuning.store_bytes:
            return
        for _, size, path in sorted(found):
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
            if total <= 0.8 * tuning.store_bytes:
                break
        self._remove_empty()

    def _replace(self, directory: int, name: str, content: bytes) -> None:
        """Writes a file atomically: to a temporary name, then renamed. Raises `OSError`."""
        temporary = f".{os.getpid()}.{next(_numbers)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=directory), "wb") as stream:
            try:
                stream.write(content)
                stream.flush()
                os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                os.unlink(temporary, dir_fd=directory)
                raise

    @contextlib.contextmanager
    def _directory(self, create: bool) -> Iterator[int]:
        """Yields a descriptor of this environment's directory; raises `OSError` if it is missing or not private."""
        if create:
            os.makedirs(self.root, 0o700, exist_ok=True)
        root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _check(root, self.root, 0o022)
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.environment, 0o700, dir_fd=root)
            directory = os.open(self.environment, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)
        finally:
            os.close(root)
        try:
            _check(directory, os.path.join(self.root, self.environment), 0o077)
            yield directory
        finally:
            os.close(directory)

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yields the files of all environments, except other users' and anything not created by a store."""
        for directory in self._environments():
            with contextlib.suppress(OSError), os.scandir(directory) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        info = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
                            yield entry.path, info

    def _environments(self) -> list[str]:
        with contextlib.suppress(OSError), os.scandir(self.root) as entries:
            return [e.path for e in entries if _is_digest(e.name) and e.is_dir(follow_symlinks=False)]
        return []

    def _remove_empty(self) -> None:
        for directory in self._environments():
            with contextlib.suppress(OSError):
                os.rmdir(directory)


def _head(name: str, payload: bytes) -> bytes:
    """Returns a file's header, which includes a digest of its name and payload."""
    return _MAGIC + hashlib.sha256(name.encode() + b"\n" + payload).digest()


def _check(directory: int, path: str, forbidden: int) -> None:
    """Raises `PermissionError` if another user owns the directory, or its mode has a forbidden bit."""
    info = os.fstat(directory)
    if info.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to somebody else")
    if info.st_mode & forbidden:
        raise PermissionError(f"{path} is open to others (mode {stat.S_IMODE(info.st_mode):o})")


def _is_digest(name: str) -> bool:
    return len(name) == 32 and set(name) <= set("0123456789abcdef")


def root_of_store() -> str | None:
    """Returns the store's directory: `COEXEC_CACHE_DIR`, or one in the user's cache directory; None if it is "off"."""
    given = os.environ.get("COEXEC_CACHE_DIR", "")
    if given.lower() in ("off", "0", "no", "none"):
        return None
    if given:
        return os.path.abspath(os.path.expanduser(given))
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification says to ignore relative paths
        base = os.path.expanduser("~/.cache")
    return os.path.join(base, "coexec") if os.path.isabs(base) else None


@functools.cache
def store() -> Store | None:
    """Returns this process's store; None if it is off. The environment variables are read once."""
    root = root_of_store()
    return None if root is None else Store(root, environment())
