"""What several files of tests ask for by name."""

import pytest


@pytest.fixture(params=["graph", "xla"])
def backend(request):
    """Both of what segments are compiled to."""
    return request.param


@pytest.fixture
def eager_to_stage(tune):
    """Loops are written down at their second decision."""
    tune(decision_patience=1)
