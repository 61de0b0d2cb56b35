# make train, make test: on a machine with nothing but Python (3.11 or newer) and make.
# PYTHON=python3 uses an existing environment instead of setting up .venv.

ifdef PYTHON
python := $(PYTHON)
env :=
dev :=
peers :=
shared :=
else
python := .venv/bin/python
env := .venv/.train
dev := .venv/.dev
peers := .venv/.peers
shared := -n auto --dist loadfile --no-loadscope-reorder
endif

oldest := .venv-oldest/bin/python
oldest_versions := $(shell sed 's/>=\(.*\)/==\1.*/' requirements.txt)

NPROC ?= 2
CONFIG ?= configs/quickstart.yaml
SCRIPT ?= train_ddp.py
ARGS ?=
FAULTS ?= 20
SEED ?= 0
FROM ?= 1gpu
TO ?= ddp

.PHONY: help train test test-all test-check test-oldest test-gpu gpu null test-loggers test-slurm test-kubernetes doctor verify \
    verify-all chaos bench bench-quick bench-peers bench-operations bench-watching bench-loader \
    bench-streams bench-checkpoint bench-split lint diff readme clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##/\1	/p' Makefile

# The scripts set the number of threads themselves; OMP_NUM_THREADS only prevents torchrun's warning.
train: $(env)  ## train: NPROC=2 CONFIG=configs/quickstart.yaml SCRIPT=train_ddp.py ARGS="--epochs 3"
	OMP_NUM_THREADS=1 $(python) -m tools.launch --standalone --nproc_per_node=$(NPROC) \
	    $(SCRIPT) --config $(CONFIG) $(ARGS)
ifeq ($(CONFIG) $(ARGS),configs/quickstart.yaml )
	@echo 'Next: `$(python) -m tools.report runs/quickstart` draws the curves, `make diff` shows what' \
	    'train_ddp.py adds to train_1gpu.py, and docs/own-task.md is about a task of your own.'
endif

test: $(dev)  ## the tests, but for the slow ones: about 6 minutes on two cores
	$(python) -m pytest $(shared) -m "not slow" $(ARGS)

test-all: $(dev)  ## all tests, including the slow ones, with the coverage of utils/, tasks/, sources/
	$(python) -m coverage erase
	$(python) -m coverage run -m pytest $(shared) $(ARGS)
	find . -maxdepth 1 -name '.coverage.*' -empty -delete # of processes that a test killed
	$(python) -m coverage combine --quiet
	$(python) -m coverage report

test-check: $(dev)  ## the tests of check/: about 3 minutes on two cores
	$(python) -m pytest $(shared:loadfile=worksteal) -m "not slow" check/tests $(ARGS)

test-oldest:  ## the same with the lowest minor versions of requirements.txt, in .venv-oldest
	test -x $(oldest) || python3 -m venv .venv-oldest
	$(oldest) -m pip install --quiet $(oldest_versions) -r requirements/dev.txt
	$(oldest) -m pytest -n auto --dist loadfile -m "not slow" tests check/tests $(ARGS)

test-gpu: $(dev)  ## the tests that need a GPU (tests/gpu); docs/gpu.md lists what else to run there
	$(python) -m pytest tests/gpu $(ARGS)

gpu: $(dev)  ## all that only a GPU can show, in calls of 9 minutes: ARGS="--data cifar10.tar"
	$(python) -m lab.gpu $(ARGS)

null: $(env)  ## build a GPU that computes nothing, for python -m tools.null SCRIPT; needs g++
	$(python) -m tools.null.build

test-loggers: $(dev)  ## --logger with Weights & Biases, trackio and MLflow, which it installs
	$(python) -m pip install --quiet -r requirements/loggers.txt
	$(python) -m pytest tests/utils/test_loggers.py -rs $(ARGS)

