# `make demo` and `make test` set up all they need; see README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
NATIVE := CMakeLists.txt $(wildcard src/dejavu/kernels/cpu/*)

RESULTS := docs/results

# Evaluation data, and the state of runs that go on where they were interrupted.
DATA ?= evaldata
STATE ?= build/suite
SMOLLM2 ?=
SMOLLM2_PLAN ?=

.PHONY: demo test test-ray check results suite serve-bench serve-soak clean

demo: $(STAMP)
	$(BIN)/dejavu demo

# Tests with servers, clocks or whole commands have the machine to themselves; of the others, as
# many files at a time as there are cores, one thread each. One process took 13 minutes on two cores.
ALONE := tests/bench tests/cli tests/serve
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile \
		$(ALONE:%=--ignore=%)
	$(BIN)/python -m pytest -q $(ALONE)

# Replicas under a real Ray on this machine, which is a large installation: not a part of `test`.
test-ray: $(STAMP)
	$(PIP) install -q -c constraints.txt -e ".[ray]" --no-build-isolation
	$(BIN)/python -m pytest -q tests/serve/test_cluster.py

check: $(STAMP)
	$(BIN)/ruff format --check src tests recipes
	$(BIN)/ruff check src tests recipes
	$(BIN)/mypy
	$(BIN)/lint-imports

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade pip
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt "scikit-build-core>=0.10" "nanobind>=2.4" "cmake>=3.26" ninja
	$(PIP) install -q -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $(STAMP)

# Quality and speed of README.md on a CPU, measured anew: about half an hour on 2 cores, nothing else
# running. For the server and GPUs see below; predictors and input sparsity have scripts in recipes/.
results: $(STAMP)
	$(PIP) install -q -c constraints.txt "ctranslate2>=4.6"
	mkdir -p $(RESULTS)
	$(BIN)/dejavu eval relu-30m --plan relu-30m --level balanced -n 24576 \
		--json $(RESULTS)/eval-balanced.json
	$(BIN)/dejavu eval relu-30m --plan relu-30m -n 24576 \
		--json $(RESULTS)/eval-careful.json
	$(BIN)/dejavu eval relu-30m --plan relu-30m --through decode -n 12288 \
		--json $(RESULTS)/eval-careful-decode.json
	$(BIN)/dejavu eval relu-30m --plan relu-30m --level balanced --through decode \
		-n 12288 --json $(RESULTS)/eval-decode.json
	$(BIN)/dejavu eval relu-30m --plan relu-30m --level fast -n 12288 \
		--json $(RESULTS)/eval-fast.json
	$(BIN)/dejavu measure relu-30m --windows 16 --plots docs/plots --json $(RESULTS)/measure.json
	$(BIN)/dejavu bench relu-30m --plan relu-30m --peers transformers,ctranslate2 \
		--new-tokens 128 --repeats 9 --json $(RESULTS)/bench-relu-30m.json
	$(BIN)/dejavu bench --shape opt-1.3b --dtype bf16 --densities 0.05,0.1,0.2 --repeats 5 \
		--peers transformers --new-tokens 16 --plot docs/plots/opt-1.3b-bf16.png \
		--json $(RESULTS)/bench-opt-1.3b-bf16.json
	$(BIN)/dejavu bench --shape opt-1.3b --dtype int8 --densities 0.05,0.1,0.2 --repeats 4 \
		--peers ctranslate2:int8 --new-tokens 16 --plot docs/plots/opt-1.3b-int8.png \
		--json $(RESULTS)/bench-opt-1.3b-int8.json
	$(BIN)/dejavu bench --shape opt-1.3b --kernels --dtype bf16 --json $(RESULTS)/mlp-bf16.json
	$(BIN)/dejavu bench --shape opt-1.3b --kernels --dtype int8 --json $(RESULTS)/mlp-int8.json

# The field's tasks, dense and sparse: about an hour on 2 cores for relu-30m. SMOLLM2 (a folder, file or
# Hub id) and SMOLLM2_PLAN add a second model.
SUITE = $(BIN)/dejavu eval $(1) --suite paper --data $(DATA) -n 65536
suite: $(STAMP)
	mkdir -p $(RESULTS) $(STATE)
	$(call SUITE,relu-30m --plan relu-30m) --out $(STATE)/relu-30m \
		--json $(RESULTS)/suite-relu-30m.json
	$(call SUITE,relu-30m --plan relu-30m) --shots 5 --limit 100 --out $(STATE)/relu-30m \
		--json $(RESULTS)/suite-relu-30m-5shot.json
	$(call SUITE,relu-30m --plan relu-30m) --prompts sparse --out $(STATE)/relu-30m-sparse \
		--json $(RESULTS)/suite-relu-30m-sparse.json
ifneq ($(SMOLLM2),)
	$(call SUITE,$(SMOLLM2) --plan $(SMOLLM2_PLAN)) --limit 200 --out $(STATE)/smollm2 \
		--json $(RESULTS)/suite-smollm2.json
	$(call SUITE,$(SMOLLM2) --plan $(SMOLLM2_PLAN)) --shots 5 --limit 100 --out $(STATE)/smollm2 \
		--json $(RESULTS)/suite-smollm2-5shot.json
endif

# The GPU's figures, on one H200; Python there needs PyTorch, Triton and transformers, no compiled
# extension. Each target stays under 8 minutes.
GPU_DEJAVU ?= PYTHONPATH=src python3 -m dejavu
GPU_BENCH = mkdir -p $(RESULTS) && $(GPU_DEJAVU) bench --device cuda
GPU_DECODE := opt-6.7b opt-30b opt-66b opt-175b-layer
GPU_KERNELS := opt-6.7b opt-66b opt-175b-layer
GPU_PEERS = transformers,transformers-static

.PHONY: results-gpu plots-gpu $(GPU_DECODE:%=gpu-%) gpu-batch $(GPU_KERNELS:%=gpu-kernels-%)

results-gpu: $(GPU_DECODE:%=gpu-%) gpu-batch $(GPU_KERNELS:%=gpu-kernels-%) plots-gpu

gpu-opt-66b: GPU_PEERS = transformers-generate
$(GPU_DECODE:%=gpu-%): gpu-%:
	$(GPU_BENCH) --shape $* --densities 0.05,0.1,0.2,0.4,0.1/0.5 --lazy-kv --look-ahead 0.5 \
		--peers $(GPU_PEERS) --json $(RESULTS)/gpu-$*.json

# Shares of the neurons that a row has, whose unions are 17 and 24 %.
GPU_BATCH = $(GPU_BENCH) --look-ahead 0.5 --peers none --repeats 3
gpu-batch:
	for shape in opt-66b opt-6.7b; do \
		$(GPU_BATCH) --shape $$shape --batch 8 --densities 0.024,0.024/0.5,0.1 \
			--json $(RESULTS)/gpu-$$shape-batch-8.json && \
		$(GPU_BATCH) --shape $$shape --batch 16 --densities 0.019,0.019/0.5,0.1 \
			--json $(RESULTS)/gpu-$$shape-batch-16.json || exit 1; done

$(GPU_KERNELS:%=gpu-kernels-%): gpu-kernels-%:
	$(GPU_BENCH) --shape $* --kernels --densities 0.05,0.1,0.2 \
		--json $(RESULTS)/gpu-mlp-$*.json

plots-gpu: $(STAMP)
	for shape in $(GPU_DECODE); do $(BIN)/python -m dejavu.bench.plots \
		$(RESULTS)/gpu-$$shape.json docs/plots/gpu-$$shape.png || exit 1; done

# The server under load, a few minutes with nothing else running; and ten minutes of it.
serve-bench: $(STAMP)
	$(BIN)/python recipes/serve_load.py --json $(RESULTS)/serve.json

serve-soak: $(STAMP)
	$(BIN)/python recipes/serve_load.py --soak 10 --json $(RESULTS)/serve-soak.json

clean:
	rm -rf build $(VENV)
