# `make demo` runs the main job, `make test` the tests. Each sets up what it needs.
#
# On Linux, PyPI's torch brings CUDA along (some GB). For the small CPU build:
#   make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
MODEL ?= smollm2-135m
BIN := $(VENV)/bin
# The pins are of Python 3.11; older ones take what the ranges in pyproject.toml allow.
PINS := $(shell $(PYTHON) -c 'import sys; print("-c constraints.txt" * (sys.version_info >= (3, 11)))')

.PHONY: demo test browser lint lab lessons site bench clean

demo: $(VENV)/.demo
	@mkdir -p runs
	$(BIN)/python -m minibatch run --model $(MODEL) --file data/prompts/demo.txt \
		--max-num-seqs 4 --max-tokens 48 --temperature 0 --show-steps \
		--trace runs/demo.jsonl.gz
	@echo "Recorded in runs/demo.jsonl.gz; look again: $(BIN)/python -m minibatch trace show runs/demo.jsonl.gz"

test: $(VENV)/.test lint browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# Widgets are tried in a real browser, where there is one or root may install one.
browser:
	@command -v chromium >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null \
		|| (apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium >/dev/null)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lab: $(VENV)/.test
	$(BIN)/python -m jupyterlab notebooks/index.ipynb

lessons: $(VENV)/.test
	$(BIN)/python -m lessons build

site: $(VENV)/.test
	$(BIN)/python -m lessons site --out build/site

bench: $(VENV)/.demo
	$(BIN)/python benchmarks/smoke.py

clean:
	rm -rf $(VENV) runs build dist *.egg-info

$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) $(PINS) -e .
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) $(PINS) -e '.[test]'
	touch $@
