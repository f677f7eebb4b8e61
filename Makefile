# make setup, demo, gallery, papers, test, test-all, lint: the targets that matter.
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
SHELL := /bin/bash  # Apple's make 3.81 ignores this PATH if it starts a command without a shell

.PHONY: setup demo gallery papers test test-all lint lint-fast mypy-package mypy-tests docs notebook docs-site docs-serve benchmarks benchmarks-peers lock

setup: $(BIN)/.installed

# The lock has all dependencies, so pip need not resolve them. PyTorch is half of the bytes and has its own process.
PIP_OPTIONS := -q --no-compile --no-deps
TORCH := ^(cuda-|nvidia-|torch|triton)

$(BIN)/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 15) or sys.exit("fedpipe needs Python 3.11 to 3.14, and " \
		"$(PYTHON) is %d.%d. Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install $(PIP_OPTIONS) -r <(grep -E '$(TORCH)' requirements.lock) & \
		$(BIN)/pip install $(PIP_OPTIONS) -r <(grep -vE '$(TORCH)' requirements.lock) && wait $$!
	$(BIN)/pip check
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests/' .venv/lib || true  # pip would compile on one core
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	touch $@

# The shipped study (params.yaml), from digits to table and figures.
demo: setup
	fedpipe run || { fedpipe status; fedpipe show; exit 1; }
	@fedpipe show

# All algorithms on digits, in one table and one plot.
gallery: setup
	fedpipe run --params studies/gallery.yaml || \
		{ fedpipe status --params studies/gallery.yaml; fedpipe show --params studies/gallery.yaml; exit 1; }
	@fedpipe show --params studies/gallery.yaml

# The four papers' tables and figures next to the published ones: `make papers PRESET=reduced`. If a run fails, the
# pages show a dash with the reason, and the exit status is not 0.
PRESET ?= smoke
papers: setup
	@test "$(PRESET)" != full || { echo "make: preset full would take years on one machine. Run studies one by one, as" \
		"'fedpipe run --params studies/papers/pfps_lwc/table2.yaml', or all on a cluster, by" \
		"'snakemake papers --config preset=full --profile slurm'." >&2; exit 2; }
	snakemake papers --config preset=$(PRESET) --profile workflow/profiles/local --quiet rules host

# Each of the tests' many processes would compile everything again if the environment forbids to write bytecode.
test test-all: export PYTHONDONTWRITEBYTECODE =

# The everyday tests, with real snakemake and dvc. Two processes share them.
test: setup
	pytest -q -n 2 --dist worksteal --durations 30 -m "not slow"

# The slow tests: kills at random moments, complete studies, Slurm. Tests of one file share a process and what they
# start there. There are four processes, because the two with Slurm mostly wait. With --dist loadfile pytest-xdist would
# wait forever after the restart of a process whose test hung.
test-all: setup
	pytest -q -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 30 -m slow

lint: setup
	@$(MAKE) --no-print-directory lint-fast
	snakemake --lint

# What pre-commit runs. It installs nothing, and does not plan params.yaml as `snakemake --lint` does.
lint-fast:
	ruff check
	ruff format --check
	@$(MAKE) --no-print-directory -j 2 mypy-package mypy-tests
	lint-imports
	snakefmt --check Snakefile workflow

mypy-package:
	mypy --strict fedpipe snakemake_executor_plugin_fedpipe_slurm snakemake_logger_plugin_fedpipe

mypy-tests:  # at the same time as mypy-package, so it needs its own cache
	mypy --config-file tests/mypy.ini --cache-dir .mypy_cache/tests tests benchmarks

# Files generated from the code: run this after a change of a component's parameters or docstring.
docs: setup
	fedpipe docs

# The outputs of examples/results.ipynb, from the results of `make demo`.
notebook: demo
	python examples/execute_notebook.py

# The documentation as a site, in site/. A broken link is an error.
docs-site: setup
	sphinx-build -q -W --keep-going -c docs . site

docs-serve: docs-site
	python -m http.server --directory site --bind 127.0.0.1 8000

# The tables of benchmarks/RESULTS.md, measured with the current code. Nothing else may use the machine: `make benchmarks
# SECTIONS="startup round"` for some of them. The other systems need clones and packages, which the page names.
benchmarks: setup
	python benchmarks/results.py $(SECTIONS)

benchmarks-peers: setup
	python benchmarks/results.py peers $(if $(PFLLIB),--pfllib "$(PFLLIB)") $(if $(FL_BENCH),--fl-bench "$(FL_BENCH)")

# Exact versions of everything, for all platforms, without index addresses. Tests use all of these extras.
lock:
	$(PYTHON) -m uv pip compile --universal --extra dev --extra flwr-datasets --extra huggingface --extra mlflow \
		--extra optuna --extra tensorboard --extra timm --extra wandb pyproject.toml --no-header --no-emit-index-url --no-emit-find-links -q -o requirements.lock
