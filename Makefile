# Everything from a bare machine with python3 (3.11 or later, with venv and headers), gcc and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard src/fastcpu/*.p[xy][dx] src/fastcpu/*/*.p[xy][dx] src/startguard/*) CMakeLists.txt
PROTOS := $(wildcard src/driver/apis/*.proto)
TTRPC := %/ttrpc.proto %/nri_v1alpha1.proto
LINTS := lint-types lint-stubs lint-cython lint-style lint-layers lint-spelling
INSTALL := $(BIN)/pip install --quiet --no-build-isolation

.DEFAULT_GOAL := help
.PHONY: help dev build demo test e2e churn cluster e2e-cluster soak e2e-vm chart image lint $(LINTS) format bench sanitize package protos clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/dependencies: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet --group dev
	touch $@

$(VENV)/installed: $(VENV)/dependencies $(NATIVE)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(INSTALL) --editable .
	touch $@

dev: $(VENV)/installed ## create .venv with all tools and an editable install
build: $(VENV)/installed ## compile the extension modules that changed

demo: build ## show the driver at work on a machine in a box
	$(BIN)/dracpu demo

test: build ## run the tests, on up to four CPUs
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=worksteal

e2e: build ## run the driver with a real containerd, runc and kernel; needs root
	$(BIN)/python -m pytest tests/e2e --ignore=tests/e2e/cluster --ignore=tests/e2e/vm

churn: build ## run pods with claims for 20 minutes on each version of containerd; needs root
	DRACPU_E2E_CONTAINERDS="2.1 2.2 2.3 2.4" DRACPU_E2E_CHURN_SECONDS=1200 $(BIN)/python -m pytest tests/e2e/test_churn.py

cluster: build ## start a one-node Kubernetes and a shell for it; needs root
	PYTHONPATH=tests $(BIN)/python -m e2e.cluster

e2e-cluster: build ## run the driver in a one-node Kubernetes; needs root
	$(BIN)/python -m pytest tests/e2e/cluster

soak: build ## let 300 pods with claims come and go while driver and kubelet are killed; needs root
	DRACPU_E2E_SOAK_PODS=300 $(BIN)/python -m pytest tests/e2e/cluster/test_soak.py

e2e-vm: build ## run the driver in a virtual machine of 16 CPUs, in software; as root
	$(BIN)/python -m pytest tests/e2e/vm

chart: build ## render the Helm chart in many ways and refuse wrong values; builds helm first
	$(BIN)/python -m pytest tests/chart

image: ## build the container image without Docker; needs root and mmdebstrap
	deploy/image

lint: build ## check style, types, stubs, layers and spelling
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(MAKE) --no-print-directory --jobs=2 --output-sync $(LINTS)

lint-stubs: ; python -m mypy.stubtest --allowlist tests/typing/stubtest-allowlist.txt fastcpu
lint-types: ; mypy
lint-cython: ; cython-lint src/fastcpu
lint-style: ; ruff check && ruff format --check
lint-layers: ; lint-imports
lint-spelling: ; codespell

format: build ## reformat the Python code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: build ## run the benchmarks; the summary is printed at the end
	$(BIN)/python -m pytest bench --benchmark-columns=median,iqr,rounds $(BENCH)

.PHONY: bench-report bench-compare instructions
bench-report: build ## run the benchmarks and write docs/benchmarks.md with its charts; on a quiet machine
	$(BIN)/pip install --quiet --group report
	$(BIN)/python bench/report.py

bench-compare: build ## time the kernels of the revision BASE=… and of this one in turns
	$(BIN)/python bench/compare.py $(BASE)

instructions: build ## count the kernels' instructions in the revision BASE=… and in this one; fail above 5 % more
	$(BIN)/python bench/instructions.py $(BASE)

sanitize: build ## run the tests of fastcpu, and a fuzzer, with AddressSanitizer and UndefinedBehaviorSanitizer
	tests/sanitizers/run $(BIN)

package: $(VENV)/dependencies ## build wheel and sdist, install each into an empty environment and try it
	tests/packaging/run $(BIN)

protos: build ## generate the protobuf messages and gRPC stubs
	$(BIN)/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src $(PROTOS)
	$(BIN)/python -m grpc_tools.protoc -Isrc --grpc_python_out=src $(filter-out $(TTRPC),$(PROTOS))

clean: ## remove what the other targets made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
