# make demo | test | lint | bench: each sets up .venv by itself and is quick when that is done.
# TORCH_INDEX may name a package index that holds CPU builds of torch.
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench setup
.DEFAULT_GOAL := test

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(PY) -m pip install -q -e '.[cpu,s3,report,recipes,test,dev]'
	# torchrec requires the CUDA wheel of fbgemm and recbole a whole framework: both without their dependencies
	$(PY) -m pip install -q --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 recbole==1.2.1
	touch $(STAMP)

demo: setup
	$(PY) -m recipes.demo

test: setup
	# in the order of the folders: the long jobs first
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 15

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy lightning_cpr

bench: setup
	$(PY) -m benchmarks
