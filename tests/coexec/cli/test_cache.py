"""`python -m coexec cache`: lists what is on disk, and deletes it."""

import json

import pytest

from coexec import __main__
from coexec.cli import cache
from coexec.compile import disk_store


@pytest.fixture
def kept(monkeypatch, tmp_path):
    made = disk_store.Store(str(tmp_path), "0" * 32)
    monkeypatch.setattr(cache, "store", lambda: made)
    return made


def test_entries_are_listed(kept, capsys):
    """With their kind and size, and whether this process would use them."""
    assert kept.write("one.choice", b"12345")
    assert disk_store.Store(kept.root, "1" * 32).write("two.0.code", b"67")
    assert __main__.main(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert "one.choice: a choice of backend, 46 bytes\n" in out
    assert "two.0.code: XLA's code, 43 bytes, of other versions, flags or devices\n" in out
    assert out.endswith(f"2 entries, 89 bytes in {kept.root}\n")
    assert __main__.main(["cache", "list", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert sorted((entry["name"], entry["size"]) for entry in entries) == [("one.choice", 46), ("two.0.code", 43)]


def test_entries_are_deleted(kept, capsys):
    assert kept.write("one.choice", b"12345")
    assert __main__.main(["cache", "clear"]) == 0
    assert kept.entries() == []
    assert kept.read("one.choice") is None
    assert capsys.readouterr().out == f"1 entries deleted from {kept.root}\n"


def test_a_cache_that_is_off(monkeypatch, capsys):
    monkeypatch.setattr(cache, "store", lambda: None)
    assert __main__.main(["cache", "list"]) == 0
    assert "COEXEC_CACHE_DIR is off" in capsys.readouterr().out
