# `make up` serves on this machine, and `make test` runs the tests. Both create .venv if it does not
# exist, and install the dependencies that they need. Serving needs fewer than testing.
# pip takes its settings from the environment: on a machine without a GPU, PIP_EXTRA_INDEX_URL can
# name an index with CPU builds of torch, which are smaller.

SHELL := /bin/sh
BIN := .venv/bin
SERVES := .venv/.serves
TESTS := .venv/.tests
SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
PYTEST := $(BIN)/python -m pytest --workers 4 --cpu-by-file 25
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c '$(SUITABLE)' 2>/dev/null && echo $$p && break; done)

.PHONY: help up test test-long test-nightly test-all attack chaos check lint docs format proto clean

help:
	@echo "make up [MODEL=dir or hub id] [ARGS='--prefill 2 ...']   serve on this machine until Ctrl-C"
	@echo "make test [ARGS='-k name ...']                           run the tests"
	@echo "make test-long [ARGS='-k name ...']                      run the tests that take minutes"
	@echo "make test-nightly [ARGS='-k name ...']                   run the tests that need an idle machine"
	@echo "make test-all                                            run all three"
	@echo "make attack [MINUTES=n] [SEED=k]                         attack a running system"
	@echo "make chaos [MINUTES=n] [SEED=k] [ARGS=--ranks]            kill and stop processes of a running system"
	@echo "make check                                               lint, build the docs, and test"
	@echo "make docs                                                build the site into build/site"
	@echo "make lint | format | proto | clean"

up: $(SERVES)
	@$(BIN)/baton up $(if $(MODEL),--model '$(MODEL)') $(ARGS)

test: $(TESTS)
	$(PYTEST) $(ARGS)

test-long: $(TESTS)
	$(PYTEST) -m 'long and not nightly' $(ARGS)

test-nightly: $(TESTS)
	$(PYTEST) --workers 1 -m nightly $(ARGS)

test-all: test test-long test-nightly

attack: $(TESTS)
	@$(BIN)/python -m tests.attack $(if $(MINUTES),--minutes '$(MINUTES)') $(if $(SEED),--seed '$(SEED)')

chaos: $(TESTS)
	@$(BIN)/python -m tests.chaos $(if $(MINUTES),--minutes '$(MINUTES)') $(if $(SEED),--seed '$(SEED)') $(ARGS)

check: lint docs test

lint: $(TESTS)
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(TESTS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build # --quiet would hide warnings from `strict`

format: $(TESTS)
	$(BIN)/ruff format --quiet
	$(BIN)/ruff check --fix --quiet

proto: $(TESTS)
	$(BIN)/python -m protos.generate

clean:
	rm -rf .venv var build *.egg-info

$(SERVES) $(TESTS): pyproject.toml | $(BIN)/pip
	@echo 'installing into .venv (takes some minutes the first time)'
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable $(if $(filter $(TESTS),$@),'.[dev]',.)
	@touch $@

$(BIN)/pip:
	@test -n '$(PYTHON)' || \
		{ echo 'Baton needs Python 3.11 to 3.14 with its venv module; none found.' >&2; exit 1; }
	@$(PYTHON) -m venv --clear .venv
