PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
C      := $(wildcard engine/native/*.c engine/native/*.h)
CSTYLE := {BasedOnStyle: Google, IndentWidth: 4, ColumnLimit: 115, IncludeBlocks: Preserve}
CFLAGS := -std=gnu11 -O2 -Wall -Wextra -Wshadow -Werror -Wno-psabi -fsyntax-only
QUIET  := --quiet --disable-pip-version-check
WORKERS := --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: setup serve test check specs types secrets style diagrams docs bench clean

setup: $(STAMP)

# Torch comes first and alone: a requirement that only names a range could bring another build of it.
$(STAMP): pyproject.toml setup.py constraints.txt $(C)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): torch, then the package and its tests (minutes, once)"
	@$(BIN)/python -m pip install $(QUIET) -c constraints.txt "setuptools>=77" wheel
	@$(BIN)/python -m pip install $(QUIET) -c constraints.txt torch
	@$(BIN)/python -m pip install $(QUIET) -c constraints.txt --no-build-isolation -e ".[test]"
	@touch $(STAMP)

serve: setup
	$(BIN)/python -m engine serve $(ARGS)

test: setup
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(WORKERS) $(ARGS)

# Two parts at a time, the longest first: the searches take as long as all others together.
check: setup
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target specs types secrets style

specs: setup
	$(BIN)/python -m engine check
	$(BIN)/python -m engine diagrams --check
	$(BIN)/python -m engine docs --check

types: setup
	$(BIN)/mypy

secrets: setup
	git ls-files -z | xargs -0 $(BIN)/detect-secrets-hook --no-verify --exclude-files '\.(json|safetensors|svg)$$'

style: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --style="$(CSTYLE)" --dry-run -Werror $(C)
	$(CC) $(CFLAGS) -I$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_paths()['include'])") $(filter %.c,$(C))
	$(BIN)/codespell

diagrams: setup
	$(BIN)/python -m engine diagrams

docs: setup
	$(BIN)/python -m engine docs

bench: setup
	$(BIN)/python -m engine bench $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info engine/native/*.so
