# The two commands of a user, and what developers need. Each sets itself up (scripts/make_venv.sh).
PYTHON_BIN := .venv/bin/python

.PHONY: demo test lint bench venv
demo: venv
	$(PYTHON_BIN) examples/demo.py

test: venv
	$(PYTHON_BIN) -m pytest -q tests

lint: venv
	$(PYTHON_BIN) -m ruff check .
	$(PYTHON_BIN) -m mypy

bench: venv
	$(PYTHON_BIN) -m benchmarks.tree

venv:
	@bash scripts/make_venv.sh
