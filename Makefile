# Every target sets up what it needs: `make demo` and `make test` work on a fresh checkout.
#   make test ARGS="-k lanes"       passes ARGS on (to pytest, the demo or the bench)
#   make test MARKS="docker"        runs another selection of tests
#   make chaos SECONDS=60 ARGS="--backend local"
#   make demo PYTHON=python3.13     names the interpreter for a new .venv
.DEFAULT_GOAL := help
.PHONY: help demo test check chaos lint types imports format docs bench images lock clean venv FORCE

VENV_STAMP := .venv/.sandfleet-stamp
SECONDS ?= 600
MARKS ?= not docker and not chaos and not slow
ARGS ?=
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
LOCK = uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--no-emit-find-links --custom-compile-command "make lock"
export PYTHON

# A copied or moved checkout would run the code of the old one: its stamp names another directory.
ifneq ($(shell cat $(VENV_STAMP) 2>/dev/null),$(CURDIR))
$(VENV_STAMP): FORCE
endif

$(VENV_STAMP): requirements.lock pyproject.toml .ci/venv
	@.ci/venv

help: ## Print this list
	@echo "sandfleet: make TARGET"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-9s%s\n", $$1, $$2 }' Makefile

demo: $(VENV_STAMP) ## Start a fleet on this machine and let three threads work in it
	@.venv/bin/sandfleet demo $(ARGS)

test: $(VENV_STAMP) ## Run the default tests (at most 3 minutes; no root, Docker or Redis needed)
	@.venv/bin/python -m pytest -m "$(MARKS)" $(ARGS)

check: lint types imports ## Everything CI runs: lint, types, imports and all tests
	@$(MAKE) --no-print-directory test MARKS=""

chaos: $(VENV_STAMP) ## Torture a fleet for SECONDS with random faults and count what broke; writes build/chaos.json
	@.venv/bin/python -m tests.chaos.torture --seconds $(SECONDS) $(ARGS)

lint: $(VENV_STAMP) ## Check style and format
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .

types: $(VENV_STAMP) ## Check types
	@.venv/bin/mypy

imports: $(VENV_STAMP) ## Check who imports whom
	@.venv/bin/lint-imports --no-logo --no-cache

format: $(VENV_STAMP) ## Format and fix what can be fixed
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

docs: $(VENV_STAMP) ## Write the generated pages in docs/ anew
	@mkdir -p build
	@.venv/bin/python -m sandfleet.config.reference > build/configuration.md && mv build/configuration.md docs/
	@.venv/bin/python -m sandfleet.cli.reference > build/cli.md && mv build/cli.md docs/

bench: $(VENV_STAMP) ## Measure; prints a table and writes build/bench.json
	@mkdir -p build
	@.venv/bin/python -m tests.bench $(ARGS)

images: ## Build the images sandfleet/sandbox and sandfleet/service
	@docker build $(ARGS) -t sandfleet/sandbox:$(VERSION) -t sandfleet/sandbox:latest images/sandbox
	@docker build $(ARGS) -t sandfleet/service:$(VERSION) -t sandfleet/service:latest -f images/service/Dockerfile .

lock: ## Resolve requirements.lock anew (needs uv); ARGS="--upgrade" takes newer versions
	@$(LOCK) --all-extras --group dev --output-file requirements.lock $(ARGS)
	@$(LOCK) --extra checkpoints --extra cli --extra docker --extra flower --extra metrics --group build \
		--constraint requirements.lock --output-file images/service/requirements.lock

venv: $(VENV_STAMP) ## Make or refresh .venv and do nothing else

clean: ## Remove everything that make made
	@rm -rf .venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find scheduler shared tests workers -name __pycache__ -type d -prune -exec rm -rf {} +
