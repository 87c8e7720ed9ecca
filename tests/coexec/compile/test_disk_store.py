"""The store on disk: bytes come back as they were written, or not at all; nothing that goes wrong there is an error."""

import errno
import os
import resource
import stat
import time
from pathlib import Path

import pytest

from coexec.base.tuning import tuning
from coexec.compile import backend_choice
from coexec.compile import disk_store as module
from coexec.compile.backend_choice import Choice
from coexec.compile.disk_store import Store, root_of_store
from tests.coexec import in_threads

ENVIRONMENT = "0123456789abcdef" * 2


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "made" / "cache"), ENVIRONMENT)


def path_of(store, name):
    return os.path.join(store.root, store.environment, name)


def files_of(store):
    return sorted(os.path.basename(path) for path, _ in store._files())


def test_what_was_written_is_read(store):
    """In another object, too; the last write counts; other names and environments have nothing."""
    assert store.read("a") is None
    assert store.write("a", b"one")
    assert store.write("a", b"two")
    assert store.write("b", b"")
    again = Store(store.root, ENVIRONMENT)
    assert (again.read("a"), again.read("b"), again.read("c")) == (b"two", b"", None)
    assert Store(store.root, ENVIRONMENT[::-1]).read("a") is None
    store.remove("a")
    store.remove("a")
    assert again.read("a") is None


def test_directories_and_files_are_private(store):
    """Whatever the umask, nobody else may look into what is made."""
    before = os.umask(0)
    try:
        assert store.write("a", b"x")
    finally:
        os.umask(before)
    for path, mode in [(store.root, 0o700), (path_of(store, ""), 0o700), (path_of(store, "a"), 0o600)]:
        assert stat.S_IMODE(os.stat(path).st_mode) == mode


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer", "renamed", "not ours"])
def test_a_damaged_entry_is_ignored_and_removed(store, damage):
    """A file that is not exactly what was written under its name is as if it were not there; it can be written anew."""
    store.write("a", b"some bytes")
    store.write("b", b"other bytes")
    path = path_of(store, "a")
    content, other = (Path(path_of(store, name)).read_bytes() for name in "ab")
    made = {
        "flip": content[:-1] + b"!", "cut": content[:-1], "empty": b"", "longer": content + b"!",
        "renamed": other, "not ours": b"#!/bin/sh\n",
    }  # fmt: skip
    Path(path).write_bytes(made[damage])
    assert store.read("a") is None
    assert files_of(store) == ["b"]
    assert store.write("a", b"new")
    assert store.read("a") == b"new"


def test_files_of_others_are_ignored(store, monkeypatch):
    """What another user owns is neither read nor written over, nor is anything put beside it."""
    store.write("a", b"theirs")
    mine = os.geteuid()
    monkeypatch.setattr(module.os, "geteuid", lambda: mine + 1)
    assert store.read("a") is None
    assert not store.write("a", b"mine")
    monkeypatch.undo()
    assert store.read("a") == b"theirs"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_that_somebody_else_owns(store):
    """A foreign file in a directory of ours counts for nothing."""
    store.write("a", b"x")
    os.chown(path_of(store, "a"), 12345, 12345)
    assert store.read("a") is None
    os.chown(path_of(store, ""), 12345, 12345)
    assert not store.write("b", b"x")


@pytest.mark.parametrize(("which", "mode"), [("root", 0o777), ("root", 0o770), ("inner", 0o755), ("inner", 0o770)])
def test_directories_that_others_may_write_are_not_trusted(store, which, mode):
    """A directory that is open to others is not used, for reading and for writing."""
    store.write("a", b"x")
    os.chmod(store.root if which == "root" else path_of(store, ""), mode)
    assert store.read("a") is None
    assert not store.write("b", b"x")


def test_a_root_that_others_may_read_is_fine(store):
    """The user's own cache directory is often open for reading; what is in it is private."""
    os.makedirs(store.root, 0o755)
    os.chmod(store.root, 0o755)
    assert store.write("a", b"x")
    assert store.read("a") == b"x"


def test_links_are_not_followed(store, tmp_path):
    """Neither an entry nor the directory may be a link to elsewhere."""
    store.write("a", b"x")
    elsewhere = tmp_path / "elsewhere"
    os.rename(path_of(store, "a"), elsewhere)
    os.symlink(elsewhere, path_of(store, "a"))
    assert store.read("a") is None
    assert store.write("a", b"y")  # in its place, not through it
    assert not os.path.islink(path_of(store, "a"))
    assert elsewhere.read_bytes().endswith(b"x")
    os.rename(path_of(store, ""), tmp_path / "moved")
    os.symlink(tmp_path / "moved", os.path.join(store.root, ENVIRONMENT))
    assert store.read("a") is None
    assert not store.write("b", b"x")


def test_pipes_and_directories_in_the_place_of_files(store):
    """Whatever else lies there neither blocks nor raises."""
    store.write("a", b"x")
    os.mkfifo(path_of(store, "pipe"))
    os.mkdir(path_of(store, "directory"))
    assert store.read("pipe") is None
    assert store.read("directory") is None
    assert not store.write("directory", b"x")


