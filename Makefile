# Every target first makes the virtual environment .venv; nothing has to be activated.
#   make demo            photographs -> encode -> bucket -> train -> export -> sample -> report, in ./demo
#   make test            the default tests
#   make test WING=data  those of a wing: data, train or tools
#   make test-durations  the default tests, then the slowest twenty (DURATIONS=N)
# Settings:  VENV=dir  PYTHON=python3.12  PYTEST_ARGS="-x -k cache"  DEMO_DIR=dir  DEMO_ARGS="--quick"
#   JOBS=8   processes that share the tests (about 1.5 GB each; 4 for 2 cores, since some tests wait)
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu   the index for torch only (default: pip's index)
SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV        ?= .venv
PYTHON      ?= python3
DEMO_DIR    ?= demo
DEMO_ARGS   ?=
PYTEST_ARGS ?=
WING        ?=
JOBS        ?= 4
DURATIONS   ?= 20
BENCH_ARGS  ?=
ROOM        ?= cache sources images snapshots loader work encoding training
TORCH_INDEX ?=
CONSTRAINTS ?= constraints.txt

# Waiting threads sleep instead of spinning: on a busy two-core machine a spinning pair was 12 times slower.
export OMP_WAIT_POLICY ?= passive
# Without it every process would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
USER_STAMP := $(VENV)/.installed-for-users
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input
PYTEST := $(BIN)/python -m pytest

TARGETS := install browser demo collect test test-durations slow dist fault long fault-long nightly lowest newest versions mutants gpu cuda lint types format image bench check clean
.PHONY: help $(TARGETS)

help:
	@sed -n '2,8p' Makefile | sed 's/^# *//'
	@echo 'Targets: $(TARGETS)'

install: $(STAMP)

# torch is installed first and alone, so that its version is fixed and TORCH_INDEX applies to it only.
$(USER_STAMP): pyproject.toml $(CONSTRAINTS)
	@command -v '$(PYTHON)' >/dev/null || { echo "make: no '$(PYTHON)' on PATH; fix: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@'$(PYTHON)' -c 'import sys; ok = sys.version_info >= (3, 11); ok or print("make: Python >= 3.11 is needed, found", sys.version.split()[0], "; fix: make PYTHON=python3.11", file=sys.stderr); sys.exit(0 if ok else 2)'
	[ -x '$(BIN)/python' ] || '$(PYTHON)' -m venv '$(VENV)'
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(addprefix -c ,$(CONSTRAINTS)) torch
	$(PIP) install $(addprefix -c ,$(CONSTRAINTS)) -e '.[demo]'
	touch '$@'

# What tests and contributors need besides; `make demo` does without.
$(STAMP): $(USER_STAMP)
	$(PIP) install $(addprefix -c ,$(CONSTRAINTS)) -e '.[demo,test,dev]'
	touch '$@'

# Chromium, in which a test opens a report. The test is skipped without it.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null \
	  || { timeout 120 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq --no-install-recommends chromium; } >/dev/null \
	  || echo 'make: Chromium could not be installed: the test that opens a report in a browser will be skipped'

demo: $(USER_STAMP)
	$(BIN)/sana-pipe demo --out '$(DEMO_DIR)' $(DEMO_ARGS)

# Compiles what the tests import, which each process of a first `make test` would do otherwise: 15 s of a core, four times.
collect: $(STAMP)
	$(PYTEST) --collect-only -qq >/dev/null

# A process more than there are cores, since some tests wait for other processes.
test: $(STAMP)
	$(PYTEST) -n $$(($(JOBS) + 1)) --dist loadfile $(WING:%=tests/%) $(PYTEST_ARGS)

test-durations: $(STAMP)
	$(PYTEST) -n $(JOBS) --dist loadfile --durations=$(DURATIONS) --durations-min=0 $(PYTEST_ARGS)

slow: $(STAMP)
	$(PYTEST) -n $(JOBS) --dist loadfile -m 'slow and not dist and not fault and not gpu' --timeout 900 $(PYTEST_ARGS)

dist: $(STAMP)
	$(PYTEST) -n 2 --dist loadfile -m 'dist and not fault and not gpu' --timeout 600 $(PYTEST_ARGS)

fault: $(STAMP)
	$(PYTEST) -n $(JOBS) --dist loadfile -m 'fault and not gpu' --timeout 900 --fault-seeds 2 $(PYTEST_ARGS)

# The three before it at once, so that both cores have work to the end. Their tests start further processes: beside three
# others, those of test_strategies.py and test_dist_pipeline.py exceeded their time limits on two slow cores.
long: $(STAMP)
	$(PYTEST) -n 3 --dist loadfile -m '(slow or dist or fault) and not gpu' --timeout 900 --fault-seeds 1 $(PYTEST_ARGS)

fault-long: $(STAMP)
	$(PYTEST) -m 'fault and not gpu' --timeout 7200 --fault-seeds 100 $(PYTEST_ARGS)

nightly: $(STAMP) cuda
	$(PYTEST) -n $(JOBS) --dist loadfile -m 'nightly and not gpu' --timeout 3600 $(PYTEST_ARGS)

# What pyproject.toml declares must be true: the default tests with the lowest declared versions (uv finds them; pip tries
# releases of boto3 for a quarter of an hour), and with the newest that there are. `versions`, both, is for every night,
# since each installs a second environment.
lowest:
	'$(PYTHON)' -m venv .venv-lowest
	.venv-lowest/bin/python -m pip --disable-pip-version-check --no-input install uv
	.venv-lowest/bin/uv pip install --python .venv-lowest/bin/python --resolution lowest-direct -e '.[demo,test,dev]'
	touch .venv-lowest/.installed-for-users .venv-lowest/.installed
	$(MAKE) test VENV=.venv-lowest

newest:
	rm -rf .venv-newest
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=

versions: lowest newest

# Lists changes of the code that neither tests nor mypy notice: of SAMPLE changes, drawn anew each day.
SAMPLE ?= 200
mutants: $(STAMP)
	$(PIP) install -c constraints.txt -e '.[mutants]'
	$(BIN)/python -m tests.mutants --sample $(SAMPLE) $(ROOM)

# The paths of a GPU without one: torch's CUDA build (1 GB, fetched once into .venv-cuda or SANA_PIPE_CUDA=dir) on a pretended
# card. Needs gcc.
cuda: $(STAMP)
	$(BIN)/python -m tests.cuda
	$(PYTEST) -n 2 -m cuda --timeout 900 tests/cuda $(PYTEST_ARGS)

gpu: $(STAMP)
	$(PYTEST) -m gpu --timeout 600 $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.docstrings

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/python -m tests.support.package_links
	$(BIN)/mypy

# A container image; needs docker.
image: $(USER_STAMP)
	$(PIP) wheel --quiet --no-deps -w dist .
	docker build -t sana-pipe .

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

check: lint types test

clean:
	rm -rf '$(VENV)' .venv-lowest .venv-newest .venv-cuda build sana_pipe.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
