"""Executes examples/notebook.ipynb from top to bottom, in a kernel of its own; raises the first error of a cell.

python examples/run_notebook.py            # only runs it
python examples/run_notebook.py --write    # and stores what the cells have shown
"""

import argparse
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parent / "notebook.ipynb"


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of this run, and without what differs from run to run for no reason."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]  # TensorFlow's start
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def main() -> int:
    """Runs it, and prints what the cells have shown as text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    notebook = executed(NOTEBOOK)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            print(output.get("text") or data.get("text/html") or data.get("text/plain"))
    if options.write:
        nbformat.write(notebook, NOTEBOOK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
