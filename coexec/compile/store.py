"""Store: what processes leave for later ones, in files that only this user can have written.

An entry counts only if its directory and its file belong to this user, nobody else may write there, and its digest is
right; all else is as if it were not there. Nothing in it is code to Python: entries are bytes, read by those who wrote
them. Where the disk is full or may not be written, nothing is kept, and nobody is bothered.
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

from coexec.compile.environment import environment

_log = logging.getLogger("coexec")
_MAGIC = b"coexec 1\n"
_numbers = itertools.count()

# Once there is more, entries go, those used longest ago first, until a fifth of it is free.
MAX_BYTES = 1 << 29

# Seconds after which a file that somebody began and never finished is removed.
ABANDONED = 3600.0


class Store:
    """Entries by name, in the directory `environment` inside `root`; several processes may use it at the same time."""

    def __init__(self, root: str, environment: str) -> None:
        self.root = root
        self.environment = environment
        self._writable = True
        self._unchecked = MAX_BYTES  # bytes written since the size was last looked at; at first, much

    def read(self, name: str) -> bytes | None:
        """Returns what was written under this name; None if there is nothing that can be trusted."""
        with contextlib.suppress(OSError), self._directory(create=False) as directory:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
            try:
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > MAX_BYTES:
                    return None
                with os.fdopen(os.dup(file), "rb") as stream:
                    content = stream.read()
                payload = content[len(_MAGIC) + 32 :]
                if content[: len(_MAGIC) + 32] != _head(name, payload):
                    self.remove(name)
                    return None
                with contextlib.suppress(OSError):  # on a disk that may only be read
                    os.utime(file)  # used just now
                return payload
            finally:
                os.close(file)
        return None

    def write(self, name: str, payload: bytes) -> bool:
        """Keeps `payload` under this name, at once and as a whole; returns whether that was possible."""
        if not self._writable or len(payload) > MAX_BYTES // 4:
            return False
        try:
            with self._directory(create=True) as directory:
                self._replace(directory, name, _head(name, payload) + payload)
        except OSError as error:  # the disk is full, it may only be read, the directory is somebody else's
            _log.info("nothing is kept for later processes: %s", error)
            self._writable = False
            return False
        self._unchecked += len(payload)
        if self._unchecked > MAX_BYTES // 20:
            self._unchecked = 0
            self.evict()
        return True

    def remove(self, name: str) -> None:
        """Forgets an entry."""
        with contextlib.suppress(OSError), self._directory(create=False) as directory:
            os.unlink(name, dir_fd=directory)

    def clear(self) -> None:
        """Forgets all entries, those of other environments, too."""
        for path, _ in self._files():
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._remove_empty()

    def evict(self) -> None:
        """Removes what has not been used for longest, as long as there is more than `MAX_BYTES`."""
        found = []
        for path, info in self._files():
            if path.endswith(".tmp"):
                if time.time() - info.st_mtime > ABANDONED:
                    with contextlib.suppress(OSError):
                        os.unlink(path)
            else:
                found.append((info.st_mtime, info.st_size, path))
        total = sum(size for _, size, _ in found)
        if total <= MAX_BYTES:
            return
        for _, size, path in sorted(found):
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
            if total <= 0.8 * MAX_BYTES:
                break
        self._remove_empty()

    def _replace(self, directory: int, name: str, content: bytes) -> None:
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
        """Gives the directory of this environment, open; raises `OSError` if it is not there, or not private."""
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
        """Yields the files of all environments; what is somebody else's, or was not made here, is left alone."""
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
    """Returns what a file begins with: it holds for this name and these bytes only."""
    return _MAGIC + hashlib.sha256(name.encode() + b"\n" + payload).digest()


def _check(directory: int, path: str, forbidden: int) -> None:
    info = os.fstat(directory)
    if info.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to somebody else")
    if info.st_mode & forbidden:
        raise PermissionError(f"{path} is open to others (mode {stat.S_IMODE(info.st_mode):o})")


def _is_digest(name: str) -> bool:
    return len(name) == 32 and set(name) <= set("0123456789abcdef")


def root_of_store() -> str | None:
    """Returns where entries are kept: `COEXEC_CACHE_DIR`, or the user's cache directory; None if that says "off"."""
    given = os.environ.get("COEXEC_CACHE_DIR", "")
    if given.lower() in ("off", "0", "no", "none"):
        return None
    if given:
        return os.path.abspath(os.path.expanduser(given))
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # as the specification of these variables has it
        base = os.path.expanduser("~/.cache")
    return os.path.join(base, "coexec") if os.path.isabs(base) else None


@functools.cache
def store() -> Store | None:
    """Returns the store of this process; None if there is none. What says where it is, is read once."""
    root = root_of_store()
    return None if root is None else Store(root, environment())
