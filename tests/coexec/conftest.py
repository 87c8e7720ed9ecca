"""What several files of tests ask for by name."""

import pytest

from coexec.runtime import decisions


@pytest.fixture(params=["graph", "xla"])
def backend(request):
    """Both of what segments are compiled to."""
    return request.param


@pytest.fixture
def eager_to_stage(monkeypatch):
    """Loops are written down at their second decision."""
    monkeypatch.setattr(decisions, "patience", 1)
