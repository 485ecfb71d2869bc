# Sets up .venv and runs everything. Needs GNU make 3.81 or newer, a POSIX shell and Python 3.10 or newer.
# The files .venv/.* record what is installed; a change of pyproject.toml or constraints.txt installs again.
# TORCH is for scripts/install_torch.py. --no-compile saves half of pip's time; Python compiles what it imports.

PYTHON ?= python3
export TORCH
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile -c constraints.txt

.PHONY: help demo setup test lint site serve notebooks lab bench-tp figures clean FORCE

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'PYTHON=python3.12 chooses the interpreter for .venv (now: $(PYTHON)).'
	@echo 'TORCH=cpu, TORCH=cuda or TORCH="what pip should install" chooses the build of torch.'

demo: .venv/.core ## set up, fetch the model, answer a question with the engine
	@$(BIN)/minisgl fetch
	@echo '$$ minisgl generate --chat --stats "What is the capital of France?"'
	@$(BIN)/minisgl generate --chat --stats "What is the capital of France?"
	@echo
	@echo 'Next:'
	@echo '  $(BIN)/minisgl chat   talk with it'
	@echo '  make serve               read the course in a browser'
	@echo '  make test                run everything that CI runs'
	@echo '  make setup; source $(BIN)/activate; python -m chapters start 1   write chapter 1 yourself'

setup: .venv/.test ## install what writing a chapter, the tests and the site need

test: lint ## run everything that CI runs
	@$(BIN)/minisgl fetch
	$(BIN)/python -m chapters figures --check
	$(BIN)/python -m chapters check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --nbmake notebooks tests/site tests # the longest first

lint: .venv/.test ## check spelling, style and types
	$(BIN)/codespell *.md chapters notebooks minisgl kernels hub benchmarks scripts tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

site: .venv/.test ## build the course's site into site/
	$(BIN)/mkdocs build --strict

serve: .venv/.test ## read the course at http://localhost:8000
	$(BIN)/mkdocs serve

notebooks: .venv/.test ## run every notebook and write its outputs into it
	@$(BIN)/minisgl fetch
	$(BIN)/python -m pytest --nbmake --overwrite notebooks

lab: .venv/.lab ## open the notebooks in Jupyter
	$(BIN)/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks

bench-tp: .venv/.test ## measure tensor parallel on all GPUs of this host
	$(BIN)/python -m benchmarks.tp

figures: .venv/.test ## draw the figures whose script or data changed
	$(BIN)/python -m chapters figures

clean: ## remove .venv and everything built; the model and workspace/ stay
	rm -rf .venv build site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/.created:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) is not installed; choose another with PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "$$($(PYTHON) --version 2>&1) is too old: minisgl needs 3.10 or newer; choose it with PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo 'Creating .venv with $(PYTHON) …'
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.torch: .venv/.created FORCE
	@$(BIN)/python scripts/install_torch.py

.venv/.core: .venv/.torch pyproject.toml constraints.txt
	@echo 'Installing minisgl and what it needs (half a minute) …'
	@$(PIP_INSTALL) --editable .
	@touch $@

.venv/.test: .venv/.torch pyproject.toml constraints.txt
	@echo 'Installing minisgl with the tools for tests and site (a minute) …'
	@$(PIP_INSTALL) --editable '.[dev,site]'
	@touch .venv/.core $@

.venv/.lab: .venv/.torch pyproject.toml constraints.txt
	@echo 'Installing minisgl with Jupyter (a minute) …'
	@$(PIP_INSTALL) --editable '.[notebooks]'
	@touch .venv/.core $@
