# Every target sets itself up: a virtual environment with the pinned versions of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint bench gpu setup clean

$(READY): constraints.txt setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[s3,dev]'
	touch $(READY)

setup: $(READY)

demo: $(READY)  ## The main job on this machine's CPU, a few minutes
	$(BIN)/python examples/demo.py

test: $(READY)  ## The whole suite; GPU tests are skipped without a GPU
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## CPU benchmarks; results go to benchmarks/results/
	$(BIN)/python benchmarks/restore.py
	$(BIN)/python benchmarks/prime.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/incident_replay.py

gpu:  ## GPU tests and benchmarks, with the Python that holds a CUDA build of torch
	$(PYTHON) benchmarks/gpu_check.py

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
