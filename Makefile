# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# TRL and openai (for `transformers serve`) lie in an environment of their own, which sees the packages of the ordinary one.
BENCH := $(VENV)/bench
BENCH_STAMP := $(BENCH)/.installed
# A file stays in one process. As they come: else files with one long test would start last.
TEST_PROCESSES ?= 2
FAST := not slow and not alone and not long and not endurance
PYTEST := $(BIN)/pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
export RLHF_HOME ?= $(CURDIR)/var

.PHONY: help demo test test-fast test-long test-endurance check bench bench-ppo bench-distill bench-ingest bench-mt-bench clean lock

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v == (3, 11) else \
	  f"Python 3.11 is needed, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP)  ## run the whole chain on the embedded default and print what it achieved
	$(BIN)/rlhf run configs/demo.yaml

test: $(STAMP)  ## all tests but the longest, the fast ones first
	$(PYTEST) -m "$(FAST)"
	$(PYTEST) -m "slow and not endurance"
	$(BIN)/pytest -m alone

test-fast: $(STAMP)  ## unit tests only
	$(PYTEST) -m "$(FAST)"

test-long: $(STAMP)  ## an ablation, a cluster that loses a node
	$(PYTEST) -m "long and not endurance"

test-endurance: $(STAMP)  ## killed services, ten chains, full disks, pages in a browser, repeats of every stage, PostgreSQL; before a release
	$(BIN)/pytest -m endurance

check: $(STAMP)  ## linters, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(BENCH_STAMP): $(STAMP) requirements-bench.lock
	$(BIN)/python -m venv --clear --without-pip $(BENCH)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $(BENCH)/lib/python3.11/site-packages/ordinary.pth
	$(BIN)/pip --python $(BENCH)/bin/python install --quiet --disable-pip-version-check --no-deps \
	  -r requirements-bench.lock
	@touch $@

bench: $(BENCH_STAMP)  ## reward-model training and offline PPO against TRL, ingestion against datasets; BENCH_ARGS="--quick", or "--help" for the rest
	PYTHONPATH=tests $(BIN)/python -m benchmarks.run reward-model $(BENCH_ARGS)
	PYTHONPATH=tests $(BIN)/python -m benchmarks.run offline-ppo $(BENCH_ARGS)
	PYTHONPATH=tests $(BIN)/python -m benchmarks.distill $(BENCH_DISTILL_ARGS)
	PYTHONPATH=tests $(BIN)/python -m benchmarks.ingest $(BENCH_INGEST_ARGS)

bench-ppo: $(BENCH_STAMP)  ## offline PPO against TRL's DPOTrainer; BENCH_ARGS as above
	PYTHONPATH=tests $(BIN)/python -m benchmarks.run offline-ppo $(BENCH_ARGS)

bench-distill: $(STAMP)  ## the student's step with soft labels against cross-entropy alone; BENCH_DISTILL_ARGS="--quick", or "--help" for the rest
	PYTHONPATH=tests $(BIN)/python -m benchmarks.distill $(BENCH_DISTILL_ARGS)

bench-ingest: $(STAMP)  ## ingestion against datasets; BENCH_INGEST_ARGS="--quick", or "--help" for the rest
	PYTHONPATH=tests $(BIN)/python -m benchmarks.ingest $(BENCH_INGEST_ARGS)

bench-mt-bench: $(BENCH_STAMP)  ## SmolLM2-135M answers MT-Bench's 80 questions, judged over HTTP by transformers serve; an hour; BENCH_MT_BENCH_ARGS="--help"
	PYTHONPATH=tests $(BIN)/python -m benchmarks.mt_bench $(BENCH_MT_BENCH_ARGS)

clean:  ## remove the workspace, the environment and caches
	rm -rf $(VENV) var .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

lock: $(STAMP)  ## write the installed versions into requirements.lock
	$(BIN)/pip freeze --exclude-editable | sed -e 's/+cpu$$//' > requirements.lock
