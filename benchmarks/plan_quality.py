"""How good are the planner's choices? Published expert choices beside the winner of our search, what runs say about single fields
(`plan_fields.py`), and merged speed-ups (`plan_pairs.py`).

    python benchmarks/plan_quality.py                               one problem for each source and model, some minutes
    python benchmarks/plan_quality.py --markdown docs/plan-quality.md     the page, with the pairs
    python benchmarks/plan_quality.py --json FILE                   also every row as JSON

Experts tuned these trainings: papers, NVIDIA's recipes, MosaicML's tables. For each source and model we take the training on the most GPUs (of
several settings the one measured fastest), and search the same model, GPUs, batch, sequence, precision and framework, under the limits that the
authors had (`plan_choices.toml`). Three questions:

    legal      does our search contain the published plan, by the rules of its framework?
    distance   how much longer than our winner does the published plan take, by our own prediction? Experts had reasons: a large distance
               says that the search sees something they did not, or that the cost model misses something that they knew
    decides    the part of the step that saves most

Aim: the published choice is within 10% of our winner in 80% of the cases.
"""

import argparse
import json
import sys
import time
import tomllib
from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import plan_fields
import plan_pairs

from meshwright.calibrate.runs import rows
from meshwright.calibrate.runs.accuracy import runs
from meshwright.calibrate.runs.rows import PublishedRun, apply_readings, case
from meshwright.calibrate.runs.validate import predict_rows
from meshwright.cost.band import indistinguishable
from meshwright.describe import catalog, legality
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.planner.advice.alternatives import USABLE_MEMORY, fits, step
from meshwright.planner.cases.studies import gains
from meshwright.planner.question import DROPPED
from meshwright.planner.search import choices
from meshwright.planner.search.leaders import solve
from meshwright.planner.search.space import Space
from meshwright.predict.estimate import Estimate, estimate

NEAR = 0.10
EXPERTS = (
    "dgxc-benchmarking (", "Megatron-Bridge performance", "Korthikanti", "(SC21) Megatron-LM", "MegaScale", "Llama 3 Herd",
    "Nemotron-4 340B", "MT-NLG", "DeepSeek-V3 tech", "llm-foundry",
)  # fmt: skip
CHOICES = tomllib.loads(Path(__file__).with_name("plan_choices.toml").read_text(encoding="utf-8"))
SKIPPED = [entry["row"] for entry in CHOICES["skip"]]
WHOLE_LAYERS = "Megatron's transformer_config.py: graphs of parts of a layer, or overlap of expert messages, exclude full recompute"
GRAPHS_WITH_FSDP = "26.08"  # release
NO_FSDP = "Megatron FSDP has a mode for CUDA graphs from release 26.08 on (`megatron_fsdp_cuda_graph_mode`): until then graphs exclude ZeRO-2 and 3"


def problems() -> list[PublishedRun]:
    """One training for each source and model: the most GPUs, then the most tokens per second."""
    groups: dict[tuple[str, str], list[PublishedRun]] = defaultdict(list)
    famous = rows.read(str(files("meshwright.calibrate.runs").joinpath("headline.csv")))
    for row in (*runs(), *famous):
        if row["row_id"] in SKIPPED or row.get("task", "") not in ("", "pretrain"):
            continue
        if any(name in row["source"] for name in EXPERTS):
            c = apply_readings(case(row))
            if not c.refused and c.plan and c.model:
                groups[row["source"], c.model.name].append(c)
    return [
        with_recompute(max(group, key=lambda c: (c.cluster.world, tokens_per_second(c)))) for group in groups.values()
    ]


def with_recompute(c: PublishedRun) -> PublishedRun:
    """The training with the least recompute that fits, where none is published (as `meshwright validate` reads it)."""
    outcome = predict_rows([dict(c.row)])[0]
    c.config = c.config.but(plan=outcome.plan)
    return c


def tokens_per_second(c: PublishedRun) -> float:
    return c.workload.batch * c.workload.seq / c.step_time if c.step_time else 0.0


def question(c: PublishedRun) -> dict[str, Any]:
    """What the authors could choose from, and what is known of the choice."""
    out: dict[str, Any] = {"without": [], "fix": [], "reason": [], "evidence": [], "framework": ""}
    for entry in CHOICES["question"]:
        if (
            entry["source"] in c.row["source"]
            and entry.get("model", "") in c.model.name
            and entry.get("stack", c.stack.name) == c.stack.name
        ):
            for key, value in entry.items():
                if key in ("without", "fix"):
                    out[key] += value
                elif key in ("reason", "evidence"):
                    out[key].append(value)
                elif key == "framework":
                    out[key] = value
    overlaps_experts = c.plan.overlap is not None and "ep" in c.plan.overlap and c.plan.ep > 1
    if c.stack.can.framework == "Megatron-Core" and (set(c.stack.graphs) - {"step"} or overlaps_experts):
        out["without"].append("full")
        out["reason"].append(WHOLE_LAYERS)
    if "Megatron-Bridge" in c.row["source"] and c.stack.graphs and not c.row["table"].startswith(GRAPHS_WITH_FSDP):
        out["without"] += ["zero2", "zero3"]
        out["reason"].append(NO_FSDP)
    return out


