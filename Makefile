# Two commands are all a newcomer needs: `make run` and `make test`. Python 3.11 or newer is found or named: PYTHON=...
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= auto
ARGS ?=

# Programs that were compiled once are kept, so that a second run starts at once.
export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/$(VENV)/xla
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0.2

.PHONY: run test clean

# FedAPA beside its control and the usual baselines on scikit-learn's digits; the last line names the report.
run: $(VENV)/installed
	$(BIN)/fedjax-pfl compare fedapa fixed_mixing fedper fedavg fedavg_ft local --seeds 3 $(ARGS)

test: $(VENV)/installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal $(ARGS)

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "fedjax_pfl needs Python 3.11 or newer: install it, or name it: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
