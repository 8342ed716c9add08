PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check format bench peers compare accuracy choices install clean

demo: $(READY)  ## the main job on a fictional survey: a private release, rows, answers
	rm -rf demo
	$(BIN)/anamorph demo --out demo

test: $(READY)  ## all tests, on two cores
	$(BIN)/python -m pytest -n 2

check: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## every figure of the benchmarks, as JSON
	$(BIN)/python -m bench

peers: $(READY)  ## other people's synthesizers, each in an environment of its own under .peers
	$(BIN)/python -m bench.peers.harness

DATA ?= adult
WORKLOAD ?= marginals:k=3,count=64,seed=0
EPSILON ?= 1
NEIGHBOURS ?= add-remove
SEED ?= 0
ONLY ?=
FRESH ?=
LIMIT ?= 900

compare: $(READY)  ## one table of all mechanisms and peers, as CSV and a plot too
	$(BIN)/python -m bench.compare --data "$(DATA)" --workload "$(WORKLOAD)" --epsilon "$(EPSILON)" \
		--neighbours "$(NEIGHBOURS)" --seed "$(SEED)" --only "$(ONLY)" --seconds "$(LIMIT)" $(if $(FRESH),--fresh)

accuracy: $(READY)  ## auto against all others over data, workloads and epsilons; ONLY=auto,aim runs a part
	$(BIN)/python -m bench.grid --only "$(ONLY)" $(if $(FRESH),--fresh)

choices: $(READY)  ## auto against variants of it that change one choice each, relative to auto
	$(BIN)/python -m bench.choices

install: $(READY)  ## .venv with every extra; then .venv/bin/anamorph

$(READY): pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'anamorph needs Python 3.11 or newer')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[frames,pgm,eval,oracle,report,dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) demo .pytest_cache .ruff_cache .hypothesis
