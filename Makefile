# `make up` serves on this machine, `make test` tests. Both first make .venv if it is not there.
# pip takes its settings from the environment: on a machine without a GPU, PIP_EXTRA_INDEX_URL can
# name an index with CPU builds of torch, which are smaller.

SHELL := /bin/sh
BIN := .venv/bin
INSTALLED := .venv/.installed
SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 13))
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c '$(SUITABLE)' 2>/dev/null && echo $$p && break; done)

.PHONY: help up test test-long attack check lint docs format proto clean

help:
	@echo "make up [MODEL=dir or hub id] [ARGS='--prefill 2 ...']   serve on this machine"
	@echo "make test [ARGS='-k name ...']                           run the tests"
	@echo "make test-long                                           the tests that take minutes"
	@echo "make attack [MINUTES=n] [SEED=k]                         attack a system that serves meanwhile"
	@echo "make check                                               lint, docs, then test"
	@echo "make docs                                                the site, in build/site"
	@echo "make lint | format | proto | clean"

up: $(INSTALLED)
	@$(BIN)/baton up $(if $(MODEL),--model '$(MODEL)') $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-long: $(INSTALLED)
	$(BIN)/python -m pytest -m long $(ARGS)

attack: $(INSTALLED)
	@$(BIN)/python -m tests.attack $(if $(MINUTES),--minutes '$(MINUTES)') $(if $(SEED),--seed '$(SEED)')

check: lint docs test

lint: $(INSTALLED)
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(INSTALLED)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

format: $(INSTALLED)
	$(BIN)/ruff format --quiet
	$(BIN)/ruff check --fix --quiet

proto: $(INSTALLED)
	$(BIN)/python -m protos.generate

clean:
	rm -rf .venv var build *.egg-info

$(INSTALLED): pyproject.toml
	@test -x $(BIN)/pip || test -n '$(PYTHON)' || \
		{ echo 'Baton needs Python 3.11 or 3.12 with its venv module; none found.' >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv
	@echo 'installing into .venv (takes some minutes the first time)'
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
