# `make run` and `make test` are all that a fresh clone needs: each sets up .venv first, once per requirements.lock, and
# builds the dashboard, once per change of its sources. pip and npm take their index, certificates and time-outs from the
# environment.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first one that runs (version managers leave names behind that do not) and is not too old or too new.
FITS := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(FITS)' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
SET_UP := $(VENV)/.set-up

NODE_FITS := const [major, minor] = process.versions.node.split("."); process.exit(major > 20 || (major == 20 && minor >= 19) ? 0 : 1)
NODE_MODULES := dashboard/node_modules/.package-lock.json
DASHBOARD := node/api/static/index.html
DASHBOARD_SOURCES := $(shell find dashboard -type f -not -path 'dashboard/node_modules/*' -not -path 'dashboard/test/*')

REVISION = $(shell git describe --always --abbrev=12 --dirty=+ --exclude='*' 2>/dev/null)
JOIN ?=
NAME ?= first
N ?= 4
ARGS ?=

# The image: cpu or cuda; IMAGE_ARGS are the engine's, such as --build-arg TORCH_INDEX_URL=... (docker/Dockerfile).
DOCKER ?= docker
TARGET ?= cpu
IMAGE ?= diloco-node:$(TARGET)
IMAGE_DASHBOARD ?= build
IMAGE_ARGS ?=

.PHONY: help run test test-all test-docker lint dashboard swarm homes wheel image sbom bench bench-sync storm lock clean

help:
	@echo "make run                           a node on the built-in preset"
	@echo "make run JOIN=INVITE NAME=second   another one beside it"
	@echo "make test                          what a contributor runs before a commit: minutes"
	@echo "make test-all                      everything that needs no GPU, with real swarms and a browser: what CI runs"
	@echo "make lint                          style, types, imports"
	@echo "make dashboard                     the page that nodes serve, built into node/api/static"
	@echo "make swarm N=4                     N local nodes; Ctrl-C ends them all"
	@echo "make homes N=6                     N nodes, each in a home of its own: NAT, line, router (root)"
	@echo "make wheel                         the package, with the dashboard in it, as dist/*.whl"
	@echo "make image TARGET=cpu              the container image: cpu or cuda"
	@echo "make sbom                          what is in the image, with versions and licences: dist/sbom-cpu.tsv"
	@echo "make test-docker                   the image, compose and a wheel for real (root; half an hour)"
	@echo "make bench                         measurements (tests/benchmarks)"
	@echo "make bench-sync                    what synchronising costs, with a report (root; more than an hour)"
	@echo "make storm                         45 minutes: faults at random, then every fault at every place"
	@echo "make lock                          write requirements.lock anew from pyproject.toml"

$(SET_UP): requirements.lock pyproject.toml
	@[[ -n "$(PYTHON)" ]] || { echo "diloco-node needs Python 3.11, 3.12 or 3.13, with its venv module." >&2; exit 2; }
	@echo "Setting up $(VENV) (once; some minutes) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(NODE_MODULES): dashboard/package-lock.json
	@{ node -e '$(NODE_FITS)' && npm --version; } >/dev/null 2>&1 || \
		{ echo "The dashboard's build needs Node.js 20.19 or newer, with npm." >&2; exit 2; }
	@echo "Fetching what the dashboard's build needs (once) ..."
	@cd dashboard && npm ci --no-audit --no-fund --loglevel=error
	@touch $@

dashboard: $(DASHBOARD)
$(DASHBOARD): $(NODE_MODULES) $(DASHBOARD_SOURCES)
	@cd dashboard && npm run --silent build -- --logLevel warn

# Every NAME has its own data folder.
run: $(SET_UP) $(DASHBOARD)
	@exec $(BIN)/diloco-node run --data-dir .data/$(NAME) --name $(NAME) $(if $(JOIN),--join $(JOIN)) $(ARGS)

