# On a fresh machine with Python 3.11 or newer, each of these does its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test format bench docs clean

help:
	@echo "make demo   random starts on two bundled data sets, plain and tuned, with a report (about a minute)"
	@echo "make test   lint, types and tests"
	@echo "make format rewrite the code in house style"
	@echo "make docs   the API reference from the docstrings, in out/docs"
	@echo "make bench  time and memory of tuned training against plain training"

demo: $(VENV)/ready
	$(BIN)/onepass demo

test: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/ready
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/population.py

docs: $(VENV)/ready
	$(BIN)/python docs/reference.py out/docs

# torch goes first and alone: with it in place, no other package pulls another build of it.
$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache out
