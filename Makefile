# Two commands: `make chat` talks to the embedded pair, `make test` runs every test. What follows is given every time.
#   CUDA=1      builds llama.cpp for NVIDIA GPUs; without a CUDA toolkit the compiler comes from the package index (573 MB)
#   CUDA_ARCH=86  the GPU's architecture, where no driver can be asked
#   VULKAN=1    builds llama.cpp for GPUs with Vulkan (needs glslc and Vulkan's headers); Metal comes by itself on Apple silicon
#   WHEELS=ADDRESS  looks for a ready llama-cpp-python below ADDRESS/cpu, cu124, metal or vulkan first, and builds if none fits
#   WHEEL=FILE  uses a prebuilt llama-cpp-python wheel instead of building one
#   MODEL=smollm2  chats with a published model instead (a download of 93 MB, once)
#   PYTHON=...  the Python (3.11 or newer) to make the environment with

PYTHON ?= python3
VENV ?= .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
KIND := $(if $(WHEEL),wheel,$(if $(CUDA),cuda$(CUDA_ARCH),cpu)$(if $(VULKAN),-vulkan))
FOR_GPUS := $(if $(WHEELS),--wheels "$(WHEELS)") $(if $(CUDA),--cuda) $(if $(CUDA_ARCH),--cuda-arch "$(CUDA_ARCH)") $(if $(VULKAN),--vulkan)
FIND_WHEEL := $(if $(WHEEL),echo "$(WHEEL)",$(VENV)/bin/python tools/llama_wheel.py $(FOR_GPUS))
# What Cython compiles: files with C types beside them.
TYPES := $(wildcard runtime/*/*.pxd)
COMPILED := $(TYPES) $(TYPES:.pxd=.py)
INPUTS := pyproject.toml setup.py constraints.txt $(wildcard runtime/laws/*.[ch] */*/*.pyx) $(COMPILED) tools/llama_wheel.py tools/ready_wheel.py tools/cuda_toolkit.py tools/editor_links.py

.PHONY: chat test test-real test-clients peers benchmarks benchmarks-real benchmarks-counted benchmarks-missing benchmarks-gpu check env dev clean
.DELETE_ON_ERROR:

chat: env
	@$(VENV)/bin/specrun $(if $(MODEL),demo $(MODEL),chat --demo)

test: dev
	@$(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile

# Beside `make test`, on a published model (a download of 93 MB, once): about ten minutes.
test-real: dev
	@model=$$($(VENV)/bin/python tools/real_model.py) && SPECRUN_REAL_MODEL="$$model" $(VENV)/bin/python -m pytest -m real tests/real $(if $(SWEEP),--sweep $(SWEEP))

# Beside `make test`, with agents and toolkits of others, in .clients (2.9 GB, once): about ten minutes.
test-clients: dev
	@$(VENV)/bin/python tools/clients.py
	@model=$$($(VENV)/bin/python tools/real_model.py) || echo "without a published model"; \
	SPECRUN_REAL_MODEL="$$model" $(VENV)/bin/python -m pytest -m clients tests/clients

# llama.cpp's own server and programs, for `python tools/measure peers`: built once for this machine, into .peers, in about ten minutes
# on 2 cores. An interrupted build goes on.
peers: env
	@$(PIP) install -q cmake scikit-build-core
	@$(VENV)/bin/python tools/llama_server.py $(if $(CUDA),--cuda) $(if $(VULKAN),--vulkan)

# docs/benchmarks.md and its pictures, from the records in docs/benchmarks.
benchmarks: dev
	@$(VENV)/bin/python tools/measure benchmarks

# What is missing of a set of records, as far as MINUTES=30 go, then the page: benchmarks-real (published models beside llama.cpp, for a
# quiet machine), -counted (tokens a round, for any machine), -missing, -gpu. ONLY=NAME measures one record, AGAIN=1 anew, LIST=1 shows all.
benchmarks-real benchmarks-missing: peers
benchmarks-real benchmarks-counted benchmarks-missing benchmarks-gpu: dev
	@$(VENV)/bin/python tools/measure benchmarks --measure $(@:benchmarks-%=%) --minutes $(or $(MINUTES),$(if $(filter %-gpu,$@),10,30)) \
		$(ONLY:%=--only %) $(if $(AGAIN),--again) $(if $(LIST),--list) $(if $(ANYWAY),--anyway)

check: dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@rm -rf build $(VENV)/typed # mypy reads the package as a user gets it, not the checkout
	$(PIP) install -q --no-deps --target $(VENV)/typed .
	MYPYPATH=$(VENV)/typed:tools $(VENV)/bin/mypy -p specrun -p measure -p family
	$(VENV)/bin/mypy tests/support/typed_program.py # a user's, which finds specrun as an editor does
	@rm -rf build
	$(VENV)/bin/python -m pytest -q tests/test_layout.py

env: $(VENV)/.env-$(KIND)
dev: $(VENV)/.dev-$(KIND)

$(VENV)/bin/python:
	@echo "== creating the environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specrun needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.env-$(KIND): $(INPUTS) | $(VENV)/bin/python
	@echo "== llama.cpp"
	@wheel=$$($(FIND_WHEEL)) && echo "installing $$wheel" && $(PIP) install -q --force-reinstall --no-deps "$$wheel"
	@echo "== specrun, to chat and to convert"
	@$(PIP) install -q -c constraints.txt -e ".[convert]"
	@$(VENV)/bin/python tools/editor_links.py
	@rm -f $(VENV)/.env-* && touch $@

$(VENV)/.dev-$(KIND): $(VENV)/.env-$(KIND)
	@echo "== what training and the tests need (torch among them: a large download)"
	@$(PIP) install -q -c constraints.txt -e ".[dev]"
	@rm -f $(VENV)/.dev-* && touch $@

clean:
	rm -rf $(VENV) build *.egg-info */*/*.so
