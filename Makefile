# Two commands to know: `make demo` and `make test`. Both set up first; nothing but Python 3.11 or later is needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := train,web,dev

# Python keeps the bytecode of what it imports, even where the environment forbids it: many processes import the same files.
export PYTHONDONTWRITEBYTECODE =

.PHONY: setup demo test test-frameworks test-torch lint bench soak pages pictures docs clean

setup: $(STAMP)

# Without --no-compile, pip compiles all of torch and transformers one file after the other: half of the time of the set-up.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Meshwright needs Python 3.11 or later")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $@

# A line for each step; a step that fails stops the demo. Its pages are left in demo-output/.
DEMO := demo-output
MW := $(BIN)/meshwright
demo: setup
	@rm -rf $(DEMO) && mkdir $(DEMO)
	@echo "== 1/8  a ring all-reduce, step by step"
	$(MW) show all-reduce --ranks 4 --values
	@echo "== 2/8  the best plan for Llama 3 70B on 64 H100 (no GPU is needed)"
	$(MW) plan llama3-70b --cluster dgx-h100 --nodes 8 --batch 512 --seq 8192 --top 3 --html $(DEMO)/plan.html --out $(DEMO)/plan.toml
	@echo "== 3/8  what a given plan costs"
	$(MW) estimate --plan examples/llama3-70b-64xh100.toml
	@echo "== 4/8  proof: data and tensor parallelism train what one device trains (4 processes, about 10 s)"
	$(MW) verify examples/demo-dp2-tp2.toml --out $(DEMO)/dp2-tp2/proof.json
	@echo "== 5/8  train it, and compare with the prediction (measures this machine first, about a minute)"
	$(MW) train examples/demo-dp2-tp2.toml --recalibrate --steps 200 --out $(DEMO)/dp2-tp2
	$(MW) estimate --plan $(DEMO)/dp2-tp2/plan.toml
	@echo "== 6/8  proof: a pipeline with ZeRO-3"
	$(MW) verify examples/demo-pp2-shard2.toml --out $(DEMO)/pp2-shard2/proof.json
	@echo "== 7/8  train it"
	$(MW) train examples/demo-pp2-shard2.toml --steps 200 --out $(DEMO)/pp2-shard2
	@echo "== 8/8  pages: its step as a timeline, and a report about both runs"
	$(MW) simulate $(DEMO)/pp2-shard2/plan.toml --trace $(DEMO)/pp2-shard2/trace.json --html $(DEMO)/timeline.html
	$(MW) report $(DEMO)/dp2-tp2 $(DEMO)/pp2-shard2 --html $(DEMO)/summary.html
	@echo "== done. Open these pages in a browser:"
	@echo "   $(DEMO)/plan.html       the plan for 64 H100, with all views"
	@echo "   $(DEMO)/timeline.html   one step of the pipeline"
	@echo "   $(DEMO)/summary.html    both runs: curves, proofs, predicted and measured"

# One thread per process: each worker has one core.
test: export OMP_NUM_THREADS = 1
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadscope

# What we write, given to the real frameworks: versions in tests/frameworks/versions.toml, installed under .frameworks/. Needs the network once.
test-frameworks: export OMP_NUM_THREADS = 1
test-frameworks: setup
	$(BIN)/python -m pytest tests/frameworks

# What runs tensors, with another torch (by default the oldest that pyproject.toml admits), installed once under .frameworks/.
# Needs the network once; where pip's index has no build for the CPU, 5 GB of disk. Not in the soak, which needs no network.
TORCH := 2.11.0
TENSORS := tests/test_torch_names.py $(addprefix tests/,models parallel comm check explain training proof gpu)
test-torch: export OMP_NUM_THREADS = 1
test-torch: setup
	python=$$($(BIN)/python tests/frameworks/environments.py $(TORCH)) && \
	$$python -m pytest -n 2 --dist loadscope --session-timeout 3600 $(TENSORS) && \
	$$python -m pytest -m slow -k traced --session-timeout 1800 tests/proof/test_compiled.py

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Tests of drawn examples, of which the soak draws many more than the daily run.
DRAWN := tests/describe/test_fuzz.py tests/describe/test_layout.py tests/cost/test_cost_step.py tests/test_units.py

# Every benchmark, printed as a comparison; writes docs/performance.md, docs/accuracy.md and docs/plan-quality.md.
bench: setup
	PYTHONPATH=docs/generate $(BIN)/python -m performance
	$(BIN)/meshwright validate --headline --beside benchmarks/peers.csv --markdown docs/accuracy.md
	$(BIN)/python benchmarks/plan_quality.py --markdown docs/plan-quality.md

soak: setup
	$(BIN)/python -m pytest -m slow --timeout 1800
	$(BIN)/python -m pytest $(DRAWN) --hypothesis-profile soak --timeout 1800
	$(BIN)/python benchmarks/chaos.py --faults 220 --minutes 60
	$(BIN)/python benchmarks/chaos_save.py --kills 1000 --minutes 60

# Pages with computed figures, after the cost model changed; tests hold them to the code.
pages: setup
	PYTHONPATH=docs/generate $(BIN)/python -m figures
	PYTHONPATH=docs/generate $(BIN)/python -m formulas_page
	PYTHONPATH=docs/generate $(BIN)/python -m texts
	PYTHONPATH=docs/generate $(BIN)/python -m blocks
	PYTHONPATH=docs/generate $(BIN)/python -m picture
	PYTHONPATH=docs/generate $(BIN)/python -m course_notebooks
	$(BIN)/python -m meshwright.view.cases docs/cases
	$(BIN)/python -m meshwright.view.goodput docs/past-one-cluster.md

# The pictures of the course, drawn by the page in Chromium.
pictures: setup
	PYTHONPATH=docs/generate $(BIN)/python -m course_pictures

# The site opens from site/index.html, without a server. Building it needs no network once mkdocs-material is installed.
docs: setup
	$(BIN)/python -c "import material" 2>/dev/null || $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS),docs]"
	PYTHONPATH=docs/generate $(BIN)/python -m reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html, or with its search: $(PYTHON) -m http.server --bind 127.0.0.1 --directory site"

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-output site dist docs/reference
