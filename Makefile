# make demo | test | env | lint | docs | clean, with LINE=onedl (default) or LINE=upstream.
# VENV=path takes an environment of your own, for example one with a CUDA build of torch.

LINE ?= onedl
VENV ?= $(if $(filter onedl,$(LINE)),.venv,.venv-$(LINE))
# The first that runs is taken; PYTHON=path names another.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.10; do \
    $$p -c '' >/dev/null 2>&1 && echo $$p && break; done)
JOBS ?= 2

# Two processes on two cores, of which the idle one takes over from the other: one thread each, and
# the environment's commands first.
RUN = OMP_NUM_THREADS=1 PATH="$(abspath $(VENV))/bin:$$PATH"

.PHONY: help env demo test lint docs clean

help:
	@echo 'make env    set up the environment in $(VENV)'
	@echo 'make demo   train, evaluate and show a detector and a segmentor on generated images'
	@echo 'make test   run the tests (SLOW=1: those that take minutes too; ARGS=... for pytest)'
	@echo 'make lint   check the style, and that imports run downwards'
	@echo 'make docs   build the site in build/site'
	@echo 'make clean  remove what builds and runs left behind, but no environment'
	@echo 'LINE=onedl|upstream chooses the dependency line, VENV=path another environment.'

env:
	@test -n '$(PYTHON)' || { echo 'error: none of python3.11, python3.12 and python3.10 runs;' \
	    'install Python 3.11 or name one with PYTHON=path' >&2; exit 1; }
	@'$(PYTHON)' tools/setup_env --line '$(LINE)' --venv '$(VENV)'

demo: env
	@PATH="$(abspath $(VENV))/bin:$$PATH" python tools/demo.py $(ARGS)

test: env
	$(RUN) python -m pytest -n $(JOBS) --dist worksteal $(if $(SLOW),--slow) $(ARGS)

lint: env
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) lint-imports --no-cache --no-logo

docs: env
	@$(VENV)/bin/python -m pip install -q -c requirements/constraints.txt -r requirements/docs.txt
	$(RUN) python -m sphinx -q -W --keep-going -b html -c docs . build/site

clean:
	rm -rf build dist *.egg-info tools/setup_env/torchvision_cpu/build demo_out
	rm -rf .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
