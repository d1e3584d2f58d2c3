# Every target sets itself up: a virtual environment with the pinned versions of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LINT_READY := $(VENV)/.ready-lint
# Another torch than the pinned one, in an environment of its own.
COMPAT_TORCH ?= 2.14.1
COMPAT := .venv-compat
COMPAT_READY := $(COMPAT)/.ready-$(COMPAT_TORCH)
# A CUDA build of torch, as the index of Python packages has it; compiling for a GPU needs none.
OFFLINE_TORCH ?= 2.11.0
OFFLINE := .venv-offline
ifdef OFFLINE_PYTHON
OFFLINE_READY :=
else
OFFLINE_PYTHON := $(OFFLINE)/bin/python
OFFLINE_READY := $(OFFLINE)/.ready-$(OFFLINE_TORCH)
endif

# The second S3 server of the tests. Where there is no npm they say what they skip; CI needs them all.
S3RVER := tests/s3rver/node_modules/.package-lock.json

.PHONY: demo test lint bench gpu compat offline-check setup clean

$(READY): constraints.txt setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[s3,dev]'
	touch $(READY)

# Tools for the files of deploy/; tests do without.
$(LINT_READY): $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[lint]'
	touch $@

# What torch chooses by itself is not pinned: Triton, and the setuptools that older ones cannot do with.
define with_torch
	$(PYTHON) -m venv --clear $(1)
	grep -Ev '^(torch|triton|setuptools)==' constraints.txt > $(1)/constraints.txt
	$(1)/bin/python -m pip install --quiet -c $(1)/constraints.txt wheel torch==$(2)
	$(1)/bin/python -m pip install --quiet -c $(1)/constraints.txt 'setuptools>=77,<82'
	$(1)/bin/python -m pip install --quiet -c $(1)/constraints.txt --no-build-isolation -e '.[s3,dev]'
	touch $@
endef

$(COMPAT_READY): constraints.txt setup.cfg pyproject.toml
	$(call with_torch,$(COMPAT),$(COMPAT_TORCH))

$(OFFLINE)/.ready-$(OFFLINE_TORCH): constraints.txt setup.cfg pyproject.toml
	$(call with_torch,$(OFFLINE),$(OFFLINE_TORCH))

setup: $(READY)

demo: $(READY)  ## The main job on this machine's CPU, a few minutes
	$(BIN)/python examples/demo.py

$(S3RVER): tests/s3rver/package.json tests/s3rver/package-lock.json
	@if command -v npm > /dev/null; then npm ci --prefix tests/s3rver --no-audit --no-fund --silent \
	|| echo 'npm cannot fetch s3rver: its tests are skipped'; \
	else echo 'no npm here: tests with s3rver are skipped (apt-get install nodejs npm)'; fi

test: $(READY) $(S3RVER)  ## The whole suite; GPU tests are skipped without a GPU
	$(BIN)/python -m pytest -n 2 --dist loadfile

compat: $(COMPAT_READY) $(S3RVER)  ## The suite with another torch, on CPU: make compat COMPAT_TORCH=2.11.0
	CUDA_VISIBLE_DEVICES= $(COMPAT)/bin/python -m pytest -n 2 --dist loadfile -p no:cacheprovider

offline-check: $(OFFLINE_READY)  ## Compiling for a GPU that is not there: its tests, then one plan, its time and memory; some GB
	@$(OFFLINE_PYTHON) -c 'import torch; torch.version.cuda or exit(f"error: torch {torch.__version__} is no CUDA build")'
	$(OFFLINE_PYTHON) -m pytest -m offline -p no:cacheprovider
	$(OFFLINE_PYTHON) benchmarks/offline.py --parts compile,baked

lint: $(LINT_READY)  ## Python, and the files of deploy/; needs no network once it is set up
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python deploy/check.py

bench: $(READY)  ## CPU benchmarks; results go to benchmarks/results/
	$(BIN)/python benchmarks/restore.py
	$(BIN)/python benchmarks/prime.py
	$(BIN)/python benchmarks/programs.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/fleet.py
	$(BIN)/python benchmarks/fleet_ray.py
	$(BIN)/python benchmarks/pull.py
	$(BIN)/python benchmarks/service.py
	$(BIN)/python benchmarks/faults.py
	$(BIN)/python benchmarks/fuzz.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/incident_replay.py

gpu:  ## GPU tests and benchmarks, with the Python that holds a CUDA build of torch
	$(PYTHON) benchmarks/gpu_check.py

clean:
	rm -rf $(VENV) $(COMPAT) $(OFFLINE) tests/s3rver/node_modules build .pytest_cache .mypy_cache .ruff_cache .hypothesis
