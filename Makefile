# Two commands do everything, from a fresh clone: `make quickstart` and `make test`.
# Before each commit: `make fast`. Before a release: `make check`, and `make mutants` for what changed.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
# the set of packages: gpu where nvidia-smi finds one, else cpu; SET=cpu leaves a GPU alone
FOUND  := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
SET    ?= $(FOUND)
BASE   := $(VENV)/.installed-$(SET)
DEV    := $(VENV)/.installed-dev
EXT    := agentgrpo/_C.abi3.so
# processes of the tests, each with an engine of its own: a GPU has room for one
JOBS   ?= $(if $(filter gpu,$(SET)),0,2)
TEST   := AGENTGRPO_PACKAGES_REQUIRED=1 $(PY) -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

NAME_cpu  := CPU
NAME_gpu  := GPU
OTHER_cpu := gpu
OTHER_gpu := cpu

.PHONY: quickstart recipe-demo fast test view-test check mutants warnings lint types asan fuzz bench clean

quickstart: $(BASE) $(EXT)
	@echo "== training: SmolLM2-135M learns to solve word problems by writing Python"
	@$(PY) -m agentgrpo train quickstart $(ARGS)

recipe-demo: $(BASE) $(EXT)
	@echo "== a recipe: SmolLM2-135M learns to compute and to search, with one call each"
	@$(PY) -m agentgrpo recipe recipe $(ARGS)

fast: $(DEV) $(EXT) lint types
	@echo "== tests that start no engine and no whole run"
	$(TEST) -m "not slow" --timeout 120

test: $(DEV) $(EXT) lint types
	@echo "== tests"
	$(TEST)

view-test: $(DEV) $(EXT)
	@echo "== the viewer in a headless Chromium, which must be there"
	AGENTGRPO_REQUIRE_BROWSER=1 $(PY) -m pytest tests/view

check: export AGENTGRPO_WERROR = 1
check: lint types warnings asan test

warnings: $(DEV)
	@echo "== the C extension compiles without a warning"
	$(PY) setup.py --quiet build_ext --force --inplace

mutants: $(DEV) $(EXT)
	@echo "== mutants: places changed one at a time in the files that changed (ARGS='FILE ... --since REV --most N')"
	$(PY) -m tests.mutation $(ARGS)

fuzz: export AGENTGRPO_FUZZ ?= 1000000
fuzz: $(DEV) $(EXT)
	@echo "== fuzz: $(AGENTGRPO_FUZZ) calls of the sandbox (AGENTGRPO_FUZZ=COUNT)"
	$(PY) -m pytest -q --timeout=0 tests/sandbox/test_fuzz.py

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

# Old Pythons cannot read install.py
INSTALL := @command -v $(PYTHON) >/dev/null || { echo "error: there is no $(PYTHON); Python 3.11 or newer is needed: make PYTHON=/PLACE/python3.12 ..."; exit 1; }; $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, %s is %s: make PYTHON=python3.12 ...; docs/install.md says where to get one" % (sys.executable, sys.version.split()[0]))' && $(PYTHON) install.py $(VENV)

$(BASE): requirements-$(SET).txt setup.py install.py
	@test ! -e $(VENV)/.installed-$(OTHER_$(SET)) || { echo "error: $(VENV) holds the $(NAME_$(OTHER_$(SET))) set; remove it, or name another folder: make VENV=.venv-$(SET) ..."; exit 1; }
	$(INSTALL) $(SET)
	@touch $@

$(DEV): requirements-dev.txt $(BASE)
	$(INSTALL) dev
	@touch $@

$(EXT): setup.py $(wildcard csrc/*.c csrc/*.h) $(BASE)
	$(INSTALL) extension
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info agentgrpo/*.so .mypy_cache .ruff_cache .pytest_cache
