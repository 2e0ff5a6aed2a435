# g2rpo-ray. `make quickstart` and `make test` do all the set-up on a fresh machine.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUN    ?= runs/quickstart-$(shell date +%Y%m%d-%H%M%S)
CONFIG ?= configs/quickstart.yaml

# Two processes: a third makes slow days slower. The tests of a file share one, and its Ray cluster.
# What they start computes with one thread: more would wait for each other.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder

# uv is faster, and takes PyTorch's build for the CPU where there is no card. Where an index of its own
# is out of reach it tries without, and pip, whose settings it does not read, comes last.
define install
	@set -- --quiet --constraint constraints.txt --editable $(1); \
	  for build in --torch-backend=auto --no-progress; do \
	    command -v uv >/dev/null && \
	      uv pip install --python $(BIN)/python --compile-bytecode $$build "$$@" 2>/dev/null && exit; \
	  done; \
	  $(BIN)/python -m pip install "$$@"
endef

.PHONY: help quickstart test test-long lint docs format clean constraints

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

quickstart: $(VENV)/.installed  ## train the small FLUX with G2RPO on this machine's CPU (5 minutes where others use it, too)
	$(BIN)/g2rpo train $(CONFIG) run_dir=$(RUN) $(ARGS)

test: $(VENV)/.installed-dev lint  ## lint, type-check and run the tests of CI (ARGS='-k rollout' for some)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not long and not gpu" $(PARALLEL) $(ARGS)

test-long: $(VENV)/.installed-dev  ## whole clusters and more whole runs: Slurm, raylets, Prometheus (half an hour)
	$(BIN)/pytest -m long $(ARGS)

lint: $(VENV)/.installed-dev  ## ruff (lint and format), mypy, and the order of the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/.installed-dev  ## build the documentation site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(VENV)/.installed-dev  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info

# A stamp file says that an environment holds what constraints.txt and pyproject.toml ask for.
$(VENV)/.installed: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "g2rpo-ray needs Python 3.11 or newer; set PYTHON=python3.x"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' || \
	  { echo "Python's venv is missing: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(call install,.)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(call install,'.[dev]')
	@touch $@

constraints:  ## write constraints.txt from the newest versions that pyproject.toml allows
	$(PYTHON) -m venv $(VENV)-new
	$(VENV)-new/bin/python -m pip install --quiet --editable '.[demo,dev,wandb]'
	@echo "# The versions that work together; made with 'make constraints'." > constraints.txt
	$(VENV)-new/bin/python -m pip freeze --exclude-editable | grep -viE '^(nvidia|cuda|triton)' \
	  >> constraints.txt
	rm -rf $(VENV)-new