def test_a_disk_that_is_full(store):
    """A write that the system refuses is no error; it leaves nothing behind and is not tried again."""
    assert store.write("a", b"kept")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        assert not store.write("b", bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(path_of(store, "")) == ["a"]
    assert store.read("a") == b"kept"
    assert not store.write("c", b"x")  # for the rest of the process
    assert Store(store.root, ENVIRONMENT).write("c", b"x")


def test_a_directory_that_cannot_be_made(tmp_path, monkeypatch):
    """Where there is a file, or only reading is allowed, nothing is kept."""
    (tmp_path / "file").write_text("")
    store = Store(str(tmp_path / "file" / "cache"), ENVIRONMENT)
    assert store.read("a") is None
    assert not store.write("a", b"x")

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(module.os, "mkdir", refuse)
    store = Store(str(tmp_path), ENVIRONMENT)
    assert not store.write("a", b"x")
    assert store.read("a") is None


def test_the_least_recently_used_go(store, tune):
    """Beyond the bound the entries used longest ago go, of all environments; reading counts as use."""
    other = Store(store.root, ENVIRONMENT[::-1])
    assert other.write("old", bytes(900))
    for n in range(8):
        assert store.write(f"n{n}", bytes(900))
    for age, path in enumerate(["n7", "n6", "n5", "n4", "n3", "n2", "n1", "n0"]):
        os.utime(path_of(store, path), (time.time() - 100 - age,) * 2)
    os.utime(path_of(other, "old"), (time.time() - 1000,) * 2)
    assert store.read("n0") is not None
    tune(store_bytes=6000)
    store.evict()
    assert files_of(store) == ["n0", "n4", "n5", "n6", "n7"]
    assert os.listdir(store.root) == [ENVIRONMENT]


def test_what_was_never_finished_is_removed(store):
    """Files that a killed process has begun go after a while, and not before."""
    store.write("a", b"x")
    for name, age in [(".1.0.tmp", 2 * tuning.store_abandoned), (".2.0.tmp", 0)]:
        Path(path_of(store, name)).touch()
        os.utime(path_of(store, name), (time.time() - age,) * 2)
    store.evict()
    assert files_of(store) == [".2.0.tmp", "a"]


def test_clear_leaves_what_is_not_its_own(store):
    """All environments are emptied; other files in the directory stay."""
    store.write("a", b"x")
    Store(store.root, ENVIRONMENT[::-1]).write("b", b"x")
    Path(store.root, "notes").touch()
    store.clear()
    assert os.listdir(store.root) == ["notes"]
    assert store.write("a", b"y")


def test_many_writers(store):
    """Readers see one of the values that were written, as a whole, while others write."""
    values = [bytes([n]) * 50_000 for n in range(4)]
    store.write("a", values[0])

    def write(value):
        own = Store(store.root, ENVIRONMENT)
        return [own.write("a", value) for _ in range(30)]

    def read():
        return {Store(store.root, ENVIRONMENT).read("a") for _ in range(60)}

    *written, seen, more = in_threads(*[lambda v=v: write(v) for v in values], read, read)
    assert all(map(all, written))
    assert seen | more <= set(values)
    assert files_of(store) == ["a"]


@pytest.mark.parametrize(
    ("given", "base", "expected"),
    [
        ("off", None, None), ("OFF", None, None), ("0", None, None), ("/there", None, "/there"),
        ("", "/base", "/base/coexec"), (None, "/base", "/base/coexec"), (None, "relative", "/home/x/.cache/coexec"),
        (None, None, "/home/x/.cache/coexec"), ("~/mine", None, "/home/x/mine"),
    ],
)  # fmt: skip
def test_where_it_is(given, base, expected, monkeypatch):
    """`COEXEC_CACHE_DIR` says where, or that nothing is kept; else it is the user's cache directory."""
    monkeypatch.setenv("HOME", "/home/x")
    for name, value in [("COEXEC_CACHE_DIR", given), ("XDG_CACHE_HOME", base)]:
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert root_of_store() == expected


def test_the_tests_keep_nothing():
    """The cache of whoever runs the tests is left alone."""
    assert root_of_store() is None
    assert module.store() is None


# Choices of backends.


@pytest.fixture
def kept(store, monkeypatch):
    monkeypatch.setattr(backend_choice, "store", lambda: store)
    return store


def test_choices_come_back(kept):
    """A choice is recalled by the segment it was made for."""
    backend_choice.keep("s", Choice("xla", "it is faster"))
    assert backend_choice.recall("s") == Choice("xla", "it is faster")
    assert backend_choice.recall("t") is None


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"{", b"[]", b"null", b'"xla"', b'{"backend": "xla"}', b'{"backend": "gpu", "reason": "", "at": 0}',
        b"\xff", b'{"backend": "xla", "reason": "", "at": "now"}', b'{"backend": "xla", "reason": 1, "at": 1e9}',
    ],
)  # fmt: skip
def test_choices_that_cannot_be_read_are_none(kept, payload):
    """What another version may have written is as if it were not there."""
    kept.write("s.choice", payload)
    assert backend_choice.recall("s") is None


def test_choices_are_made_anew_after_a_while(kept, monkeypatch):
    """What was measured long ago, or in the future, does not count."""
    backend_choice.keep("s", Choice("graph", "it is no slower"))
    now = time.time()
    for then, valid in [(now + tuning.choice_age - 60, True), (now + tuning.choice_age + 60, False), (now - 60, False)]:
        monkeypatch.setattr(backend_choice.time, "time", lambda then=then: then)
        assert (backend_choice.recall("s") is not None) is valid
