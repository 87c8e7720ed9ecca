# Each target sets up what it needs: a virtual environment in .venv, installed again only when pyproject.toml changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Arguments for the program behind a target: make bench ARGS="--case=raw-ops --profile"
ARGS ?=

# TensorFlow's start-up messages would drown what is printed for people.
export TF_CPP_MIN_LOG_LEVEL ?= 3
# It pins TensorFlow's threads to one core as soon as scikit-learn's OpenMP is loaded.
unexport OMP_PROC_BIND

.PHONY: help demo test test-slow test-all test-kills test-faults test-keras test-versions fuzz soak check bench bench-all \
  bench-growth bench-variants bench-ecosystem docs clean

help:
	@echo "make demo       train a classifier eagerly and co-executed, and compare"
	@echo "make test       the tests, without those that are exhaustive: ten to twenty-five minutes"
	@echo "make test-slow  the exhaustive ones; make test-all runs both"
	@echo "make test-kills kills training 20 times in each of five ways, and compares where it gets to"
	@echo "make test-faults raises an error from every function of ours, in 25 programs, and compares: hours; ARGS=--seconds=N"
	@echo "make test-keras Keras' own tests, each eager and followed, with a table of counts: some half an hour"
	@echo "make test-versions the pinning tests and the corpus on TensorFlow 2.18 to 2.21: a quarter of an hour; ARGS=\"2.18+numpy1.26 2.20\""
	@echo "make fuzz       10,000 random programs, eager and co-executed, some hours; ARGS=\"--programs=N --seed=S\""
	@echo "make check      lint, types, architecture and the tiny test: about a minute"
	@echo "make soak       100,000 calls, 10,000 shapes, 1,000 models in one process, whose memory must stay flat"
	@echo "make bench      the benchmark table; ARGS=--quick, --case=NAME, --profile, --write-readme, --peers"
	@echo "make bench-all  the programs of the papers, about an hour; ARGS=--write, --program=NAME, --rounds=N, --json=FILE"
	@echo "make bench-growth what calls cost as programs grow; ARGS=\"--part=NAME --scales=1000,10000\""
	@echo "make bench-variants what spelling costs: programs rewritten in 200 ways; ARGS=\"--base=mlp --rewrite=method\""
	@echo "make bench-ecosystem other people's programs, on libraries from PyPI, half an hour; ARGS=\"--program=NAME --write\""
	@echo "make docs       the pages of docs/ as a site in build/site; fails on a broken link"
	@echo "make clean      remove .venv and every cache"
	@echo "PYTHON=python3.12 picks the Python for .venv (3.10 to 3.13)"

demo: $(STAMP)
	@$(BIN)/python examples/digits.py $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest -n 2 -m "not slow" $(ARGS)

test-slow: $(STAMP)
	@$(BIN)/python -m pytest -n 2 -m slow $(ARGS)

test-all: test test-slow

test-kills: $(STAMP)
	@COEXEC_KILLS=20 $(BIN)/python -m pytest tests/coexec/training/test_resume.py $(ARGS)

test-faults: $(STAMP)
	@$(BIN)/python -m tests.faults $(ARGS)

test-keras: $(STAMP)
	@$(BIN)/python -W ignore -m tests.keras_suite $(ARGS)

test-versions: $(STAMP)
	@$(BIN)/python -W ignore -m tests.environments.versions $(ARGS)

fuzz: $(STAMP)
	@$(BIN)/python -m tests.fuzz $(ARGS)

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/test_architecture.py tests/test_documentation.py tests/test_tiny.py $(ARGS)

soak: $(STAMP)
	@$(BIN)/python examples/soak.py $(ARGS)

bench: $(STAMP)
	@$(BIN)/python -m examples.bench $(ARGS)

bench-all: $(STAMP)
	@$(BIN)/python -m examples.bench.programs $(ARGS)

bench-growth: $(STAMP)
	@$(BIN)/python -m examples.growth $(ARGS)

bench-variants: $(STAMP)
	@$(BIN)/python -m examples.variants $(ARGS)

bench-ecosystem: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[ecosystem]' || \
	  echo "not all libraries could be installed: what is missing is skipped" >&2
	@$(BIN)/python -m examples.ecosystem $(ARGS)

docs: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "the site is in build/site/index.html"

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "$(PYTHON) is not Python 3.10 to 3.13; name one that is: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "setting up $(VENV); the first time downloads TensorFlow"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,examples]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find coexec tracer tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
