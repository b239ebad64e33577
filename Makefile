# From a bare checkout with Python 3.11+: `make demo` and `make test` make .venv, install what CI tested, and run.
# `make` alone prints the targets.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_DISABLE_TELEMETRY := 1
# Python writes bytecode at the first import, also where a container's environment forbids it: without it every process
# compiles the libraries again.
export PYTHONDONTWRITEBYTECODE :=
# Earlier ones do not install dependency groups.
PIP := pip>=25.1

.PHONY: help demo reproduce recipes test test-all test-oldest test-newest test-slow faults lint docs notebook release clean

help:
	@echo "make demo                  the whole method on a CPU, in minutes"
	@echo "make reproduce NAME=...    a figure of the README or of docs/ again; benchmarks/README.md lists the names"
	@echo "make test, make lint       the tests that run before every commit; ruff and mypy"
	@echo "make test-all              also every matrix and stress"
	@echo "make test-slow, test-oldest, test-newest, faults"
	@echo "make docs, notebook, recipes, release, clean"

demo: .venv/installed
	$(BIN)/python scripts/demo.py

# A figure of the README or of docs/ again: benchmarks/README.md lists the names.
reproduce: .venv/installed
	$(BIN)/python benchmarks/reproduce.py $(NAME)

recipes: .venv/installed
	$(BIN)/python scripts/count_shapes.py
	$(BIN)/python scripts/family_plans.py
	$(BIN)/pi-lora recipes --keys > docs/recipes.md

# Offline, a worker for each core, of one thread each.
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest
IN_PARALLEL := -n auto --dist worksteal

# Every promise once: what a contributor runs before a commit. Lists the tests that take more than 3 seconds.
test: .venv/installed
	$(PYTEST) $(IN_PARALLEL) --limits --durations=0 --durations-min=3

# Also every matrix and stress: architectures, kills, several processes, simulated plans, scripts, the notebook.
test-all: .venv/installed
	$(PYTEST) $(IN_PARALLEL) --all

# With the oldest versions that pyproject.toml allows. On Linux torch comes with CUDA, in 7 GB, unless
# `make test-oldest TORCH=2.13.0+cpu` names another.
test-oldest: .venv-oldest/installed
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .venv-oldest/bin/pytest --all -n auto --dist worksteal

# With the newest versions that pyproject.toml allows; TORCH as above.
test-newest: .venv-newest/installed
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .venv-newest/bin/pytest --all -n auto --dist worksteal

test-slow: .venv/installed
	HF_HUB_OFFLINE=1 $(BIN)/pytest --all -m slow

# What docs/design.md promises, with STRIKES kills and as many signals: 150 of each take 10 minutes of one core.
faults: .venv/installed
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PI_LORA_STRIKES=$(or $(STRIKES),150) \
		$(BIN)/pytest tests/faults tests/test_run.py --all -m 'slow or not slow' -n auto --dist worksteal

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, in site/; a link that leads nowhere is an error.
docs: .docs/installed
	PATH=$(CURDIR)/.docs/bin:$$PATH NO_MKDOCS_2_WARNING=1 .docs/bin/mkdocs build --strict --quiet

# Execute the notebook, in an empty folder, and keep what it prints.
notebook: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt nbclient ipykernel
	$(BIN)/python scripts/run_notebook.py docs/quickstart.ipynb

# Wheel and sdist in dist/, checked, and the first minute of the demo with the wheel outside the checkout.
release:
	scripts/release.sh $(PYTHON)

clean:
	rm -rf .venv .venv-newest .venv-oldest .docs site dist

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pi-lora needs Python 3.11 or newer: make PYTHON=python3.11")'
	@echo "Installing into .venv: about two minutes of two cores and a download of 0.6 GB (with CUDA 3 GB), without output."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade '$(PIP)'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --group dev --editable '.[all]'
	touch $@

.venv-oldest/installed: pyproject.toml scripts/oldest.py
	$(PYTHON) -m venv .venv-oldest
	$(PYTHON) scripts/oldest.py $(and $(TORCH),torch==$(TORCH)) > .venv-oldest/constraints.txt
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check --constraint .venv-oldest/constraints.txt \
		--editable '.[all]' hatchling pytest pytest-xdist hypothesis
	touch $@

.venv-newest/installed: pyproject.toml
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --disable-pip-version-check --upgrade '$(PIP)'
	.venv-newest/bin/pip install --quiet --disable-pip-version-check $(and $(TORCH),torch==$(TORCH)) --group dev --editable '.[all]'
	touch $@

# The site needs the sources only, not what they import.
.docs/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .docs
	.docs/bin/pip install --quiet --disable-pip-version-check --upgrade '$(PIP)'
	.docs/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --group docs
	touch $@