def compare(c: PublishedRun) -> dict[str, Any]:
    """The published plan, our winner, and what decides between them."""
    asked = question(c)
    if asked["framework"]:
        c.config = c.config.but(stack=catalog.load("stacks", asked["framework"]))
    published = estimated(c, c.plan)
    settings = {
        name: value
        for name, value in c.plan.as_dict().items()
        if (name not in choices.SEARCHED or name in (*choices.DTYPES, "overlap")) and name not in DROPPED
    }
    start = time.perf_counter()
    base = Plan(**settings)
    allowed = choices.choices(base, choices.read(without=asked["without"], fix=asked["fix"]), tuple(c.stack.order))
    space = Space(configured(c, base), allowed)
    _, ranking = solve(space, headroom=1 - USABLE_MEMORY)
    problem = legality.problem(legality.Case(c.plan, c.model, c.workload, c.cluster, c.stack, framework=True))
    out = {
        "source": c.row["source"], "model": c.model.name, "gpus": c.cluster.world, "stack": c.stack.name,
        "published": c.plan.title(), "fits": fits(published), "broken": problem.what if problem else "",
        "seconds": time.perf_counter() - start, "measured_over_predicted": (c.step_time or 0) / step(published),
        "reason": asked["reason"], "evidence": asked["evidence"],
    }  # fmt: skip
    if not ranking:
        return out | {"winner": "", "distance": None, "decides": "no plan fits", "apart": False}
    winner = estimated(c, ranking.best.plan)
    saved = gains(published, winner)
    return out | {
        "winner": winner.plan.title(),
        "distance": step(published) / step(winner) - 1,
        "decides": ", ".join(f"{part} {seconds / step(published):+.0%}" for part, seconds in saved[:2]),
        "apart": not indistinguishable(published.prediction.exposed_s, winner.prediction.exposed_s),
    }


def estimated(c: PublishedRun, plan: Plan) -> Estimate:
    return estimate(configured(c, plan))


def configured(c: PublishedRun, plan: Plan) -> Config:
    return Config.from_parts(c.model, c.cluster, c.stack, c.workload, plan)


def summary(results: list[dict[str, Any]]) -> str:
    """How many published choices are near our winner."""
    judged = [r for r in results if r["distance"] is not None and not r["broken"]]
    near = sum(r["distance"] <= NEAR for r in judged)
    tied = sum(not r["apart"] for r in judged)
    left = len(results) - len(judged)
    share, tied_share = (count / max(len(judged), 1) for count in (near, tied))
    return (
        f"{len(results)} choices, {left} not legal or without a plan. Of the other {len(judged)}, **{near} ({share:.0%}) are within "
        f"{NEAR:.0%} of our winner** (aim: 80%), and **{tied} ({tied_share:.0%}) cannot be told apart from it** by two predictions of one "
        "training (`cost/band.py`: their measured order may be the other way round in more than one case of ten). The aim is about the "
        "first number; the second says for how many of the others our costs are sure of a difference."
    )


def page(results: list[dict[str, Any]], fields: list[plan_fields.FieldRow], pairs: list[plan_pairs.PairResult]) -> str:
    """The page of published choices, of single fields and of merged speed-ups."""
    lines = [
        "# Plan quality: published choices and merged speed-ups\n",
        "Written by `python benchmarks/plan_quality.py --markdown docs/plan-quality.md` (`make bench`). [Accuracy](accuracy.md) compares predicted "
        "with measured step times; this page asks whether the planner *chooses* as experts did, and whether it sees a change of settings as the "
        "projects that merged it did.\n",
        "## Published choices\n",
        "One training for each source and model: the most GPUs, of several settings the fastest. *Distance*: how much longer the published plan "
        "takes than the winner of our search, both predicted. *Decides*: the parts of the step in which the winner saves most, in shares of the "
        "published step (negative: the winner spends more there).\n",
        summary(results) + "\n",
    ]
    by_source: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for r in results:
        by_source[r["source"]].append(r)
    for source, some in by_source.items():
        lines.append(f"### {source}\n")
        for text in dict.fromkeys(text for r in some for text in r["reason"]):
            lines.append(f"The question: {text}.\n")
        lines += [
            "| model | GPUs | distance | decides | published | our winner |",
            "| --- | ---: | ---: | --- | --- | --- |",
        ]
        for r in some:
            distance = "–" if r["distance"] is None else f"{r['distance']:+.1%}"
            marks = "" if r["fits"] else "; does not fit by our memory"
            marks += f"; not legal: {r['broken']}" if r["broken"] else ""
            winner = "the same" if r["winner"] == r["published"] else r["winner"]
            lines.append(
                f"| {r['model']} | {r['gpus']:,} | {distance} | {r['decides']} | {r['published']}{marks} | {winner} |"
            )
        far = [r for r in some if r["distance"] is None or r["distance"] > NEAR]
        for text in dict.fromkeys(text for r in far for text in r["evidence"]):
            lines.append(f"\nEvidence about those beyond {NEAR:.0%}: {text}.")
        lines.append("")
    return "\n".join([*lines, plan_fields.section(fields), plan_pairs.section(pairs)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the page, with the pairs of plan_pairs.py")
    parser.add_argument("--only", default="", help="a part of the source's or the model's name")
    args = parser.parse_args()
    results = []
    for c in problems():
        if args.only.lower() not in f"{c.row['source']} {c.model.name}".lower():
            continue
        row = compare(c)
        results.append(row)
        distance = "—" if row["distance"] is None else f"{row['distance']:+.1%}"
        marks = "" if row["fits"] else "  does not fit by our memory"
        print(f"{row['model']:<28.28}{row['gpus']:>6} {row['stack']:<14}{distance:>8}  {row['decides']}{marks}")
        print(f"{'':>8}published {row['published']}\n{'':>8}winner    {row['winner']}")
        if row["broken"]:
            print(f"{'':>8}not legal {row['broken']}")
        sys.stdout.flush()
    print(summary(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if args.markdown:
        args.markdown.write_text(page(results, plan_fields.results(), plan_pairs.results()), encoding="utf-8")


if __name__ == "__main__":
    main()
