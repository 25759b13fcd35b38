# make quickstart   virtual environment, install, train the tiny model with ExGRPO and on-policy, compare
# make test         the whole suite
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin

.PHONY: quickstart test install lint clean

quickstart: install
	$(BIN)/python scripts/quickstart.py

test: install
	$(BIN)/python -m pytest

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info
