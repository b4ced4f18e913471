# Everything runs inside .venv; the targets make it themselves when it is missing.
PYTHON ?= python3
BIN := .venv/bin
# One thread for torch in every process: two busy processes with two threads each are several times slower than with one.
export OMP_NUM_THREADS = 1
export HF_HUB_OFFLINE = 1

.PHONY: help setup demo test test-all lint format docs bench paper-tables clean

help:
	@echo "make demo      set up and run the main job"
	@echo "make test      set up and run the tests (under 6 minutes)"
	@echo "make test-all  the tests with the slow ones"
	@echo "make lint      ruff, pyright, import-linter"
	@echo "make docs      build the site into site/"
	@echo "make bench     measure against peers (installs them into environments of their own)"
	@echo "make paper-tables  every table and figure of the papers for the suite digits, into paper/"

setup: .venv/ready

.venv/ready: Makefile pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[data,figures,hub,ray,suites,test,lint,docs]'
	touch $@

demo: setup
	$(BIN)/mergeway demo

test: setup
	$(BIN)/python -m pytest -n 2

test-all: setup
	$(BIN)/python -m pytest -n 2 -m ''

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup
	$(BIN)/mkdocs build --strict

bench: setup
	$(BIN)/python benchmarks/run.py

# Resumes where it was stopped; PAPER holds more options, such as PAPER='--orders 3 --samples 128'.
paper-tables: setup
	$(BIN)/mergeway bench digits --table all --figure all --out paper $(PAPER)

clean:
	rm -rf .venv site dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
