"""What has to be set before TensorFlow is imported."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # eager on another device would not be the eager that is compared

import tempfile  # noqa: E402

import pytest  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def files_of_programs(tmp_path_factory):
    """What programs write goes where pytest cleans up."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("programs"))
    yield
    tempfile.tempdir = before
