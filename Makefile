# The daily loop. `make demo` and `make test` need nothing but Python 3.11+ and a C++ compiler.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= requirements/cpu.txt
PYTEST_ARGS ?=
DEMO_ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test tests lint types format bench quality reference up clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-10s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[cpu,demo,dev,wandb]'
	# z-lab's own loader, which a test holds our exports against; not in our environment, its command is `dflash` too.
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/zlab dflash==0.1.0
	touch $@

demo: $(STAMP) ## chats to an accepted drafter on the CPU, in minutes (report in runs/demo)
	$(BIN)/dflash demo --output runs/demo $(DEMO_ARGS)

test: lint types tests ## lint, types and the whole test suite

tests: $(STAMP) ## the test suite alone
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP) ## ruff, without changing anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy
	$(BIN)/mypy

format: $(STAMP) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## the benchmarks that two CPU cores can run, as JSON in runs/bench
	mkdir -p runs/bench
	$(BIN)/python benchmarks/codec.py --json > runs/bench/codec.json
	$(BIN)/python benchmarks/store.py --json > runs/bench/store.json

quality: $(STAMP) ## what drafters earn by codec and by recipe (needs a GPU, hours; see docs/quality.md)
	$(BIN)/python -m pip install --quiet --editable '.[cpu,demo,quality]'
	for stage in prompts responses train decode; do $(BIN)/python benchmarks/quality.py $$stage --output runs/quality || exit 1; done

reference: $(STAMP) ## write docs/configuration.md from the classes
	$(BIN)/python -m flows.configuration_reference

up: $(STAMP) ## Prefect server, worker and the deployments on this machine
	$(BIN)/python -m flows.demo_target runs/demo/target
	$(BIN)/dflash up

clean: ## remove caches and build products, keep runs/
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
