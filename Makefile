SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup train test test-full test-faults check clean

# Open MPI refuses to run as root unless it is told twice; PRTE is the launcher of Open MPI 5.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_ALLOW_RUN_AS_ROOT := 1
export PRTE_ALLOW_RUN_AS_ROOT_CONFIRM := 1
root_note := @echo "tfdist: you are root, so make sets OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 for this command"
endif

enter := source .venv/bin/activate &&

help:  ## List these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 13
	@echo
	@echo 'Variables: PYTHON=python3.12, TFDIST_MPI=wheel|system, TFDIST_DEVICE=cpu|cuda, TFDIST_HOROVOD=yes|no,'
	@echo '           TFDIST_TEST_TOOLS=yes|no, TRAIN_ARGS="--epochs 2", PYTEST_ARGS="-k name"'

setup:  ## Make or update .venv: dependencies, MPI, Horovod (does nothing when nothing changed)
	@bash scripts/setup.sh

train: setup  ## Train the digits model on four processes with Horovod
	$(root_note)
	$(enter) mpirun -np 4 python scripts/train.py --backend horovod $(TRAIN_ARGS)

test: setup  ## Run the tests (about twenty minutes on two cores)
	@bash scripts/test_tools.sh
	$(root_note)
	$(enter) pytest -n 2 --dist loadfile --no-loadscope-reorder $(full) $(PYTEST_ARGS)

test-full: full := --full
test-full: test  ## Run them on more backends, numbers of replicas and variants (about half an hour)

test-faults: setup  ## Run the long campaigns of faults (about two hours on two cores)
	$(root_note)
	$(enter) pytest -m faults tests/faults $(PYTEST_ARGS)

check: setup  ## Check format, lint and types
	$(enter) ruff format --check . && ruff check . && mypy

clean:  ## Remove .venv and what tools left here (built Horovod wheels stay in the user's cache)
	rm -rf .venv build dist reports *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find tfdist hvd_backend scripts tests -name __pycache__ -prune -exec rm -rf {} +
