# `make demo` and `make test` set up everything they need; nothing else has to be installed first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
TESTING := $(VENV)/.testing
COLLECTED := $(VENV)/.collected
# The oldest and the newest version of Triton that the adapter knows; of a minor version, the last patch.
TRITONS := 3.6.0 3.9
# The oldest and the newest version of CuPy that the adapter knows.
CUPYS := 14.1.0 14.2.0
# The version of torch of which pip is asked for a build without CUDA.
TORCH := 2.13.0
# The oldest release of cuda.core that the adapter knows. `make test` has the newest one.
OLD_CUDA_CORE := 1.0.0
# The engines with which bakes on fleets are tested.
FLEETS := 'distributed==2026.8.*' 'ray[client]==2.60.*'
# Libraries with a compiler inside, as the audit knows them. Other libraries are tested where they are installed.
COMPILER_LIBRARIES := 'nvidia-cutlass-dsl==4.8.*' 'warp-lang==1.19.*' 'numba==0.68.*' 'jax==0.10.*'
# The tests of launches, captures and replays, which also run without the native core. Descriptions and
# pictures of graphs, and the sizes of buckets, do not depend on it.
WITHOUT_LAUNCHES := $(patsubst %,tests/graph/test_%.py,buckets layout nodes pictures profile)
LAUNCH_TESTS := $(filter-out $(WITHOUT_LAUNCHES),$(wildcard tests/graph/test_*.py)) \
	$(patsubst %,tests/devices/test_%.py,arguments faults foreign_captures \
	launch launch_checks misuse ordering shared_ordering shared_pools branch_ordering streams)

