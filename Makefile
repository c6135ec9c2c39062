# Every target sets up what it needs: `make demo` and `make test` work as the first command on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export TOKENIZERS_PARALLELISM := false
# Each of the many processes that tests start would compile all of torch and transformers again: 18 seconds in place of 6.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install check fix test test-all nightly test-machines newest dist docs docs-install demo reproduce bench-smoke clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e ".[train,eval,lm-eval,serve,ray,dev]"
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt --no-deps "xgrammar>=0.2.8" "apache-tvm-ffi>=0.1.11" "llguidance>=1.7"
	-$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check --no-deps "trl>=1.0" # for one example, whose test is skipped without
	touch $@

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/house.py

fix: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Two processes of one thread each: tiny models, two cores. With LIMIT=2 a test of `make test` that takes more seconds of CPU time fails.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(if $(LIMIT),--cpu-limit $(LIMIT))

# Every subpackage, entry point and feature once: what breaks when a user's line breaks, in minutes.
test: install
	$(TEST)

# With the tests marked `full`: what CI runs.
test-all: install
	$(TEST) -m "not nightly"

# With those marked `nightly`, too: all architectures compiled, jobs killed and gone on with.
nightly: install
	$(TEST) -m ""

# What another machine may change: its instruction set, its threads, the order of tests, a shell that ignores interrupts.
test-machines: install
	set -e; trap '' INT; seed=0; \
	for threads in 1 2; do for isa in default avx2 ""; do \
	    seed=$$((seed + 1)); echo "ATEN_CPU_CAPABILITY=$$isa OMP_NUM_THREADS=$$threads, random order $$seed"; \
	    if [ -n "$$isa" ]; then export ATEN_CPU_CAPABILITY=$$isa; else unset ATEN_CPU_CAPABILITY; fi; \
	    OMP_NUM_THREADS=$$threads OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n 2 -m "" -p randomly -p no:cacheprovider --randomly-seed=$$seed; \
	done; done

# What the newest Transformers, PEFT and Hub client that the registry has break, beyond the ranges of pyproject.toml: for a nightly run.
newest: install
	rm -rf runs/newest && $(BIN)/python -m pip install --quiet --no-deps --upgrade --pre --target runs/newest transformers peft huggingface-hub tokenizers
	PYTHONPATH=runs/newest $(TEST)

# The wheel and the source archive in dist/, checked as the registry would.
dist: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build twine
	rm -rf dist && $(BIN)/python -m build --quiet && $(BIN)/python -m twine check --strict dist/*

# The site in site/; any warning fails it: a broken link, a page outside the navigation, a public name without a page.
docs: docs-install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet  # the theme advertises its successor otherwise

docs-install: $(VENV)/docs-installed

$(VENV)/docs-installed: $(VENV)/installed pyproject.toml
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

demo: install
	$(BIN)/hf-lossy generate --policy svip

# The papers' tables on the demo models, 35 minutes on two cores; what is done is kept in runs/reproduce.
# FLAGS="--long-model M --long-drafter D --long-prompts F" adds the rows about long texts of a real model.
reproduce: install
	$(BIN)/python examples/reproduce/run.py $(FLAGS)

bench-smoke: install
	$(BIN)/python benchmarks/engine.py --problems 2 --repeats 1 --batch-sizes 1 4

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis site
