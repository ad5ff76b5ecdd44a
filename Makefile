# Each target does everything from a fresh clone: it needs Python (3.10 or newer) with pip, and nothing else.
#
#   make demo     the demo workflow, headless: one picture in output/
#   make test     the whole test suite on two processors; ARGS="-k name" picks tests, WORKERS=0 runs them in one process
#   make lint     ruff, lint and format
#   make wheel    the wheel in dist/
#
# PYTHON picks the interpreter; TORCH_ARGS are pip options for torch alone (for example --index-url of a CPU index).

PYTHON ?= python3
TORCH_ARGS ?=
ARGS ?=
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEMO := example_workflows/api/nativedit_demo.json

.PHONY: demo test lint format wheel clean

demo: $(READY)
	$(BIN)/nativedit run $(DEMO) --output-dir output

# From inside tests/: the repository root is a package and must not come onto sys.path (its nodes/ would shadow ComfyUI's).
test: $(READY)
	cd tests && ../$(BIN)/pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# build/ is removed first: setuptools puts what an older build left there into the wheel.
wheel: $(READY)
	rm -rf build
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .

# torch first and by exact version: an open range lets pip choose the newest build, with gigabytes of CUDA.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q $(TORCH_ARGS) $$(sed -n '/^torch==/p' constraints.txt)
	$(PIP) install -q -c constraints.txt -e '.[standalone,test]'
	touch $@

clean:
	rm -rf $(VENV) build dist output *.egg-info .ruff_cache tests/.pytest_cache tests/.hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
