# make setup, demo, test, test-all, lint: all that anyone has to know.
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: setup demo test test-all lint lock

setup: $(BIN)/.installed

$(BIN)/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -r requirements.lock
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	touch $@

# The shipped study (params.yaml), from digits to table and figures.
demo: setup
	snakemake all --profile workflow/profiles/local --quiet rules host
	@fedpipe show

# The tests of every day, real snakemake and dvc included.
test: setup
	pytest -q -n 2 -m "not slow"

# What is slow: kills at random moments, whole studies.
test-all: setup
	pytest -q -n 2 -m slow

lint: setup
	ruff check
	ruff format --check
	mypy --strict fedpipe
	snakefmt --check Snakefile workflow
	snakemake --lint

# Exact versions of everything, for all platforms, without index addresses.
lock:
	$(PYTHON) -m uv pip compile --universal --extra dev pyproject.toml --no-header --no-emit-index-url \
		--no-emit-find-links -q -o requirements.lock
