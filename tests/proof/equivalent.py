"""Mutants that compute the same, each with its reason: judged by a person, looked up only for what no killer notices.

A mutant is named by its module, its function and a part of its line. Some lines decide nothing but when something is sent, how
long it is kept or how it is cut: of those every change is equal (`ANY_CHANGE`, a part of the line as it is; an empty one is the
whole function). Of others it is one change (`ONE_CHANGE`, a part of the line as changed). A change that is *wrong* on such a line,
a message sent before its gradient is there, is noticed, and so never looked up.
"""

from __future__ import annotations

from changes import Mutant

WHEN = "it leaves, or is waited for, at another moment: the same sum"
MEMORY = "it is kept longer, shorter or elsewhere, or made once more: the same values"
CUT = "the same sum in other messages; of lossy ones, one device is told how they are cut"
MASKED = "the mask says exactly who sees whom; this only sends it more than it had to see"
TILES = "how many rows are computed at a time: each row is by itself"
NO_KEYS = "e to the minus infinity is zero, whatever finite number is taken off before"
ZEROED = "any row will do: it is looked up and then zeroed"
OF_ONE = "a group of one rank: what it sums is what it had"
OF_ITS_OWN = "another communicator of the same ranks"
NOT_READ = "nobody reads it before it is set"
LEAVES = "these modules have no modules inside"
FROM_2_13 = "torch before 2.13, which this is, does not read it; a later one does, and there it is noticed"
IN_TIME = (
    "the groups are made when they are first needed, by those who need them, which gloo allows, or made and not used"
)
BALANCED = "tokens in one run or in two: the same attention, its work divided otherwise"
SAME_PLACES = "every stage has ranks at the same places"
OF_NO_TOKENS = "a tp group of one, and who holds which experts, say nothing of whose tokens"

