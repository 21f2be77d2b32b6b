# `make demo` and `make test` need Python 3.11 or newer and nothing else; everything they install lies in .venv and .cache.

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
PY := .venv/bin/python
RUN := $(PY) -m
STAMP := .venv/installed

# An environment holds absolute paths: one that was made elsewhere is made anew.
MOVED := $(shell [ "$$(cat $(STAMP) 2>/dev/null)" = "$$(pwd -P)" ] || echo moved)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint protos docs clean moved

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## Make .venv and install the pinned dependencies; quick when nothing changed

$(STAMP): pyproject.toml constraints.txt $(MOVED)
	@echo "Installing into .venv (a minute or two the first time; later runs skip this)"
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Outrider needs Python 3.11 or newer: make PYTHON=...")'
	@$(PYTHON) -m venv $(if $(MOVED),--clear) .venv
	$(RUN) pip install --disable-pip-version-check --constraint constraints.txt --editable '.[bench,cpu,embedded,dev]'
	@pwd -P > $(STAMP)

demo: setup ## Run the demo: three services on this machine, speculative beside plain decoding
	@$(RUN) outrider.cli.main demo $(ARGS)

test: setup ## Run the whole suite, two files of tests at a time
	$(RUN) pytest -n 2 --dist loadfile $(ARGS)

lint: setup ## Check style, formatting, types and protos
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(PY) protos/generate.py --lint

protos: setup ## Write the Python stubs of protos/ anew
	$(PY) protos/generate.py

docs: setup ## Write what is made from code: docs/configuration.md, docs/metrics.md, the benchmark's schema, alert rules, dashboards
	$(PY) docs/configuration.py
	$(PY) docs/metrics.py
	$(PY) docs/rules.py
	$(PY) docs/dashboards.py
	$(PY) docs/schema.py

clean: ## Remove what was installed, downloaded and cached
	rm -rf .venv .cache build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
