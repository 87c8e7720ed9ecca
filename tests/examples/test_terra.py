"""The programs that Terra was judged by: each learns the same co-executed as it does eagerly."""

import importlib

import pytest

from examples.programs import PROGRAMS
from tests.examples import STEPS, check

# In these, an activation at the corner of a ReLU, or a region that nearly overlaps another, amplifies a rounding a
# thousandfold within ten steps, between two eager runs as well: their own tolerance is wide.
CHAOTIC = ("dropblock", "sdpoint", "faster_rcnn", "resnet50")
NAMES = ("bert_cls", "music_transformer", "dcgan", "bert_qa", "gpt2", "yolov3", *CHAOTIC)

for module in NAMES:
    importlib.import_module(f"examples.programs.{module}")


@pytest.mark.sample("bert_cls", "dropblock")
@pytest.mark.parametrize("name", NAMES)
def test_same_as_eager(name):
    stats = check(PROGRAMS[name])
    assert stats.calls == STEPS


@pytest.mark.sample("faster_rcnn")
@pytest.mark.parametrize("name", CHAOTIC)
def test_same_to_the_last_places_as_graphs(name):
    """TensorFlow's graphs run eager's kernels, so nothing is tolerated; in nine steps each has come back to a path."""
    check(PROGRAMS[name], steps=9, rtol=1e-5, atol=1e-6, jit_compile=False)