# What measures time needs the machine to itself.
ALONE := tests/swarm/test_load.py tests/swarm/test_stopwatch.py

test: lint $(DASHBOARD)
	@cd dashboard && npm test --silent
	@$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: lint $(DASHBOARD)
	@cd dashboard && npm test --silent
	@$(BIN)/python -m pytest -n 2 $(addprefix --ignore=,$(ALONE))
	@$(BIN)/python -m pytest $(ALONE)

lint: $(SET_UP) $(NODE_MODULES)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "Not formatted: run $(BIN)/ruff format ." >&2; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@cd dashboard && npm run --silent check

swarm: $(SET_UP) $(DASHBOARD)
	@exec $(BIN)/python tests/swarm/local_swarm.py --nodes $(N) --data-dir .data/swarm $(ARGS)

# ARGS are the laboratory's: --kinds published,cone,symmetric --lines 100/20,2/2
homes: $(SET_UP) $(DASHBOARD)
	@exec $(BIN)/python -m tests.homes --homes $(N) $(ARGS)

# The commit goes into the wheel as a file, as there is no git where it is installed.
wheel: $(SET_UP) $(DASHBOARD)
	@rm -rf build dist/*.whl
	@echo "$(REVISION)" > node/revision.txt
	@trap 'rm -f node/revision.txt' EXIT; $(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

# The dashboard is built inside, with Node.js from an image; IMAGE_DASHBOARD=prebuilt takes the one built here instead.
ifeq ($(IMAGE_DASHBOARD),prebuilt)
image: $(DASHBOARD)
endif
image:
	@DOCKER_BUILDKIT=1 $(DOCKER) build --file docker/Dockerfile --target $(TARGET) --tag $(IMAGE) \
		--build-arg DASHBOARD=$(IMAGE_DASHBOARD) --build-arg REVISION="$(REVISION)" \
		--label org.opencontainers.image.version="$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' node/__init__.py)" \
		--label org.opencontainers.image.revision="$$(git rev-parse HEAD 2>/dev/null || echo unknown)" \
		--label org.opencontainers.image.created="$$(date -u +%Y-%m-%dT%H:%M:%SZ)" $(IMAGE_ARGS) .

sbom:
	@mkdir -p dist
	@$(DOCKER) run --rm --interactive --network none --entrypoint python3 $(IMAGE) - < docker/sbom.py > dist/sbom-$(TARGET).tsv
	@wc -l dist/sbom-$(TARGET).tsv

test-docker: $(SET_UP) $(DASHBOARD)
	@DILOCO_TEST_DOCKER=1 $(BIN)/python -m pytest tests/docker --timeout 900

bench: $(SET_UP)
	@exec $(BIN)/python -m tests.benchmarks $(ARGS)

# ARGS are the cells'. What is there of the convergence, `python -m tests.benchmarks.convergence`, comes into the report.
bench-sync: $(SET_UP)
	@for what in "sync $(ARGS)" link_drop codecs report; do $(BIN)/python -m tests.benchmarks.$$what; done

# ARGS are the storm's: --nodes 8 --minutes 20 --fault-every 15 --seed 1. All three run, whatever the first come to.
storm: $(SET_UP)
	@failed=0; for what in "tests.swarm.storm $(ARGS)" tests.contract.matrix tests.swarm.matrix; do \
		$(BIN)/python -m $$what || failed=$$?; [[ $$failed != 130 ]] || break; done; exit $$failed

lock:
	@rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	@.venv-lock/bin/python -m pip -qq install --editable '.[dev]'
	@{ echo "# Exact versions of everything, written by make lock. torch's CUDA packages follow from its own exact pins."; \
		.venv-lock/bin/python -m pip freeze --exclude-editable --all --exclude pip | sed 's/+[a-z0-9.]*$$//'; } > requirements.lock
	@rm -rf .venv-lock

clean:
	@rm -rf $(VENV) .venv-lock build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	@rm -rf dashboard/node_modules node/api/static
