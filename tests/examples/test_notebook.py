"""Notebooks: the one of examples/ runs; `%%coexec` decorates, and cells that are run again leave nothing behind."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"

needs = {name: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
         for name in ("IPython", "nbclient", "tqdm")}  # fmt: skip

# Cells as IPython runs them, in a process of its own: its shell is a singleton, and holds what cells have shown.
PROGRAM = """
import gc, json, sys, weakref
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
import coexec
from coexec import testing
from coexec.api import functions

following = testing.always_follow()  # held: what is dropped, ends
following.__enter__()
shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
found = {}

def cell(text):
    result = shell.run_cell(text, store_history=True)
    error = result.error_in_exec or result.error_before_exec
    return f"{type(error).__name__}: {error}" if error else None

assert cell("%load_ext coexec") is None
assert cell("import tensorflow as tf, coexec, traceback\\nseen = []") is None
STEP = '''%%coexec
def step(x):
    y = tf.exp(x) * FACTOR
    for _ in range(8):
        y = tf.tanh(y)
    seen.append(float(y[0]))
    return y

def plain(x): return x

value = step(tf.ones([2]))
value.shape
'''
made = []
for run in range(6):
    assert cell(STEP.replace("FACTOR", str(run + 1.0))) is None
    assert cell("for _ in range(5): step(tf.ones([2]))") is None
    made.append(weakref.ref(shell.user_ns["step"]))
step, plain = shell.user_ns["step"], shell.user_ns["plain"]
found["types"] = [type(step).__name__, type(plain).__name__]
found["followed"] = step.stats().followed
found["calls"] = step.stats().calls
found["seen"] = len(shell.user_ns["seen"])
expected = shell.user_ns["tf"].exp(1.0) * 6.0
for _ in range(8):
    expected = shell.user_ns["tf"].tanh(expected)
found["right"] = abs(shell.user_ns["seen"][-1] - float(expected)) < 1e-6
found["shown"] = shell.user_ns["_"] is not None and str(shell.user_ns["Out"][max(shell.user_ns["Out"])])
found["html"] = step._repr_html_()
del step, plain
gc.collect()
found["alive"] = [ref() is not None for ref in made]
found["of that name"] = sum(f.__qualname__ == "step" for f in functions())

assert cell("%%coexec chosen\\ndef chosen(x): return x\\ndef other(x): return x") is None
found["chosen"] = [type(shell.user_ns[name]).__name__ for name in ("chosen", "other")]
assert cell("%%coexec\\n@coexec.function(name='mine')\\ndef own(x): return x") is None
found["own"] = repr(shell.user_ns["own"])
found["nothing"] = cell("%%coexec\\nx = 1")
found["unknown"] = cell("%%coexec there, not\\ndef there(x): return x")
found["syntax"] = cell("%%coexec\\ndef f(:\\n    pass")
found["raised"] = cell("%%coexec\\ndef f(x): return x\\n\\n1 / 0")

first = []
for run in range(3):  # with the decorator, and no magic
    assert cell("@coexec.function\\ndef bare(x): return tf.exp(x) + 1.0") is None
    assert cell("for _ in range(4): bare(tf.ones([2]))") is None
    first.append(weakref.ref(shell.user_ns["bare"]))