# module, function, part of the line as it is
ANY_CHANGE: dict[tuple[str, str, str], str] = {
    ("apart", "Apart._experts", "token_R = torch.empty(0"): NOT_READ,
    ("apply", "apply", "if model.attention_dropout and"): MEMORY,
    ("apply", "apply", "context.in_tiles("): MEMORY,
    ("apply", "apply", "if plan.offload in"): MEMORY,
    ("apply", "apply", "offload.put_on("): MEMORY,
    ("apply", "apply", "if model.tied and program is not None"): IN_TIME,
    ("blocks", "rectangles", "return _merged("): "rectangles side by side, or one of both",
    ("blocks", "_merged", ""): "rectangles side by side, or one of both",
    ("blocks", "_tiles", "step = "): TILES,
    ("blocks", "_tiles", "if columns.start < columns.stop:"): "a tile of no columns adds nothing",
    ("blocks", "Attended._merge", "finite = "): NO_KEYS,
    ("blocks", "_probabilities", "finite = "): NO_KEYS,
    ("expert", "Spread.__init__", "self.overlap ="): WHEN,
    ("expert", "Spread.__init__", "self._shape ="): NOT_READ,
    ("keep", "keeping", "_outside.reset(token)"): MEMORY,
    ("recompute", "recompute_plan", "elif plan.recompute == 'selective'"): MEMORY,
    ("recompute", "recompute_plan", "core_again("): MEMORY,
    ("recompute", "core_again", "undivided = "): MEMORY,
    ("recompute", "core_again", "if undivided"): MEMORY,
    ("recompute", "_Keep.forward", "return switch.new_empty(0)"): NOT_READ,
    ("recompute", "_Run.__init__", "self.kept = _Keep.apply(torch.empty(0"): NOT_READ,
    ("recompute", "_Run.rerun", "_under_way.reset(token)"): "it was set in a context that this rerun has for itself",
    ("regather", "Again.__init__", ""): MEMORY,
    ("ring", "_Ring.backward", "home = torch.empty(0)"): NOT_READ,
    ("vocabulary", "embed", "rows = F.embedding("): ZEROED,
    ("vocabulary", "_CrossEntropy.forward", "local_T = local_T.masked_fill("): ZEROED,
    ("zero", "Buckets.__init__", "count = "): CUT,
    ("zero", "Buckets.__init__", "length = "): CUT,
    ("zero", "Buckets.__init__", "edges = [*range("): CUT,
    ("zero", "Buckets.__init__", "p.register_post_accumulate_grad_hook("): WHEN,
    ("zero", "Buckets.__init__", "self._touching"): WHEN,
    ("zero", "Buckets.begin", "sends = "): WHEN,
    ("zero", "Buckets._done", ""): WHEN,
    ("zero", "Several.start", "part.start()"): WHEN,
    ("zero", "units", ""): CUT,
    ("zero", "shard", "ahead = "): WHEN,
    ("pipeline", "Stage.perform_reduce_grad", "self.reduction.start()"): WHEN,
    ("pipeline", "Stage._get_init_p2p_neighbors_ops", ""): "greetings of torch before 2.12",
    ("pipeline", "Stage._post_metadata_inference_cleanup", "super()."): "shapes are told, so that nothing was inferred and left",
    ("pipeline", "Stage._post_metadata_inference_cleanup", ""): FROM_2_13,
}  # fmt: skip
# module, function, part of the line as changed
ONE_CHANGE: dict[tuple[str, str, str], str] = {
    ("apart", "tokens_of", "token_order(layout, 1,"): SAME_PLACES,
    ("apart", "tokens_of", "group_of('stage', 1)"): SAME_PLACES,
    ("apart", "Apart.__init__", "sp=True"): OF_NO_TOKENS,
    ("apart", "Apart.__init__", "expert_tp=1"): OF_NO_TOKENS,
    ("apart", "Apart.__init__", "ep=2"): OF_NO_TOKENS,
    ("apart", "Apart._put_on", "recurse=True"): LEAVES,
    ("apart", "Apart._put_on_scaled", "requires_grad=True"): "one gradient more, which nobody reads",
    ("apply", "make_pipeline", "requires_grad=False"): FROM_2_13,
    ("blocks", "rectangles", "not sight.causal and queries == keys"): "a shorter way to what the pairs of runs say as well",
    ("blocks", "_relation", "k.stop + 1"): MASKED,
    ("blocks", "_relation", "q.stop + 1 - k.start"): MASKED,
    ("blocks", "_relation", "q.stop - 1 + k.start"): MASKED,
    ("blocks", "_relation", "-farthest > sight.window"): MASKED,
    ("blocks", "_relation", "nearest > sight.window"): MASKED,
    ("blocks", "_relation", "nearest >= sight.window and -farthest"): MASKED,
    ("blocks", "_relation", "near = not sight.window and"): MASKED,
    ("blocks", "_relation", "not sight.causal or nearest > 0"): "runs are the same or apart: nearest is 0 in a run of one token",
    ("blocks", "_relation", "not sight.causal or nearest >= 1"): "runs are the same or apart: nearest is 0 in a run of one token",
    ("blocks", "_relation", "near and q != k"): MASKED,
    ("blocks", "_tiles", "r.keys.stop + r.keys.start"): "a slice may end behind the last column",
    ("blocks", "_reach", "sight.window + 1)"): MASKED,
    ("blocks", "_reach", "- sight.window - 1 if"): MASKED,
    ("blocks", "_reach", "(1 if sight.causal else"): MASKED,
    ("blocks", "_reach", "last + 2"): MASKED,
    ("blocks", "Attended.meet", "kernel_for(*parts, r.seen != 'triangle')"): "both kernels there are take both: it asks, and is not told",
    ("blocks", "Gradients.__init__", "stride(-1) == 2"): "a copy of the same numbers",
    ("compress", "quantise", "scale == 0, 2.0, scale"): "zeros, whatever they are divided by",
    ("apply", "apply", "if unsaid else 1.0"): "memory is asked for only where recompute is automatic and has no budget",
    ("context", "put_on", "geometry.window > seq"): "a window as long as the sequence hides nothing",
    ("blocks", "_relation", "near or q == k"): "runs are the same or apart",
    ("context", "is_zigzag", "seq //"): BALANCED,
    ("context", "is_zigzag", "== 1)"): BALANCED,
    ("emulation", "added", "several[1]"): "every micro-batch has gradients of the same names",
    ("emulation", "told", "mesh.index(axis) == 1]"): "the second of a group tells what its first does",
    ("emulation", "emulate_messages", "layout)[1]"): "all ranks hold the same sum",
    ("emulation", "emulate_messages", "in parts[1]"): "all ranks hold parts of the same sizes",
    ("emulation", "emulate_owners", "in parts[1]"): "all ranks hold parts of the same sizes",
    ("emulation", "emulate_owners", "row[1] for row"): "a tensor of that size, which is then filled",
    ("expert", "_part", "stop + start"): "of an expert's cut the start is read, not the length",
    ("expert", "Journey._by_expert", "stable=False"): "rows of one expert in another order: each is computed by itself",
    ("expert", "worst", "[[-2.0, 0.0"): "entropy is at most 1, so that any layer's own is the least",
    ("expert", "worst", "[[-1.0, 1.0"): "the busiest expert has the mean at least, so that any layer's own is the most",
    ("fp8", "Fp8Products.__init__", "lambda: super().__init__()"): "torch's own does nothing",
    ("mesh", "Mesh.__init__", "shard > 1 and layout.plan.replicate >= 1"): OF_ITS_OWN,
    ("mesh", "Mesh.__init__", "shard >= 1 and layout.plan.replicate > 1"): OF_ITS_OWN,
    ("mesh", "Mesh.__init__", "shard > 1 or layout.plan.replicate > 1"): OF_ITS_OWN,
    ("mesh", "Mesh.group", "size('world') >= 1"): OF_ONE,
    ("mesh", "Mesh.expert_sharding", "size(axis) >= 1"): OF_ONE,
    ("mesh", "Mesh.sharding", "size('cp') >= 1"): OF_ITS_OWN,
    ("mesh", "Mesh.add_copies", "count != self.size('tp')"): OF_ITS_OWN,
    ("mesh", "Mesh.add_copies", "reshape(-2, count)"): "numpy takes any number below zero for what is left",
    ("order", "token_order", "plan.cp >= 1"): "one run, as one rank has",
    ("plain", "check_plain", "torch.linspace("): "any numbers will do",
    ("plain", "check_plain", "close = 17"): "roundings are fewer, and what is lost is more",
    ("pipeline", "Stage._begin", "last=True"): "each sends, the last or not",
    ("pipeline", "Pipeline.run", "return_outputs=True"): MEMORY,
    ("powersgd", "PowerSGD._start", "amax(0) > 1).all()"): "a longer way to what was kept: no column of it is drawn anew",
    ("precision", "cast", "recurse=True"): "and once more under a name that nobody reads",
    ("regather", "Again.get", "self.waiting += 1"): MEMORY,
    ("regather", "gather_again", "again.savers -= 1"): MEMORY,
    ("regather", "gather_again", "again.savers += 2"): MEMORY,
    ("ring", "travelling", "if ranks >= 1"): MEMORY,
    ("sparse", "TopK.reduce", "sorted=True"): "the same values in another order",
    ("sparse", "TopK.scatter", "sorted=True"): "the same values in another order",
    ("sparse", "Threshold._told", "[-100:]"): MEMORY,
    ("tensor", "_fused", "if copies >= 1:"): OF_ONE,
    ("tensor", "_partial", "recurse=True"): LEAVES,
    ("tensor", "_keys", "recurse=True"): LEAVES,
    ("ulysses", "over_heads", "x[1].numel()"): "rows of one size",
    ("zero", "Buckets.__init__", "if dtype is not None or dtype != p.dtype"): "unsaid, autograd keeps the parameter's own dtype",
    ("zero", "Buckets.__init__", "self._begun = True"): "a sum of zeros before the first",
    ("zero", "reduction", "if apart or isinstance("): "a bucket of nothing",
    ("zero", "reduction", "'dp' not in plan.overlap"): WHEN,
}  # fmt: skip


def reason_of(mutant: Mutant) -> str:
    """Why no result can differ; nothing where that was not judged."""
    rows = [(row[0], row[1:].strip()) for row in mutant.diff.splitlines()]
    for sign, table in (("-", ANY_CHANGE), ("+", ONE_CHANGE)):
        for (module, function, part), reason in table.items():
            if (module, function) == (mutant.module, mutant.function) and any(
                s == sign and part in row for s, row in rows
            ):
                return reason
    return ""
