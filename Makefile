# Two commands to know: `make demo` and `make test`. Both set up first; nothing but Python 3.11 or later is needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := train,web,dev

.PHONY: setup demo test lint bench soak pages clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Meshwright needs Python 3.11 or later")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $@

# One line a step; a step that fails stops the demo. Its pages are left in demo-output/.
DEMO := demo-output
demo: setup
	rm -rf $(DEMO) && mkdir $(DEMO)
	$(BIN)/meshwright show all-reduce --ranks 4 --values
	$(BIN)/meshwright plan llama3-70b --cluster dgx-h100 --nodes 8 --batch 512 --seq 8192 --top 3 --html $(DEMO)/plan.html --out $(DEMO)/plan.toml
	$(BIN)/meshwright estimate --plan examples/llama3-70b-64xh100.toml
	$(BIN)/meshwright verify examples/demo-dp2-tp2.toml --out $(DEMO)/dp2-tp2/proof.json
	$(BIN)/meshwright train examples/demo-dp2-tp2.toml --steps 200 --out $(DEMO)/dp2-tp2
	$(BIN)/meshwright estimate --plan $(DEMO)/dp2-tp2/plan.toml
	$(BIN)/meshwright verify examples/demo-pp2-shard2.toml --out $(DEMO)/pp2-shard2/proof.json
	$(BIN)/meshwright train examples/demo-pp2-shard2.toml --steps 200 --out $(DEMO)/pp2-shard2
	$(BIN)/meshwright simulate $(DEMO)/pp2-shard2/plan.toml --trace $(DEMO)/pp2-shard2/trace.json --html $(DEMO)/pp2-shard2/timeline.html
	$(BIN)/meshwright report $(DEMO)/dp2-tp2 $(DEMO)/pp2-shard2 --html $(DEMO)/summary.html

# Bytecode is kept even where the environment forbids it: tests start many processes that import the same files.
test: export PYTHONDONTWRITEBYTECODE =
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadscope

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Tests of drawn examples, of which the soak draws many more than the daily run.
DRAWN := tests/describe/test_fuzz.py tests/describe/test_layout.py tests/cost/test_cost_step.py tests/test_units.py

bench: setup
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

soak: setup
	$(BIN)/python -m pytest -m slow --timeout 1800
	$(BIN)/python -m pytest $(DRAWN) --hypothesis-profile soak --timeout 1800
	$(BIN)/python benchmarks/chaos.py --faults 220 --minutes 60
	$(BIN)/python benchmarks/chaos_save.py --kills 1000 --minutes 60

# Pages with computed figures, after the cost model changed; tests hold them to the code.
pages: setup
	PYTHONPATH=docs/generate $(BIN)/python -m figures --write docs/figures.md
	PYTHONPATH=docs/generate $(BIN)/python -m blocks
	$(BIN)/python -m meshwright.view.cases docs/cases
	$(BIN)/python -m meshwright.view.goodput docs/past-one-cluster.md

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-output
