# Every target sets up what it needs: a fresh machine with Python 3.11 or newer needs nothing else.
PYTHON ?= python3
VENV ?= .venv
# Pinned here and not in the package: an install beside SGLang must change no version. Override: make test TORCH=torch==2.14.1
TORCH ?= torch==2.13.0
# A version of triton where it must be the same every time (.ci/run); by default what torch and the package ask for.
TRITON ?=
export OMP_NUM_THREADS ?= 1
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check clean

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" $(TRITON)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/thalweg explain
	$(BIN)/thalweg generate --stats --temperature 0.6 --seed 3 --max-tokens 300 "def read_lines(path):"

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadgroup

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache
