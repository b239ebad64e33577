# From a bare checkout with Python 3.11+: `make demo` and `make test` make .venv, install what CI tested, and run.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: demo results key-sentences engines recipes test test-other-processor test-slow faults lint clean

demo: .venv/installed
	$(BIN)/python scripts/demo.py

results: .venv/installed
	$(BIN)/python scripts/compare_methods.py

key-sentences: .venv/installed
	$(BIN)/python scripts/key_sentences.py

# Other engines beside transformers, each in an environment of its own in the cache folder (about 6 GB): docs/engines.md.
engines: .venv/installed
	$(BIN)/python scripts/smollm2.py
	$(BIN)/python benchmarks/engines.py
	$(BIN)/python benchmarks/tables.py

recipes: .venv/installed
	$(BIN)/python scripts/count_shapes.py
	$(BIN)/pi-lora recipes --markdown > recipes/README.md
	$(BIN)/pi-lora recipes --keys > docs/recipes.md

# A worker for each core, of one thread each.
test: .venv/installed
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal

# Those that depend on whether the processor has instructions for bfloat16, as if it were of the other kind.
test-other-processor: .venv/installed
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PI_LORA_TEST_PROCESSOR=other \
		$(BIN)/pytest -n auto --dist worksteal -m 'processor and not slow and not gpu and not network'

test-slow: .venv/installed
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m slow

# What docs/reliability.md promises, the slow part included.
faults: .venv/installed
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PI_LORA_FAULTS=$(or $(FAULTS),1000) $(BIN)/pytest tests/faults -m 'slow or not slow' -n auto --dist worksteal

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pi-lora needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
