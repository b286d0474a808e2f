# make train and make test work from a fresh clone: they make .venv and install into it first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: train test test-slow test-all lint bench bench-trl clean

train: $(VENV)/installed            ## a first learning curve: the embedded model on countdown
	$(BIN)/bandpo train --divergence kl --delta 0.05

test: $(VENV)/installed-dev         ## the fast tests
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/installed-dev    ## the tests that train a model or start a server
	$(BIN)/python -m pytest -m slow

test-all: test test-slow

lint: $(VENV)/installed-dev         ## style, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/installed            ## the Band operator against a bisection and against memory bandwidth
	$(BIN)/python benchmarks/bounds.py

bench-trl: $(VENV)/installed        ## one training step beside TRL's, in an environment of its own
	test -x $(VENV)-trl/bin/python || $(PYTHON) -m venv $(VENV)-trl
	$(VENV)-trl/bin/python -m pip install --quiet -c constraints.txt -e . "trl>=1.16,<2"
	$(BIN)/python benchmarks/against_trl.py --trl-python $(VENV)-trl/bin/python

clean:
	rm -rf $(VENV) $(VENV)-trl build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) -e ".[dev]"
	@touch $@ $(VENV)/installed
