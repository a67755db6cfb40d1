# Two commands: `make serve` and `make test`. Both set up .venv on first use and reuse it afterwards.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2

.PHONY: serve test clients lint install clean

serve: $(STAMP)  ## the server on the bundled checkpoint and its draft; ARGS="--tp 2 --ep 2" for more
	$(BIN)/python serve.py --draft auto $(ARGS)

test: $(STAMP) lint  ## everything that needs no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

clients: $(STAMP)  ## other people's clients against a real server, each in an environment of its own
	$(BIN)/python tests/clients/run.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo

install: $(STAMP)

# A virtual environment that was moved or copied has broken paths inside, so it is made where it is used.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Turnout needs Python 3.11 or newer.")'
	$(PYTHON) -m venv $(VENV) || { echo "apt-get install python3-venv first"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_OPTIONS) --editable '.[test]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-clients