# Files go to processes in the order in which tests/conftest.py sorts them. There is one process more than
# cores, because tests wait for other processes, locks and the disk. NumPy therefore needs no threads.
# Bytecode is written even where the environment says otherwise: processes that tests start load it.
WORKERS := $(shell expr $$(nproc) + 1)
ONE_PYTEST := PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest
PYTEST := $(ONE_PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help demo test test-python test-without-native test-driver test-driver-without-native test-adapters test-torch test-numba test-audit-libraries test-fleet native-debug test-gpu prove-audit-gpu prove-gpu sanitize-gpu random-programs mutations torture torture-remote lint types docs docs-serve docs-check pictures bench bench-remote bench-gpu carry carry-fleet bench-scaling clean

help:                  ## show what there is
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --editable '.[cu13]'
	@touch $(INSTALLED)

$(READY): $(INSTALLED) hatch_build.py $(wildcard src/preheat/native/*.[ch] src/preheat/native/build.py src/preheat/audit/native/* src/preheat/driver/native/*)
	$(BIN)/python hatch_build.py || true    # Without a compiler, Python code does the same.
	@touch $(READY)

$(TESTING): $(READY) pyproject.toml
	$(PIP) install --editable '.[cu13,dev,bench]'
	@touch $(TESTING)

# Triton alone: the tests use nothing that it depends on.
.triton/%.installed: | $(TESTING)
	rm -rf .triton/$*
	$(PIP) install --no-deps --target .triton/$* 'triton==$*.*'
	@touch $@

# CuPy alone: the compilers and headers that it needs are installed for preheat.
.cupy/%.installed: | $(TESTING)
	rm -rf .cupy/$*
	$(PIP) install --no-deps --target .cupy/$* 'cupy-cuda13x==$*'
	@touch $@

.cuda-core/%.installed: | $(TESTING)
	rm -rf .cuda-core/$*
	$(PIP) install --no-deps --target .cuda-core/$* 'cuda-core==$*'
	@touch $@

demo: $(READY)         ## the whole story: cold, hot, replayed, recorded, baked, sealed
	$(BIN)/preheat demo

# Each job leaves time on the cores: mypy uses one, and tests wait for processes, locks and the disk.
test: lint             ## everything CI checks, a file of tests on each core
	$(MAKE) --jobs=3 --output-sync=target types test-python test-without-native

# This writes the bytecode of the tests once. Otherwise each process of pytest makes it for itself.
$(COLLECTED): $(TESTING)
	$(ONE_PYTEST) --collect-only -p no:cacheprovider >/dev/null
	@touch $@

test-python: $(COLLECTED)
	$(PYTEST)

test-without-native: $(COLLECTED)
	PREHEAT_NATIVE=0 $(PYTEST) -p no:cacheprovider $(LAUNCH_TESTS)

# The tests for GPUs that make sense on the CPU driver. Tests of kernels would only test the emulator again.
DRIVER_TESTS := tests/driver/calls tests/devices tests/graph tests/toolchain tests/linking tests/build \
	tests/interop tests/adapters tests/ahead tests/tools tests/test_docs.py
SEED ?= 0
ON_CPU_DRIVER := env LD_PRELOAD=$(CURDIR)/src/preheat/driver/libcuda.so.1
test-driver: $(TESTING)    ## the tests for GPUs on the CPU driver; SEED chooses the order of deferred work
	$(subst $(BIN),$(ON_CPU_DRIVER) PREHEAT_EMULATE_SCHEDULE=$(SEED) $(BIN),$(PYTEST)) \
		-m "gpu or cpu_driver" $(DRIVER_TESTS)

test-driver-without-native: $(TESTING)
	PREHEAT_NATIVE=0 $(subst $(BIN),$(ON_CPU_DRIVER) $(BIN),$(PYTEST)) -m gpu $(LAUNCH_TESTS)

# Numba-CUDA with its compilers: 700 MB, in an environment beside the one of the other tests.
.numba.installed: | $(TESTING)
	$(PYTHON) -m venv .numba
	.numba/bin/python -m pip --quiet --disable-pip-version-check install --editable '.[cu13,dev]' 'numba-cuda[cu13]==0.30.*'
	@touch $@

test-numba: .numba.installed    ## the tests of the adapter for Numba-CUDA
	$(subst $(BIN),.numba/bin,$(PYTEST)) tests/adapters/numba

# Libraries with a compiler inside, in an environment beside the one of the other tests.
.compilers.installed: | $(TESTING)
	$(PYTHON) -m venv .compilers
	.compilers/bin/python -m pip --quiet --disable-pip-version-check install --editable '.[cu13,dev]' $(COMPILER_LIBRARIES)
	@touch $@

test-audit-libraries: .compilers.installed    ## the tests of the audit with libraries that have a compiler inside
	$(subst $(BIN),.compilers/bin,$(PYTEST)) tests/audit/test_real_compilers.py

OTHER_LIBRARIES := $(TRITONS:%=.triton/%.installed) $(CUPYS:%=.cupy/%.installed) .cuda-core/$(OLD_CUDA_CORE).installed
test-adapters: test-numba $(TESTING) $(OTHER_LIBRARIES)    ## the tests of adapters with each version of their libraries
	PYTHONPATH=$(CURDIR)/.cuda-core/$(OLD_CUDA_CORE) $(PYTEST) tests/adapters/cuda_core
	for version in $(TRITONS); do \
		PYTHONPATH=$(CURDIR)/.triton/$$version $(PYTEST) tests/adapters/triton tests/adapters/test_imports.py \
			tests/audit/test_real_compilers.py || exit 1; \
	done
	for version in $(CUPYS); do \
		PYTHONPATH=$(CURDIR)/.cupy/$$version $(PYTEST) tests/adapters/test_cupy*.py || exit 1; \
	done

# Only a build without CUDA is installed: the others take gigabytes. The index of Python has none, so
# pip must be told of one that has, for example by PIP_EXTRA_INDEX_URL. Without it the tests are skipped.
test-torch: $(TESTING)    ## the tests of the adapter for torch with a CPU build of it, where pip finds one
	test -d .torch/$(TORCH)/torch || $(PIP) install --only-binary=:all: --target .torch/$(TORCH) 'torch==$(TORCH)+cpu' \
		|| echo "skipped: pip finds no CPU build of torch $(TORCH) for this Python"
	PYTHONPATH=$(CURDIR)/.torch/$(TORCH) $(PYTEST) tests/adapters/torch tests/adapters/test_torch.py \
		tests/audit/test_real_compilers.py

# Engines that run bakes: 260 MB, beside the environment of the other tests.
.fleet/installed: pyproject.toml | $(TESTING)
	rm -rf .fleet
	$(PIP) install --target .fleet $(FLEETS)
	@touch $@

test-fleet: .fleet/installed    ## the tests of bakes on Dask and Ray
	PYTHONPATH=$(CURDIR)/.fleet $(PYTEST) tests/fleet

# The sanitizer stops at undefined behaviour. With -O0, every reference is where a debugger expects it.
DEBUG_FLAGS := -O0 -g -UNDEBUG -Werror -fsanitize=undefined -fno-sanitize-recover=undefined
native-debug: $(TESTING)  ## the tests of the native core with a debug build of it
	CFLAGS="$(DEBUG_FLAGS)" $(BIN)/python hatch_build.py
	PYTHONDEVMODE=1 $(BIN)/python -m pytest tests/devices/test_native*.py $(LAUNCH_TESTS); \
	status=$$?; $(BIN)/python hatch_build.py && exit $$status

random-programs: $(TESTING)  ## 2,000 random programs on deferred streams
	PREHEAT_TEST_PROGRAMS=2000 $(BIN)/python -m pytest tests/programs

mutations: $(TESTING)  ## remove each wait and ownership in turn, and see that a test notices
	$(BIN)/python -m tests.programs.mutations

torture: $(TESTING)    ## attacks on the cache, for long, with counts and seeds, and other long tests; as root all of them run
	PREHEAT_TORTURE=1 $(BIN)/python -m pytest tests/torture
	PREHEAT_TORTURE=1 $(BIN)/python -m pytest -m long --ignore=tests/torture
	for seed in 1 2 3; do $(MAKE) test-driver SEED=$$seed || exit 1; done

torture-remote: $(TESTING)    ## 1,000 random faults under 16 processes that share Redis and S3, with counts and the seed
	PREHEAT_TORTURE=1 $(BIN)/python -m pytest -s tests/torture/test_remote_faults.py

lint: $(TESTING)       ## ruff, rules and format, and the spelling of the docs and the source
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell docs *.md src examples

types: $(TESTING)      ## mypy, strict
	$(BIN)/mypy

# The notice that MkDocs prints about its next version says nothing about these pages.
.venv/.docs: $(TESTING) pyproject.toml
	$(PIP) install --editable '.[cu13,dev,bench,docs]'
	@touch $@

docs: .venv/.docs      ## the site, into .site; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: .venv/.docs  ## the site on http://127.0.0.1:8000, built again after every change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

pictures: $(TESTING)   ## draw the pictures of the docs: the demo, graphs, and charts of benchmarks/results
	$(BIN)/python docs/demo_picture.py
	$(BIN)/python docs/graph_pictures.py
	$(BIN)/python docs/charts.py

docs-check: $(TESTING) ## run every snippet of the docs, and compare their figures with the results
	$(BIN)/python -m pytest tests/test_docs.py tests/test_stories.py tests/test_guide_stories.py tests/test_guides.py \
		tests/test_docstrings.py tests/test_reference.py tests/test_names_in_docs.py tests/test_figures.py

# On the GPU machine nothing is installed: `make carry` here, then bring .carry along.
# The run is recorded in benchmarks/results, whether tests pass or fail.
test-gpu: export PYTHONPATH := $(CURDIR)/src:$(CURDIR)/.carry
test-gpu:              ## the tests that need a GPU or torch, with the Python that is there, and a record of the run
	$(PYTHON) hatch_build.py || true
	$(PYTHON) -m pytest -m "gpu or torch" --junit-xml=.proof/gpu-tests.xml; status=$$?; \
	$(PYTHON) benchmarks/gpu_tests.py .proof/gpu-tests.xml && exit $$status

# The files go to the directory OUT, which may be a variable of the environment.
prove-audit-gpu: OUT ?= .proof
prove-audit-gpu:       ## audits of real applications on this GPU: reports, tests and cost, in about 7 minutes
	$(PYTHON) hatch_build.py || true
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/.carry $(PYTHON) -m tests.audit.prove $(OUT)

# One part alone: make prove-gpu OUT=DIRECTORY PART=tests-graph. Parts that have succeeded are not repeated.
prove-gpu: OUT ?= .proof
prove-gpu:             ## everything that a GPU shows about this commit, in parts that can be repeated one by one
	$(PYTHON) hatch_build.py || true
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/.carry $(PYTHON) -m tests.prove_gpu $(OUT) $(if $(PART),--part $(PART))

sanitize-gpu:          ## the shipped kernels under each tool of compute-sanitizer
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/.carry $(PYTHON) -m tests.kernels.sanitized

carry: $(READY)        ## what a bare GPU machine with Python 3.12 lacks
	$(BIN)/python -m pip install --quiet --upgrade --target .carry --python-version 3.12 --only-binary=:all: 'tomlkit>=0.12' 'xxhash>=3.4'
	$(BIN)/python -m pip install --quiet --upgrade --target .carry --python-version 3.12 --only-binary=:all: --no-deps 'nvmath-python>=1.0,<2'
	git rev-parse --short=8 HEAD > .carry/COMMIT

# Two targets for a machine with many cores: `make carry-fleet` here, then `make bench-scaling` there.
carry-fleet: $(READY)  ## what `make bench-scaling` needs on a bare machine with Python 3.12
	rm -rf .carry-fleet
	$(BIN)/python -m pip install --quiet --target .carry-fleet --python-version 3.12 --only-binary=:all: \
		'tomlkit>=0.12' 'xxhash>=3.4' 'cuda-pathfinder>=1.3' $(firstword $(FLEETS))
	find .carry-fleet -type d -name tests -prune -exec rm -rf {} +

# It writes a file of its own, because results/bench_fleet.json has all parts, measured on one machine.
CORES ?= 1,2,4,8,16
bench-scaling:         ## bakes on 1 to 16 cores, by shards and on Dask, with the Python that is there
	$(PYTHON) hatch_build.py || true
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/.carry-fleet $(PYTHON) benchmarks/bench_fleet.py --parts scaling --engines dask \
		--cores $(CORES) --json benchmarks/results/bench_scaling.json

bench: $(TESTING)      ## benchmarks against peers, in one run
	$(BIN)/python benchmarks/bench_store.py
	$(BIN)/python benchmarks/bench_hit.py
	$(BIN)/python benchmarks/bench_bake.py
	$(BIN)/python benchmarks/bench_together.py
	$(BIN)/python benchmarks/bench_emulator.py
	$(BIN)/python benchmarks/bench_driver.py

bench-remote: $(TESTING)    ## engines of shared stores on real servers: calls, 10,000 objects, races of processes
	$(BIN)/python benchmarks/bench_remote.py
	$(BIN)/python benchmarks/bench_shared_start.py
	PREHEAT_TEST_RACES=300 $(BIN)/python -m pytest tests/store/remote/test_engines.py -k racing

# On a machine with a GPU and the peers installed, beside which they are measured.
bench-gpu:             ## benchmarks that need a GPU, with the Python that is there
	$(PYTHON) hatch_build.py || true
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/.carry $(PYTHON) benchmarks/bench_launch.py
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/.carry $(PYTHON) benchmarks/bench_replay.py
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/.carry $(PYTHON) benchmarks/bench_coldstart.py
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/.carry $(PYTHON) benchmarks/bench_together.py
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/.carry $(PYTHON) benchmarks/bench_kernels.py
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/.carry $(PYTHON) benchmarks/bench_kernels.py --widths
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/.carry $(PYTHON) benchmarks/bench_ops.py
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/.carry $(PYTHON) benchmarks/bench_pool.py
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/.carry $(PYTHON) benchmarks/bench_audit.py

clean:                 ## remove everything that was built
	rm -rf $(VENV) .site .carry .carry-fleet .triton .cupy .cuda-core .torch .numba .numba.installed .compilers .compilers.installed .fleet .proof .mypy_cache .pytest_cache .ruff_cache .hypothesis src/preheat/native/*.so src/preheat/audit/*.so src/preheat/driver/libcuda.so.1
