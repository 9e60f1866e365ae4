# Two commands do everything, from a fresh clone: `make quickstart` and `make test`.
# Before each commit: `make fast`. Before a release: `make check`, and `make mutants` for what changed.
PYTHON ?= python3
VENV   ?= .venv
# the set of packages, cpu or gpu, each in its own folder; docs/gpu.md lists what has run on which card
SET    ?= cpu
ENV    := $(VENV)$(if $(filter gpu,$(SET)),-gpu)
PY     := $(ENV)/bin/python
BASE   := $(ENV)/.installed
DEV    := $(ENV)/.installed-dev
EXT    := agentgrpo/_C.abi3.so
# processes of the tests, each with an engine of its own: a GPU has room for one
JOBS   ?= $(if $(filter gpu,$(SET)),0,2)
TEST   := AGENTGRPO_PACKAGES_REQUIRED=1 $(PY) -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: quickstart recipe-demo fast test view-test check mutants warnings lint types asan fuzz bench clean

ifeq ($(SET),gpu)
quickstart:
	@$(MAKE) --no-print-directory $(BASE) || { echo "== the CPU set instead"; exec $(MAKE) --no-print-directory quickstart SET=cpu; }; \
	test ! -e $(BASE) || $(PY) -m agentgrpo train quickstart $(ARGS)
else
quickstart: $(BASE) $(EXT)
	@nvidia-smi -L >/dev/null 2>&1 && echo "== this machine has a GPU, and this is the CPU set: make quickstart SET=gpu tries the other" || true
	@echo "== training: SmolLM2-135M learns to solve word problems by writing Python"
	@$(PY) -m agentgrpo train quickstart $(ARGS)
endif

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
	AGENTGRPO_REQUIRE_BROWSER=1 $(PY) -m pytest tests/inspect/view

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
	$(ENV)/bin/ruff check .
	$(ENV)/bin/ruff format --check .
	$(PY) -m tests.language
	$(ENV)/bin/clang-format --dry-run -Werror csrc/*.c csrc/*.h

types: $(DEV)
	@echo "== types"
	$(ENV)/bin/mypy

asan: $(DEV)
	@echo "== C extension under AddressSanitizer and UBSan"
	sh tests/csrc/run_sanitized.sh $(PY)

bench: $(DEV) $(EXT)
	$(PY) -m bench.$(NAME) $(ARGS)

# Old Pythons cannot read install.py
INSTALL := @command -v $(PYTHON) >/dev/null || { echo "error: there is no $(PYTHON); Python 3.11 or newer is needed: make PYTHON=/PLACE/python3.12 ..."; exit 1; }; $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, %s is %s: make PYTHON=python3.12 ...; docs/install.md says where to get one" % (sys.executable, sys.version.split()[0]))' && $(PYTHON) install.py $(ENV)

$(BASE): requirements-$(SET).txt setup.py install.py
	$(INSTALL) $(SET)
	@touch $@

$(DEV): requirements-dev.txt $(BASE)
	$(INSTALL) dev
	@touch $@

$(EXT): setup.py $(wildcard csrc/*.c csrc/*.h) $(BASE)
	$(INSTALL) extension
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-gpu build dist *.egg-info agentgrpo/*.so .mypy_cache .ruff_cache .pytest_cache