test-slurm: $(dev)  ## launch/slurm on a real SLURM: apt-get install slurm-wlm munge; needs root
	$(python) -m pytest tests/launch/test_slurm.py -rs $(ARGS)

test-kubernetes: $(dev)  ## validate launch/kubernetes, and run its command in two pods; needs root
	$(python) -m pip install --quiet -r requirements/kubernetes.txt
	$(python) -m pytest tests/launch/test_kubernetes.py -rs $(ARGS)

doctor: $(env)  ## check this machine for training: ARGS="--rendezvous HOST:29500"
	$(python) -m tools.doctor $(ARGS)

verify: $(env)  ## check that all scripts train the same model: ARGS="--task text" and more
	$(python) -m tools.verify $(ARGS)

verify-all: $(env)  ## the same, with each script resuming the run of each script
	$(python) -m tools.verify --matrix $(ARGS)

chaos: $(env)  ## train under random faults: SEED=0 FAULTS=20 SCRIPT=train_ddp.py (or all) NPROC=2
	$(python) -m lab.chaos --script $(SCRIPT) --nproc $(NPROC) --faults $(FAULTS) --seed $(SEED) \
	    $(ARGS)

bench: $(env)  ## time the scripts and their limits: COMPARE=before.json, ARGS="--repeats 5"
	$(python) -m lab.bench --config configs/bench.yaml $(if $(COMPARE),--compare $(COMPARE)) $(ARGS)

bench-quick: $(env)  ## the same in two minutes
	$(python) -m lab.bench --config configs/bench.yaml --quick $(ARGS)

bench-peers: $(peers)  ## compare with the tutorial, Accelerate, Fabric and Trainer
	$(python) -m lab.bench.peers $(ARGS)

bench-operations: $(peers)  ## operations and host time per step, besides the model, and of peers
	$(python) -m lab.bench.operations $(ARGS)

bench-watching: $(env)  ## host time per step that lines, rows, loggers and --timing take
	$(python) -m lab.bench.watching $(ARGS)

bench-loader: $(env)  ## compare the loaders with torchvision's reference, in images/s
	$(python) -m lab.bench.loader $(ARGS)

bench-streams: $(dev) $(peers)  ## compare readers of tar and JSON lines, in samples/s, with libraries
	$(python) -m lab.bench.streams $(ARGS)

bench-checkpoint: $(env)  ## seconds to save and to load, and how long training waits
	$(python) -m lab.bench.checkpoint $(ARGS)

bench-split: $(env)  ## bytes that ranks hold when the model is divided, and a pipeline's bubble
	$(python) -m lab.bench.split $(ARGS)

lint: $(dev)  ## ruff check, ruff format --check, and mypy on utils/, tasks/ and sources/
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

diff:  ## a lesson as a diff: FROM=1gpu TO=ddp
	@diff -u train_$(FROM).py train_$(TO).py || test $$? = 1

readme: $(env)  ## update the generated blocks of README.md and docs/
	$(python) -m lab.readme

clean:  ## remove the environment and the caches; runs/ and data/ stay
	rm -rf .venv .venv-oldest .mypy_cache .pytest_cache .ruff_cache .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.train: requirements.txt requirements/extras.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	test -x .venv/bin/python || python3 -m venv .venv
	@.venv/bin/python -m pip --version > /dev/null 2>&1 || .venv/bin/python -m ensurepip # of uv venv
	@echo 'Installing into .venv: with the CUDA libraries of PyTorch, about 6 GB on Linux.' \
	    'README.md says how to install PyTorch for CPUs instead, or to use an existing environment.'
	.venv/bin/python -m pip install --quiet -r requirements.txt -r requirements/extras.txt
	touch $@

.venv/.dev: requirements/dev.txt .venv/.train
	.venv/bin/python -m pip install --quiet -r requirements/dev.txt
	touch $@

.venv/.peers: requirements/peers.txt .venv/.train
	.venv/bin/python -m pip install --quiet -r requirements/peers.txt
	touch $@