gc.collect()
found["bare"] = [ref() is not None for ref in first]
assert cell("%unload_ext coexec") is None
found["unloaded"] = "coexec" in shell.magics_manager.magics["cell"]
print("FOUND" + json.dumps(found))
"""


def ran(*arguments, **environment):
    given = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
             "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", **environment}  # fmt: skip
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=given, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@needs["IPython"]
def test_the_magic_decorates_and_cells_may_run_again(tmp_path):
    output = ran("-c", PROGRAM, IPYTHONDIR=str(tmp_path))
    found = json.loads(output.rpartition("FOUND")[2])
    assert found["types"] == ["Function", "Function"]
    assert (found["calls"], found["followed"]) == (6, 5)
    assert found["seen"] == 36
    assert found["right"]
    assert found["alive"] == [False] * 5 + [True]
    assert found["of that name"] == 1
    assert "step: a call takes" in found["html"]
    assert "In[13]:6" in found["html"]  # the read, in the line that the notebook shows
    assert "seen.append(float(y[0]))" in found["html"]
    assert found["shown"] == "(2,)"
    assert found["chosen"] == ["Function", "function"]
    assert found["own"] == "<coexec.function mine>"
    assert found["nothing"] == "ValueError: %%coexec decorates the functions of a cell, and this one defines none"
    assert "ValueError: %%coexec there, not: the cell defines no function" in found["unknown"]
    assert found["syntax"].startswith("SyntaxError: ")
    assert found["raised"] == "ZeroDivisionError: division by zero"
    assert found["bare"] == [False, False, True]
    assert not found["unloaded"]


# Of each pair of cells, the first is what everybody sees, and the second the same with coexec.
BARS = [
    """
    import keras, numpy as np, tensorflow as tf, coexec
    from coexec import testing

    following = testing.always_follow()  # held: what is dropped, ends
    following.__enter__()
    x = np.linspace(-1, 1, 1024, dtype="float32").reshape(256, 4)
    data = tf.data.Dataset.from_tensor_slices(x).batch(4)

    def compiled():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    def step(x):
        for _ in range(10):
            x = tf.tanh(x)
        return tf.reduce_sum(x)

    plain, followed = compiled(), coexec.accelerate(compiled())
    followed_step = coexec.function(step)
    """,
    "plain.fit(x, x[:, :1], epochs=2, batch_size=16); None",
    "followed.fit(x, x[:, :1], epochs=2, batch_size=16); None",
    "from tqdm import tqdm\nfor batch in tqdm(data, desc='plain'): step(batch)",
    "for batch in tqdm(data, desc='followed'): followed_step(batch)",
    """
    turns = coexec.loop(data, epochs=2)
    for batch in turns:
        turns.show(loss=followed_step(batch))
        if turns.step % 50 == 0:
            print("at", turns.step)
    """,
    "for batch in coexec.loop(data, progress=False): followed_step(batch)",
    "print(followed.train_function.stats().followed > 0, followed_step.stats().followed > 100)",
]


def read(text):
    """What is left to read of a text that goes back over itself, without colours and times."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = []
    for line in text.split("\n"):
        seen, at = [], 0
        for character in line:
            if character in "\r\b":
                at = 0 if character == "\r" else max(at - 1, 0)
            else:
                seen[at : at + 1] = [character]
                at += 1
        lines.append(re.sub(r"\d+m?s(/step)?", "TIME", "".join(seen)).rstrip())
    return "\n".join(lines)


@needs["nbclient"]
@needs["tqdm"]
def test_progress_bars_are_right():
    """Keras' and tqdm's are what they are without coexec; a loop's is one line, which does not get between prints."""
    import nbformat
    from nbclient import NotebookClient

    sources = [nbformat.v4.new_code_cell(textwrap.dedent(source)) for source in BARS]
    notebook = nbformat.v4.new_notebook(cells=sources)
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1",
                   "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}  # fmt: skip
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute(env=environment)

    def shown(number, stream):
        outputs = notebook.cells[number].outputs
        return read("".join(output["text"] for output in outputs if output.get("name") == stream))

    assert shown(2, "stdout") == shown(1, "stdout")
    assert re.fullmatch(r"(Epoch [12]/2\n16/16 ━{20} TIME TIME - loss: 0\.\d+\n){2}", shown(2, "stdout"))
    for number, name in ((3, "plain"), (4, "followed")):
        assert re.fullmatch(rf"{name}: 100%\|█+\| 64/64 \[.*it/s\]\n", shown(number, "stderr"))
    bars = [output["data"] for output in notebook.cells[5].outputs if output["output_type"] == "display_data"]
    assert len(bars) == 1
    assert list(bars[0]) == ["text/plain"]
    assert re.fullmatch(r"━{20} 128/128  \S+ steps/s loss \S+  followed 100% 0:00:00", bars[0]["text/plain"])
    assert shown(5, "stdout") == "at 0\nat 50\nat 100\n"
    assert shown(5, "stderr") == ""
    assert notebook.cells[6].outputs == []
    assert shown(7, "stdout") == "True True\n"


def test_the_notebook_is_stored_as_it_ran():
    """All cells, in order, without errors; nothing of the machine is in what they have shown."""
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    text = json.dumps(outputs)
    assert "a call takes 0." in text
    assert "ipykernel_" not in text
    assert "/home/" not in text
    assert str(ROOT) not in text


@pytest.mark.slow
@needs["nbclient"]
def test_the_notebook_runs():
    shown = ran(str(ROOT / "examples" / "run_notebook.py"))
    assert "160 losses, the last one is smaller: True" in shown
    assert "(6, 1, 5)" in shown
    assert "['index.html', 'report.json', 'trace.json']" in shown
    assert "step: a call takes " in shown
