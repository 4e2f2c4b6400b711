# Two commands do everything: `make demo` and `make test`. Both make .venv first if it is missing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: venv demo test test-gpu test-engines test-ray test-integrations test-wheel lint bench soak clean

venv: .venv/.made

.venv/.made: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: venv
	$(BIN)/lockstep demo --kill

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two processes, each of which takes one file after the other, in the order of tests/seldom.py. Tests start many processes of their own, so Python keeps
# the package compiled, even where a variable forbids it.
test: lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The tests that need a GPU, part of `make test` too. Without .venv it takes $(PYTHON), with the source tree as it is:
# a machine with GPUs often brings a torch of its own, and nothing can be installed.
test-gpu:
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" \
	  $$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) -m pytest -m gpu -rs --ignore=tests/integrations --ignore=tests/on_ray

# The tests with real Slurm, Open MPI, MPICH and torchrun, which `make test` skips. What they need comes to build/engines;
# nothing is installed. They need root, for machines of their own, and Debian's apt-get for Slurm.
test-engines: venv
	$(BIN)/python tests/engines/install.py
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m pytest -m engines -rs tests/engines

# The tests on Ray clusters, which `make test` skips where Ray is missing. Ray comes to an environment of its own, build/ray;
# those between hosts need root.
RAY := build/ray
test-ray:
	test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test,ray]"
	PYTHONPATH="$(CURDIR)" $(RAY)/bin/python -m pytest -rs tests/on_ray tests/launch/test_pool_conformance.py

# The tests with other people's programs (Jupyter, TensorBoard, Weights & Biases, MLflow, transformers, Lightning), which
# `make test` skips where these are missing. They come to an environment of their own, build/integrations.
INTEGRATIONS := build/integrations
test-integrations:
	test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test,notebook,transformers,lightning]" -r tests/integrations/requirements.txt
	$(INTEGRATIONS)/bin/python -m pytest -m integrations -rs tests/integrations

# Builds the wheel and tries it in new environments, with the Pythons 3.11, 3.12 and 3.13 that are found, or those named
# in PYTHONS. An environment needs 2 GiB for a while.
test-wheel:
	$(PYTHON) tests/wheel.py $(PYTHONS)

soak: venv
	$(BIN)/python -m pytest -m soak

bench: venv
	$(BIN)/lockstep bench step

clean:
	rm -rf .venv build dist runs demo-report *.egg-info
