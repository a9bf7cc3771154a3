# make train    builds what is needed and trains a GPT over four pipeline ranks on this machine
# make test     runs the tests; TIER=push only the quick ones, TIER=nightly whole sweeps and what takes minutes
# make lint     ruff, mypy, the layers' import contracts, spelling, the words of the project, and its budget of lines
# make papers-quick   simulates the papers' headlines anew, measures three ratios, and compares; a quarter of an hour
# make papers   runs the figures and tables that need no GPU again; `make site` has their pages; rows of AMDP's training that
#               are there already are kept, and experiments/uneven is apart; many hours
# make titan    installs TorchTitan into build/torchtitan, which tests of the nightly tier train with
# make megatron installs Megatron-Core into build/megatron, for the same
# make changelog   shows what changelog.d/ adds to CHANGELOG.md; with VERSION=0.3.0 it moves it there
# make site     builds the documentation into build/site, with no network; open build/site/index.html
#
# All that is needed beforehand is git, make and python3 (3.11 or newer, with its venv module).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
ARGS ?=

# Where there is no GPU, torch comes from its index of CPU builds, a tenth of the size.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi 2>/dev/null),,https://download.pytorch.org/whl/cpu)

# Set REPORTS to a folder to get a JUnit report of each phase of the tests.
REPORTS ?=
report = $(if $(REPORTS),--junitxml=$(REPORTS)/$(1).xml)

# Three tiers: what takes a second is marked `slow`; what takes a minute, and most of each sweep, `nightly`.
TIER ?= full
# Sweeps within a test look at it: tests/tiers.py.
export TIER
tier_push := and not slow and not nightly
tier_full := and not nightly
tier_nightly :=
ifeq ($(filter push full nightly,$(TIER)),)
$(error TIER is push, full or nightly, not $(TIER))
endif
tier := $(tier_$(TIER))
# The tests of experiments and benchmarks look at committed results, which a change of src leaves as they are.
places_nightly := -o testpaths="tests experiments/tests"
places := $(places_$(TIER))

# What one process compiles of Python the others find: the files of tests for both phases, and all of src.
unexport PYTHONDONTWRITEBYTECODE

# ARGS may choose tests of one phase only; pytest says 5 when it finds none in the other.
none_is_fine := || [ $$? -eq 5 ]

.PHONY: train test lint lint-types lint-style lint-words format site papers papers-quick install changelog titan megatron clean

train: $(INSTALLED)
	$(BIN)/penstock train $(ARGS)

# Tests run two at a time; those that judge by the clock, or need what a machine has one of, run alone.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup -m "not alone and not gpu $(tier)" $(call report,together) $(places) $(ARGS) $(none_is_fine)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "(alone or gpu) $(tier)" $(call report,alone) $(places) $(ARGS) $(none_is_fine)

# What reads the types takes as long as two thirds of all; `make -j2 lint` does the rest beside it.
lint: lint-types lint-style lint-words

lint-types: $(INSTALLED)
	$(BIN)/mypy

lint-style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

lint-words: $(INSTALLED)
	$(BIN)/codespell README.md CONTRIBUTING.md docs src examples
	$(BIN)/python .ci/prose.py
	$(BIN)/python .ci/budget.py

site: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "wrote build/site/index.html"

# Figures measured by the clock want a machine with nothing else to do.
papers: $(INSTALLED)
	$(BIN)/python -m experiments.pipemorph.all
	$(BIN)/python -m experiments.pipemorph.all --backend threads
	$(BIN)/python -m experiments.flexpipe.all
	$(BIN)/python -m experiments.flexpipe.all --measured
	$(BIN)/python -m experiments.amdp.all --measured --learning

papers-quick: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.claims.quick $(ARGS)

changelog: $(INSTALLED)
	$(BIN)/towncrier build $(if $(VERSION),--yes --version $(VERSION),--draft --version unreleased)

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(INSTALLED)

titan: $(INSTALLED)
	$(PIP) --no-deps --upgrade --target build/torchtitan -r .ci/torchtitan.txt

# It asks for Python 3.12, and runs on 3.11.
megatron: $(INSTALLED)
	$(PIP) --no-deps --ignore-requires-python --upgrade --target build/megatron -r .ci/megatron.txt

# pip would compile what it installs on one core; compileall does on all. A few files of others are no Python 3. What
# hardly anything imports, 40% of the files, is compiled when it is imported.
RARE := /transformers/models/|/tests?/|/torch/testing/
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "penstock needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); try make PYTHON=python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --retries 1 $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(PIP) -e ".[dev]"
	$(BIN)/python -m compileall -qq -j 0 -x '$(RARE)' $(VENV)/lib || true
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
