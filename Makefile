# `make demo` and `make test` set up all they need; see README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
NATIVE := CMakeLists.txt $(wildcard src/dejavu/kernels/cpu/*)

.PHONY: demo test check bench-embedded bench-opt-1.3b embedded clean

demo: $(STAMP)
	$(BIN)/dejavu demo

test: $(STAMP)
	$(BIN)/python -m pytest -q

check: $(STAMP)
	$(BIN)/ruff format --check src tests recipes
	$(BIN)/ruff check src tests recipes
	$(BIN)/mypy
	$(BIN)/lint-imports

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade pip
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt "scikit-build-core>=0.10" "nanobind>=2.4" "cmake>=3.26" ninja
	$(PIP) install -q -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf build $(VENV)
