# The two commands of the README are `make book` and `make test`. Both make .venv on a bare machine
# that has Python 3.11+, make and a compiler; a second run starts where the first one ended.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help

help:  ## what can be made here
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"kvlab needs Python 3.11 or newer, this is {sys.version}"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

venv: $(READY)  ## the virtual environment with the locked requirements

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

notebooks: $(READY)  ## write the notebooks that Colab opens, from the chapters
	$(BIN)/python book/make_ipynb.py

book: $(READY)  ## build the book: every chapter executed, _build/html/index.html
	$(BIN)/python book/build_book.py

page: $(READY)  ## build one chapter, PAGE=04_kv_cache, and the reference pages: a draft, warnings allowed
	$(BIN)/python book/build_book.py --page $(PAGE)

test: $(READY)  ## everything that is checked: lint, tests, the book and its pages
	$(BIN)/python book/run_checks.py

test-vllm: $(READY)  ## the tools against a real vLLM on this CPU, slow; VLLM=PYTHON takes one that is installed
	$(BIN)/python benchmarks/real_server.py $(if $(VLLM),--vllm $(VLLM))

lock: $(READY)  ## renew requirements.lock from what .venv holds
	( echo "# Exact versions that \`make\` installs; made with: make lock"; echo; \
	  $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' ) > requirements.lock

address: $(READY)  ## REPO=... SITE=...: change the public addresses, and all that is made from them
	PYTHONPATH=book $(BIN)/python -m kvbook.addresses "$(REPO)" "$(SITE)"
	$(BIN)/python book/make_ipynb.py

axe-baseline: $(READY)  ## note what an empty page of the theme breaks in accessibility
	PYTHONPATH=book $(BIN)/python -m kvbook.browser

.PHONY: help venv lint notebooks book page test test-vllm lock address axe-baseline
