# make demo   install, serve the default model, talk to it with the openai client, stop
# make test   every check and test, in order, stopping at the first failure (what CI runs)
# make check  the quick half of it: format, lint, types, imports, sizes
# make serve  install and serve MODEL on PORT
# make venv   install only. CONSTRAINTS=other.txt for a machine with another build of torch.

PYTHON      ?= python3
CONSTRAINTS ?= constraints.txt
MODEL       ?=
PORT        ?= 8000

BIN   := .venv/bin
STAMP := .venv/stamp-$(shell cat pyproject.toml $(CONSTRAINTS) | cksum | tr ' ' '-')
PIP   := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check

# Torch's pools spin: two processes with a thread per core are slower than one thread each.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export HF_HUB_OFFLINE  := 1

# Folders of tests/ and how many processes share each (0: this one); a folder that is not there yet is skipped.
# unit/triton runs apart: Triton is either interpreted in a process or it is not (tests/unit/conftest.py).
STAGES := unit:2 unit/triton:2 laws:2 engine:2 server:0 distributed:0

.PHONY: help venv check test demo serve clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# //p' Makefile | head -5

venv: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "gnomon needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Set PYTHON=..."; exit 1; }
	@echo "installing into .venv (about two minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) -c $(CONSTRAINTS) hatchling editables
	@$(PIP) -c $(CONSTRAINTS) --no-build-isolation -e '.[triton,dev]'
	@rm -f .venv/stamp-* && touch $@

check: venv
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/size.py

test: check
	@rm -rf .reports
	@set -e; for stage in $(STAGES); do \
	  folder=tests/$${stage%:*}; processes=$${stage#*:}; \
	  test -d $$folder || { echo "== $$folder: not there yet"; continue; }; \
	  echo "== $$folder"; \
	  $(BIN)/pytest $$folder -q -x -n $$processes --dist loadfile \
	    --junit-xml=.reports/$$(echo $${stage%:*} | tr / -).xml; \
	done
	@$(BIN)/python tools/slowest.py .reports
	@$(BIN)/python tools/size.py

demo: venv
	@$(BIN)/python examples/demo.py

serve: venv
	$(BIN)/gnomon serve $(MODEL) --port $(PORT)

clean:
	rm -rf .venv .reports .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
