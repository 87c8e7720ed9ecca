"""The soak, bounded: its own judgement of memory, and what it finds of caches that are kept small."""

import itertools

import pytest

from coexec import testing
from examples import soak


@pytest.mark.slow
def test_memory_stays_flat(tune, capsys):
    """Many calls, shapes and models leave memory where it was, with caches bounded to be full early."""
    tune(max_executables=20)
    soak.rounds.clear()
    with testing.always_follow():
        assert soak.main(["--calls=1500", "--shapes=200", "--models=40", "--limit=64"]) == 0, capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if line.endswith("flat")] == ["calls", "shapes", "models"]
    assert "MiB" in lines[0]
    assert "followed" in lines[0]


@pytest.mark.parametrize(("leak", "expected"), [(0.0, True), (3.0, False)])
def test_growth_is_found(leak, expected, monkeypatch, capsys):
    """A part whose memory keeps growing is not flat; neither is one of which nothing was followed."""
    numbers = itertools.count()
    monkeypatch.setattr(soak, "resident", lambda: 500.0 + leak * next(numbers))

    class Followed:
        def stats(self):
            return soak.coexec.Stats(followed=1)

    class Unfollowed:
        def stats(self):
            return soak.coexec.Stats()

    assert soak.soak("things", 200, lambda n: (Followed() for _ in range(n)), 20.0) is expected
    assert not soak.soak("things", 200, lambda n: (Unfollowed() for _ in range(n)), 20.0)
    assert ("NOT FLAT" in capsys.readouterr().out.splitlines()[soak.LINES]) is not expected
