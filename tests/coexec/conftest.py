"""What several files of tests ask for by name."""

import pytest

from coexec.memoize.observe import Observation


@pytest.fixture(params=["graph", "xla"])
def backend(request):
    """Both of what segments are compiled to."""
    return request.param


@pytest.fixture
def eager_to_stage(tune):
    """Loops are written down at their second decision."""
    tune(decision_patience=1)


@pytest.fixture
def observed(monkeypatch):
    """The function of each library call that was observed."""
    seen = []
    original = Observation._conclude

    def conclude(self, *found):
        seen.append(self._region.function)
        return original(self, *found)

    monkeypatch.setattr(Observation, "_conclude", conclude)
    return seen
