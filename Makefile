PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup serve test check diagrams bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt engine/native/*.c
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[test]"
	touch $(STAMP)

serve: setup
	$(BIN)/python -m engine serve $(ARGS)

test: setup
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m engine.native.lint
	$(BIN)/codespell
	$(BIN)/python -m engine check
	$(BIN)/python -m engine diagrams --check

diagrams: setup
	$(BIN)/python -m engine diagrams

bench: setup
	$(BIN)/python -m engine bench $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info
