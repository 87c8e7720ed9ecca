"""What several files of tests ask for by name."""

import pytest

from coexec.memoize.observe import Observation
from tracer.library import gradient


@pytest.fixture(params=["graph", "xla"])
def backend(request):
    """Both of what segments are compiled to."""
    return request.param


@pytest.fixture
def eager_to_stage(tune):
    """Loops are written down at their second decision."""
    tune(decision_patience=1)


@pytest.fixture
def observed_gradients(monkeypatch):
    """A list with an item for each gradient that was observed."""
    seen = []
    original = Observation._conclude

    def conclude(self, *found):
        seen.extend([1] if self._region.function is gradient else [])
        return original(self, *found)

    monkeypatch.setattr(Observation, "_conclude", conclude)
    return seen
