# Every target sets up what it needs: `make demo` and `make test` work as the first command on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export TOKENIZERS_PARALLELISM := false

.PHONY: install check fix test demo bench-smoke clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train,eval,api,dev]"
	touch $@

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2  # two processes of one thread each: tiny models, two cores

demo: install
	$(BIN)/hf-lossy generate --policy svip

bench-smoke: install
	$(BIN)/python benchmarks/engine.py --problems 2 --repeats 1 --batch-sizes 1 4

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
