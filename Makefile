# The only runner, for people and CI. Every target does its own set-up; what is done already is not done again.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

# Any Python from 3.11 on; .venv is made with it.
PYTHON ?= python3
VENV := .venv/bin/python
VLLM_VENV := .venv-vllm/bin/python
# Asked for when used and not written here: pyproject.toml holds every version.
vllm_directory = $(CURDIR)/.vllm/$(shell $(PYTHON) -m tools.pins $(1))

# rustup's directory, for a shell that was opened before Rust was installed.
export PATH := $(PATH):$(HOME)/.cargo/bin
# pyo3 rebuilds when this changes: cargo here and maturin in tools/ have to agree.
export PYO3_PYTHON := $(CURDIR)/$(VENV)
# Of another environment, when one is active in the shell.
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

.PHONY: setup
setup: ## make .venv: torch, Mooncake, the tools and the extension
	@$(call prepare,dev)

.PHONY: setup-vllm
setup-vllm: ## make .venv-vllm and .vllm: vLLM in two versions, beside each other
	@$(call prepare,vllm)

define prepare
command -v "$(PYTHON)" > /dev/null || { \
	echo 'mooncrate: no $(PYTHON); install Python 3.11 or newer, or name one: make PYTHON=python3.12' >&2; exit 1; }; \
"$(PYTHON)" -m tools.setup $(1)
endef

.PHONY: demo
demo: setup ## save, find and load real KV cache tensors through a real Mooncake Store
	$(VENV) -m mooncrate.demo

.PHONY: test
test: check ## all checks, then the Rust and the Python tests
	cargo test --workspace --locked
	$(VENV) -m pytest

.PHONY: test-vllm
test-vllm: setup-vllm ## the tests against vLLM itself, once for each version; HYPOTHESIS_PROFILE selects how many examples
	PYTHONPATH="$(call vllm_directory,vllm-0-27)" $(VLLM_VENV) -m pytest tests/vllm
	PYTHONPATH="$(call vllm_directory,vllm-0-32)" $(VLLM_VENV) -m pytest tests/vllm

.PHONY: nightly
# A property test with that many examples takes longer than a hang may.
nightly: export HYPOTHESIS_PROFILE = nightly
nightly: export PYTEST_TIMEOUT = 7200
nightly: test-vllm ## test-vllm with 20,000 examples of each property

.PHONY: bench
bench: setup setup-vllm ## the Rust benches, then the comparisons with the reference in vLLM
	cargo bench --workspace --locked
	PYTHONPATH="$(call vllm_directory,vllm-0-27)" $(VLLM_VENV) benches/compare_reference.py
	PYTHONPATH="$(call vllm_directory,vllm-0-27)" $(VLLM_VENV) benches/stall.py
	PYTHONPATH="$(call vllm_directory,vllm-0-32)" $(VLLM_VENV) benches/vllm_step.py
	$(VENV) benches/lookup_cost.py

.PHONY: check
check: setup ## formats, lints, types, stubs and docs; changes nothing
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --locked
	$(VENV) -m ruff check
	$(VENV) -m ruff format --check
	$(VENV) -m mypy
	$(VENV) -m mypy tests/vllm/conftest.py
	$(VENV) -m mypy.stubtest mooncrate._core

.PHONY: fix
fix: setup ## format, and mend what the lints can mend by themselves
	cargo clippy --workspace --all-targets --fix --allow-dirty --allow-staged
	cargo fmt --all
	$(VENV) -m ruff check --fix
	$(VENV) -m ruff format

.PHONY: clean
clean: ## remove all that the other targets made
	rm -rf .venv .venv-vllm .vllm target .mypy_cache .ruff_cache .hypothesis .pytest_cache .benchmarks
	rm -f python/mooncrate/_core*.so
	find python tests benches tools -name __pycache__ -prune -exec rm -rf {} +
