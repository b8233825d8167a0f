"""The shape of the data of every view, as `view.json_schema` writes shapes: what Python gives, what the OpenAPI document says, and what the script
of the page checks before it draws (`shapes.js`).

A key with `?` at its end may be missing; `{"?": shape}` may be null. The tests compare real data of every view with these shapes, key by key.
"""

from typing import Any

from meshwright.view.page.runs import PARTS

S, N, I, B, O, ANY = "string", "number", "integer", "boolean", "object", "any"  # noqa: E741
S_, N_, I_, O_ = "string?", "number?", "integer?", "object?"
DIFFERENCE = {"name": S, "predicted_s": N, "measured_s": N, "difference_s": N, "reason": S}
SIZE = {
    "gpus": I, "batch": I, "step_time_s": N, "tokens_per_s": N, "mfu": N, "fits": B, "compute_s": N, "inside_s": N, "between_s": N,
    "bound_by": S, "title": S, "efficiency": N, "formula": S,
}  # fmt: skip
SPAN = {"stream": S, "name": S, "start": N, "seconds": N}
WAYS = {"ways": [{"name": S, "end_s": N, "spans": [SPAN]}], "compute_s": N, "saved": N, "formula": S}
SHAPES: dict[str, Any] = {
    "verdict": {
        "subject": {"model": S, "parameters": N, "gpus": I, "accelerator": S, "cluster": S, "stack": S, "plan": S, "microbatches": I}, "tone": S,
        "headline": S, "sentence": S, "fits": B, "bound_by": S, "step_time_s": N, "step_time_low_s": N, "step_time_high_s": N, "mfu": N,
        "mfu_tone": S, "memory_gib": N, "memory_limit_gib": N, "tokens_per_s": N, "unit": S, "own_trainer": S,
        "targets": [{"name": S, "share": N, "target": S, "good": B}], "training": O_,
        "pipeline": {"?": {"efficiency_share": N, "target_share": N}},
        "assumed": [S], "calibrated": S, "formulas": {"*": S},
    },
    "advice": {
        "first": [{"title": S, "set": O, "follows": S, "saves_s": N, "memory_gib": N, "fix": S}],
        "findings": [{"code": S, "name": S, "severity": S, "what": S, "cost_s": N, "share": N, "fix": S, "saves_s": N_, "still_best": S, "set": O}],
        "step_time_s": N,
    },
    "memory": {
        "limit_gib": N, "peak_gib": N, "fullest": I, "states_gib": N, "activations_gib": N, "in_flight": N, "parts": [S],
        "stages": [{"stage": I, "total_gib": N, "parts": [{"name": S, "gib": N, "formula": S}]}],
        "checkpoint": {"save_device": N, "save_host": N, "load_device": N, "load_host": N, "host_limit": N, "text": S},
        "timeline": {"stage": I, "points": [[N]], "constant_gib": N, "peak_gib": N, "total_s": N, "makespan_s": N, "in_flight": N},
        "formulas": {"*": S},
    },
    "leaders": {
        "searched": I, "costed": I, "seconds": N, "provisional": B, "chosen_from": S, "choice": S,
        "leaders": [{
            "title": S, "plan": O, "strategy": S, "step_time_s": N, "slower": N, "memory_gib": N, "memory_limit_gib": N, "mfu": N,
            "tokens_per_s": N, "bound_by": S, "present": B,
        }],
        "reasons": [{"field": S, "why": S}], "strategies": [{"strategy": S, "fits": B, "slower": N_, "why": S, "title": S, "plan": O}],
        "mine": {"legal": B, "refused": S, "slower": N, "step_time_s": N, "difference": [{"name": S, "s": N}], "fields": [O]},
    },
    "waterfall": {
        "step_time_s": N, "parts": [{"part": S, "name": S, "s": N, "formula": S}], "compute_s": N, "communication_s": N, "exposed_s": N,
        "hidden_s": N, "bubble_s": N, "bound_by": S,
        "overlap": {
            "rows": [{"name": S, "overlaps": [S], "step_time_s": N, "parts": [{"part": S, "s": N}]}], "overlaps": [S],
            "axes": [{"axis": S, "name": S, "total_s": N, "exposed_s": N, "hidden_s": N, "formula": S}],
        },
        "formulas": {"*": S},
    },
    "timeline": {
        "pipeline": B, "unit": S, "kinds": {"*": S}, "ticks": I,
        "panels": [{
            "schedule": S, "virtual": I, "ranks": I, "microbatches": I, "makespan_s": N, "step_time_s": N, "closing": [{"part": S, "seconds": N}],
            "bubble_fraction": N, "in_flight": [N], "memory_bytes": N, "fits": B, "durations": {"*": [I]}, "chunk_of": [I],
            "lanes": [{"kind": S, "stage": [I], "microbatch": [I], "start": [I]}], "formulas": {"*": S},
        }],
        "stages": [{
            "stage": I, "rank": I, "layers": I, "ends": [S], "parameters": N, "forward_s": N, "backward_s": N, "message_bytes": N, "memory_gib": N,
            "in_flight": N, "formula": S,
        }],
        "choices": [{"name": S, "about": S, "legal": B, "reason": S}], "note": S,
    },
    "roofline": {
        "levels": [{"name": S, "bandwidth": N, "alpha_s": N, "crossover_bytes": N, "curve": [[N]], "formula": S}],
        "points": [{
            "name": S, "axis": S, "operation": S, "algorithm": S, "ranks": I, "level": I, "calls": N, "buffer_bytes": N, "sent_bytes": N,
            "seconds": N, "step_seconds": N, "rate": N, "share": N, "bound": S, "formula": S,
        }],
        "measured": [ANY], "calibrated": S,
        "step": {
            "level": S, "regime": S, "advice": [S],
            "ceilings": [{"level": S, "bytes": N, "bandwidth": N, "ccr": N_, "ridge": N, "efficiency": N, "seconds": N, "formula": S}],
        },
        "note": S,
    },
    "ranks": {
        "world": I, "drawn": I, "node_size": I, "order": [S], "sizes": {"*": I},
        "axes": [{"axis": S, "size": I, "groups": I, "level": S, "group_of": [I], "formula": S}], "note": S,
    },
    "goodput": {
        "gpus": I, "mtbf_s": N, "checkpoint_s": N, "restart_s": N, "daly_s": N, "young_s": N, "goodput": N, "mfu": N, "effective_mfu": N,
        "checkpoint_bytes": N, "assumed": [S], "curve": [{"interval_s": N, "goodput": N, "formula": S}], "formulas": {"*": S}, "note": S,
    },
    "heatmap": {
        "gpus": I, "tp": [I], "pp": [I], "unit": S,
        "cells": [{"tp": I, "pp": I, "fits": B, "label": S, "reason": S, "plan": O_,
            "step_time_s": N_, "memory_bytes": N_, "tokens_per_s": N_, "formula": S}],
        "mine": {"tp": I, "pp": I, "step_time_s": N}, "best": {"?": {"tp": I, "pp": I}}, "reasons": [S], "note": S,
    },
    "pareto": {
        "limit_bytes": N,
        "points": [{"step_time_s": N, "memory_bytes": N, "title": S, "strategy": S, "plan": O, "best": B, "fits": B, "formula": S, "front": B}],
        "front": [{"step_time_s": N, "memory_bytes": N}],
        "mine": {"step_time_s": N, "memory_bytes": N, "title": S, "strategy": S, "fits": B, "formula": S}, "note": S,
    },
    "scaling": {
        "gpus": I, "unit": S, "node_size": I,
        "strong": [SIZE], "weak": [SIZE],
        "best": [{"gpus": I, "step_time_s": N, "tokens_per_s": N, "title": S, "plan": O, "formula": S}],
        "takes_over": {"?": {"gpus": N, "formula": S}}, "note": S,
    },
    "batch": {
        "batch": I, "unit": I, "seq": I_, "critical": I_, "critical_reason": S,
        "rows": [{"batch": I, "microbatches": I, "step_time_s": N, "mfu": N, "tokens_per_s": N, "lost_share": N, "formula": S}], "note": S,
    },
    "sensitivity": {"share": N, "rows": [{"what": S, "less": N_, "more": N_, "note": S, "formula": S}], "note": S},
    "published": {
        "model": S, "accelerator": S,
        "runs": [{
            "run": S, "model": S, "shape": [I], "accelerator": S, "gpus": I, "plan": S, "measured_s": N, "predicted_s": N, "low_s": N, "high_s": N,
            "tokens_per_s_per_gpu": N, "ratio": N, "within": B, "source": S, "formula": S, "like": S,
        }],
        "plan": O, "note": S,
    },
    "collectives": {
        "operation": S, "algorithm": S, "operations": [{"name": S, "about": S, "dual": S, "used": S}],
        "algorithms": [{"name": S, "formula": S, "runs": B}], "rank_choices": [I], "size_choices": [{"bytes": N, "text": S}],
        "family": [{"whole": S, "parts": [S]}], "chosen": B, "ranks": I, "size_bytes": N, "cluster": S,
        "program": {
            "operation": S, "algorithm": S, "ranks": I, "elements": I, "root": I, "groups": [[I]], "chunk_sizes": [I], "starts": [[I]],
            "ends": [[I]], "steps": I, "moves": [{"step": I, "source": I, "target": I, "chunk": I, "width": I, "reduce": B}], "formula": S,
            "switches": [[I]],
        },
        "time_s": N, "timeline": [{"step": I, "end_s": N}],
        "comparison": {"?": {"operation": S, "cluster": S, "ranks": I, "size_bytes": [N], "time_s": {"*": [N]}, "best": [S], "crossovers": [ANY]}},
        "formulas": {"*": S},
    },
    "strategies": {
        "rows": [{"name": S, "splits": S, "collective": S, "when": S, "volume": S, "overlap": S, "state": S, "use": S, "used": B}],
        "rules": [{"name": S, "text": S}], "letters": S, "title": S,
    },
    "zero": {
        "parameters": N, "ranks": I, "rank_choices": [I], "limit_bytes": N, "accelerator": S,
        "stages": [{"stage": I, "name": S, "parts": [{"name": S, "bytes": N}], "bytes": N, "sent": S, "formula": S}],
        "wall": [{"name": S, "curve": [[N]], "largest": N, "formula": S}], "plan": [O], "seed": [{"name": S, "printed_gb": N, "right_gb": N}],
        "note": S,
    },
    "overlap": {
        "ranks": I, "layers?": I, "bucket_bytes?": N, "bucket_choices?": [{"bytes": N, "text": S}],
        "ddp": {"?": WAYS}, "fsdp": {"?": WAYS},
        "note": S,
    },
    "learn": {
        "contents?": [{"part": S, "chapters": [{"key": S, "title": S}]}], "chapter?": {"key": S, "title": S, "blocks": [ANY]},
        "figure?": {
            "name": S, "controls": [{"name": S, "label": S, "value": ANY, "values": [ANY], "unit": S, "kind": S}], "draw": S, "data": ANY,
            "stats": [{"name": S, "value": S, "detail": S}], "note": S,
        },
    },
    "modeler": {
        "inputs": {
            "stages": I, "microbatches": I, "layers": I, "tokens": I, "hidden": I, "tp": I, "layer_ms": N, "link_gbps": N, "schedule": S,
            "precision": S, "chunk_mb": N, "chunk_gbps": N, "overhead_us": N,
        },
        "schedules": [S], "precisions": [S], "message_bytes": N, "cards": [{"stage": I, "layers": I, "message_bytes": N, "held": I}],
        "rows": [{"name": S, "tool": N_, "ours": N, "unit": S, "formula": S, "why": S, "same": B}],
        "chunks": {"bytes": N, "rate": N, "seconds": N, "best": I, "exposed_s": N, "formula": S},
        "rate": {"flops": N, "flops_per_s": N, "layers_per_s": N},
        "advice": {"low": B, "efficiency_share": N, "tool": {"microbatches": I, "stages": I}, "ours": {"microbatches": I, "stages": I}},
        "timeline": {"ranks": I, "makespan_s": N, "actions": [[ANY]]},
    },
    "runs": {
        "folder": S, "error?": O,
        "runs": [{
            "name": S, "model": S, "title": S, "world?": I_, "steps": I_, "planned_steps": I_, "loss": N_, "validation_loss": N_, "step_time_s": N_,
            "predicted_step_time_s": N_, "comparable?": B, "tokens_per_s": N_, "unit": S, "mfu": N_, "memory_gib": N_, "started": N_,
            "elapsed_s?": N_, "attempts": I, "cause": S, "modified_s": N, "state": S,
        }],
    },
    "run": {
        "name": S, "title": S, "model": S, "accelerator": S, "state": S, "about": O, "parts": {f"{name}?": ANY for name in PARTS},
        "columns": [S], "rows": [[ANY]], "events": [{"*": ANY}], "steps": I, "fresh": B, "seen": S,
    },
    "traced": {
        "step": S, "step_time_s": N, "attributed": N, "memory_gib": N_, "memory": [{"category": S, "gib": N, "predicted_gib?": N_}],
        "memory_note": S, "parts": [S], "ranks": [{"rank": I, "pieces": [[N]]}], "causes": [{"cause": S, "seconds": N, "evidence": S, "fix": S}],
        "notes": [S], "no_prediction": S,
        "predicted": {
            "?": {
                "step_time_s": N, "low_s": N, "high_s": N, "memory_gib": N, "rank": I, "plan": S, "parts": [S], "pieces": [[N]],
                "rows": [DIFFERENCE], "largest": [DIFFERENCE],
            },
        },
    },
    "checked": {
        "title": S, "reference": S, "lanes": [{"name": S, "cells": [{"?": [N]}]}], "modules": [S],
        "first": {"?": {"module": I, "lane": I, "text": S}}, "parts": [{"*": ANY}],
    },
}  # fmt: skip
