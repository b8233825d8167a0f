"""Generating text: the KV cache, the time of a prompt, and the time of one more token of each sequence.

    prefill    the forward of the training step for one sequence of s tokens, with the logits of its last token
    token      the forward of B tokens, one of each sequence of a replica, after s tokens of context. In place of training's attention the layers
               read what they keep of the sequences (`describe.cache`)

Both are the operations of the lowered step, at the rates of the cost model, one after the other: communication of so small messages hides behind
nothing. Kernels come from CUDA graphs, so that the host costs no time. The weights are read once for all B sequences, a cache once for each. So

    bound by memory    while  bytes / (share · bandwidth) > FLOPs / (share · peak):  a batch below B* costs no more than one sequence

B* is infinite if a sequence's cache takes longer to read than its token takes to compute: then only the products stop being bound by memory.
Of E experts a rank reads those that some token chose: 1 − (1 − k/E)^T of them for T tokens.

Every replica (a tensor-parallel group; expert parallelism joins several) has B sequences of its own. Nothing was measured: times are modelled.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshwright.cost.collective import CollectiveTimes
from meshwright.cost.compute import op_time
from meshwright.describe.adapter import PACKINGS, Adapter
from meshwright.describe.cache import LayerCache, cache_by_mixer
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.result import GIB, USABLE_MEMORY
from meshwright.describe.shape_checks import ATTENTION
from meshwright.describe.stack import Stack
from meshwright.errors import MeshwrightError
from meshwright.lower.program import Array, Op, StepProgram
from meshwright.lower.step import step_program
from meshwright.units import Json

VERSION = 1
SEQUENCES = tuple(2**k for k in range(13))  # of a replica, in the table
MOST_SEQUENCES = 2**20
WEIGHT_BYTES = {"fp8": 1.0, "mxfp8": 1.0, "fp4": 0.5}
PARTS = ("weights", "cache", "communication", "other")
# Begins the names of operations of forward that decoding replaces or leaves out
TRAINING_ONLY = ("loss", "index-scores")


@dataclass(frozen=True)
class TokenTime:
    """One token of each of some sequences of a replica."""

    sequences: int
    token_s: float
    parts_s: dict[str, float]  # sum: token_s
    arithmetic_s: float  # at the rates of the device, if memory were free
    traffic_s: float  # the same if arithmetic were free
    tokens_per_s: float  # of all replicas
    memory_gib: float
    fits: bool

    @property
    def bound_by(self) -> str:
        if self.parts_s["communication"] > max(self.arithmetic_s, self.traffic_s):
            return "communication"
        return "memory" if self.traffic_s > self.arithmetic_s else "compute"

    def as_dict(self, world: int) -> Json:
        return {
            "sequences": self.sequences,
            "token_s": self.token_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s / world,
            "parts_s": self.parts_s,
            "bound_by": self.bound_by,
            "memory_gib": self.memory_gib,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class Decoding:
    """Generating text with the model of a configuration on its cluster, at a context of `workload.seq` tokens."""

    config: Config

    @property
    def plan(self) -> Plan:
        return self.config.plan

    @property
    def context(self) -> int:
        return self.config.workload.seq

    @cached_property
    def caches(self) -> dict[str, tuple[int, LayerCache]]:
        return cache_by_mixer(self.config.model, self.context)

    @cached_property
    def cache_bytes(self) -> dict[str, float]:
        """Bytes of one sequence by mixer, over all its layers and ranks."""
        return {name: number * c.elements * self.element for name, (number, c) in self.caches.items()}

    @cached_property
    def element(self) -> float:
        """Bytes of a number of the cache: those of an activation."""
        return self.tokens_program((1,)).element

    def tokens_program(self, sequences: tuple[int, ...], seq: int = 1) -> StepProgram:
        """The lowered step of `seq` tokens of these numbers of sequences in a replica."""
        c = self.config
        plan = Plan(tp=c.plan.tp, replicate=c.plan.dp, ep=c.plan.ep, expert_tp=c.plan.expert_tp, order=c.plan.order)
        stack = Stack(
            graphs=("step",)
        )  # kernels for few tokens send every copy of a token (DeepEP: low_latency_dispatch)
        # Adapters are merged into a base that is not quantised.
        adapter = c.model.adapter if c.model.adapter.base in PACKINGS else Adapter()
        model = c.model.but(mtp_layers=0, dropout=0.0, attention_dropout=0.0, adapter=adapter)
        plans = [plan.but(microbatch=count) for count in sequences]
        return step_program(model, plans, c.workload.but(seq=seq, batch=plan.dp), stack)

    def rows(self, sequences: tuple[int, ...]) -> list[TokenTime]:
        """The time of a token for these numbers of sequences of a replica."""
        program = self.tokens_program(sequences)
        parts, roofs = self._times(program, decoding=True)
        weights, cache = self._weight_bytes(program), self._cache_of_rank()
        limit = self.config.cluster.accelerator.memory
        out = []
        for i, count in enumerate(sequences):
            of_row = {part: _at(parts[part], i) for part in PARTS}
            total, memory = sum(of_row.values()), weights + count * cache
            rate = count * self.plan.dp / total
            roof = (_at(roofs[0], i), _at(roofs[1], i))
            out.append(TokenTime(count, total, of_row, *roof, rate, memory / GIB, memory <= USABLE_MEMORY * limit))
        return out

    @cached_property
    def table(self) -> list[TokenTime]:
        """Powers of two up to the most sequences that fit, and that number; the first one if none fits."""
        most = self.most_sequences
        counts = [n for n in SEQUENCES if n < most] + ([most] if most else [1])
        return self.rows(tuple(counts))

    @cached_property
    def most_sequences(self) -> int:
        """Sequences of a replica whose caches fit beside the weights; 0: not one."""
        free = USABLE_MEMORY * self.config.cluster.accelerator.memory - self.weights_gib * GIB
        return max(0, min(int(free // max(self._cache_of_rank(), 1.0)), MOST_SEQUENCES))

    @cached_property
    def weights_gib(self) -> float:
        """Weights on a rank."""
        return self._weight_bytes(self.tokens_program((1,))) / GIB

    @cached_property
    def prefill_s(self) -> float:
        """Seconds until the first token of one prompt of the context's length."""
        parts, _ = self._times(self.tokens_program((1,), self.context), decoding=False)
        return sum(_at(seconds, 0) for seconds in parts.values())

    @cached_property
    def compute_bound_sequences(self) -> int | None:
        """B*: the fewest sequences of a replica at which a token is no longer bound by memory; None: never."""
        return self._crossing(cached=True)

    @cached_property
    def compute_bound_products(self) -> int | None:
        """The same for the products with weights alone."""
        return self._crossing(cached=False)

    def _crossing(self, cached: bool) -> int | None:
        def crossed(sequences: int) -> bool:
            _, (arithmetic, traffic) = self._times(self.tokens_program((sequences,)), decoding=True, cached=cached)
            return _at(arithmetic, 0) >= _at(traffic, 0)

        if not crossed(MOST_SEQUENCES):
            return None
        low, high = 0, MOST_SEQUENCES
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if crossed(middle) else (middle, high)
        return high

    # What a rank reads and computes

    def _times(
        self, program: StepProgram, decoding: bool, cached: bool = True
    ) -> tuple[dict[str, Array], tuple[Array, Array]]:
        """Seconds by part, and seconds of arithmetic alone and of traffic alone."""
        c, batch = self.config, program.batch
        device, network = c.cluster.accelerator, CollectiveTimes(c.cluster, batch)
        parts: dict[str, Array] = dict.fromkeys(PARTS, 0.0)
        arithmetic: Array = 0.0
        traffic: Array = 0.0
        for (block, phase), ops in program.blocks.items():
            for op in ops if phase == "F" else ():
                if op.name.startswith(TRAINING_ONLY) or (decoding and op.kind in ("attention", "scan")):
                    continue
                times = op.count * (program.ranks[0].counts[block])
                if op.axis:
                    parts["communication"] = parts["communication"] + times * self._message_time(network, op)
                    continue
                op = self._read(program, op, last_only=block == "head" and not decoding)
                part = "weights" if op.kind == "gemm" else "other"
                parts[part] = parts[part] + times * op_time(device, c.workload.precision, batch.stack, op)
                if op.kind == "gemm":
                    rate = device.efficiency.products(op.dtype or c.workload.precision)
                    arithmetic = arithmetic + times * op.flops / (
                        rate * device.peak_for(op.dtype or c.workload.precision)
                    )
                    traffic = traffic + times * op.bytes / self._bandwidth
        if decoding and cached:
            flops, read, kernels = self._attention()
            rate = device.efficiency.attention(batch.stack.attention) * device.peak_for(self._wide)
            computing, reading = batch.microbatch * flops / rate, batch.microbatch * read / self._bandwidth
            parts["cache"] = kernels * device.efficiency.floor + np.maximum(computing, reading)
            arithmetic, traffic = arithmetic + computing, traffic + reading
        return parts, (arithmetic, traffic)

    def _message_time(self, network: CollectiveTimes, op: Op) -> Array:
        """Seconds of a collective. Small messages have a faster form than a library's: one kernel in which each rank reads the buffers of all
        others (all-reduce inside a node) or writes to them (all-to-all), between two signals (α) that they are ready and free again."""
        cluster, seconds, ranks = self.config.cluster, network.time(op), network.batch.size(op.axis)
        if op.collective == "all_to_all":
            level, inside = network.level(op.axis), ranks / network.nodes(op.axis)
            near = (inside - 1) / ranks * op.message_bytes / cluster.device_bandwidth(0)
            far = (ranks - inside) / ranks * op.message_bytes / cluster.device_bandwidth(level)
            one_kernel = np.maximum(near, far)
        elif op.collective == "all_reduce" and float(np.max(ranks)) <= cluster.node_size:
            level, one_kernel = 0, (ranks - 1) * op.message_bytes / cluster.device_bandwidth(0)
        else:
            return seconds
        start = cluster.accelerator.efficiency.floor + 2 * cluster.levels[level].link.alpha
        return np.where(ranks > 1, np.minimum(seconds, start + one_kernel), seconds)

    def _read(self, program: StepProgram, op: Op, last_only: bool) -> Op:
        """An operation with the weights that are read: in their own dtype, and of experts only those that a token chose."""
        if op.kind != "gemm":
            return op
        batch, element = program.batch, program.element
        count, rows, width, inner = op.shape
        if last_only:
            rows = batch.microbatch
        if op.part == "experts":
            m = batch.model
            tokens = batch.tokens / batch.tp * batch.ep * batch.etp  # of all ranks that share the experts
            chosen = count * (1 - (1 - m.top_k / m.experts) ** tokens)
            rows = rows * count / chosen
            count = chosen
        weight = WEIGHT_BYTES.get(self.config.workload.precision, element) if not op.dtype else element
        size = count * (rows * (inner + width) * element + inner * width * weight)
        flops = 2.0 * count * rows * width * inner
        return replace(op, flops=flops, bytes=size, shape=(count, rows, width, inner))

    def _attention(self) -> tuple[float, float, int]:
        """FLOPs and bytes read for one sequence's token on a rank, in all layers, and the number of kernels."""
        model, tp = self.config.model, self.plan.tp
        flops, read, kernels = 0.0, 0.0, 0
        for name, (number, c) in self.caches.items():
            mixer = name.partition(",")[0]
            split = min(tp, model.kv_groups) if mixer in ATTENTION else tp
            read += number * (c.read_by_head / split + c.read_whole) * self.element
            kernels += number
            if mixer in ATTENTION:
                core = next(
                    b.attention
                    for kind, b in model.blocks.items()
                    if b.attention and model.parts_of(kind).mixer == mixer
                )
                qk, v = (model.kv_rank + model.rope_dim, model.kv_rank) if model.kv_rank else (core.qk, core.v)
                flops += number * (2.0 * core.heads * (qk + v) * c.positions + 2.0 * core.index * c.candidates) / tp
            else:
                flops += number * 2.0 * c.read_by_head / tp
        return flops, read, kernels

    def _cache_of_rank(self) -> float:
        """Bytes of one sequence on a rank."""
        model, tp, total = self.config.model, self.plan.tp, 0.0
        for name, (number, c) in self.caches.items():
            split = min(tp, model.kv_groups) if name.partition(",")[0] in ATTENTION else tp
            total += number * (c.by_head / split + c.whole) * self.element
        return total

    def _weight_bytes(self, program: StepProgram) -> float:
        def total(sizes: dict[str, dict[str, Array]]) -> float:
            """The sum of a size of each block on a rank."""
            groups = ({b: g[group] for b, g in sizes.items()} for group in ("dense", "expert"))
            return sum(_at(program.ranks[0].total(group), 0) for group in groups)

        width = WEIGHT_BYTES.get(self.config.workload.precision, program.element)
        return total(program.parameters) * width + total(program.frozen)

    @property
    def _bandwidth(self) -> float:
        device = self.config.cluster.accelerator
        return device.efficiency.memory * device.memory_bandwidth

    @property
    def _wide(self) -> str:
        precision = self.config.workload.precision
        return "bf16" if precision in WEIGHT_BYTES else precision

    @property
    def assumed(self) -> list[str]:
        base, width = self.config.model.adapter.base, WEIGHT_BYTES.get(self.config.workload.precision, self.element)
        in_layers = f" (layers: {base}, unpacked before each product)" if base in PACKINGS else ""
        return [
            *self.config.assumed,
            "nothing was measured: rates are those of the training cost model, kernels come from CUDA graphs, and communication is not hidden",
            f"the cache has {self.element:g} bytes per number, weights {width:g}{in_layers}; "
            f"every sequence has {self.context:,} tokens",
        ]

    def as_dict(self) -> Json:
        alternatives = [
            {
                "tp": d.plan.tp,
                "ep": d.plan.ep,
                "replicas": d.plan.dp,
                "prefill_s": d.prefill_s,
                "most_sequences": d.most_sequences,
            }
            | {"rows": [row.as_dict(d.plan.world) for row in d.ends]}
            for d in self.alternatives
        ]
        return {
            "version": VERSION,
            "model": self.config.model.name,
            "cluster": self.config.cluster.name,
            "plan": {"tp": self.plan.tp, "ep": self.plan.ep, "replicas": self.plan.dp},
            "context": self.context,
            "weights_gib": self.weights_gib,
            "cache_bytes": self.cache_bytes,
            "cache_bytes_per_rank": self._cache_of_rank(),
            "prefill_s": self.prefill_s,
            "rows": [row.as_dict(self.plan.world) for row in self.table],
            "most_sequences": self.most_sequences,
            "compute_bound_sequences": self.compute_bound_sequences,
            "compute_bound_products": self.compute_bound_products,
            "alternatives": alternatives,
            "assumed": self.assumed,
        }

    @property
    def ends(self) -> list[TokenTime]:
        """One sequence, and the most that fit."""
        return [self.table[0], self.table[-1]]

    @cached_property
    def alternatives(self) -> list["Decoding"]:
        """This model on the same devices with each legal pair of tensor- and expert-parallel degrees, the fastest single token first."""
        c, world = self.config, self.plan.world
        found = []
        for tp in (n for n in range(1, world + 1) if world % n == 0 and n <= max(c.cluster.node_size, self.plan.tp)):
            for ep in dict.fromkeys((1, world) if c.model.experts else (1,)):
                plan = Plan(tp=tp, replicate=world // tp, ep=ep, expert_tp=1 if ep > 1 else 0)
                try:
                    found.append(decoding(c.but(plan=plan)))
                except MeshwrightError:
                    continue
        return sorted(found, key=lambda d: (not d.most_sequences, d.table[0].token_s))


def decoding(config: Config) -> Decoding:
    """Check that a configuration can generate text."""
    model, plan = config.model, config.plan
    if model.kind != "transformer" or not model.causal:
        raise MeshwrightError(
            "MW-DEC-001",
            f"{model.name} generates no text",
            why="It is no transformer whose tokens depend on earlier ones only",
            fix="--decode with a causal language model: meshwright catalog models",
        )
    if plan.pp > 1 or plan.cp > 1:
        raise MeshwrightError(
            "MW-DEC-002",
            f"decoding with pp={plan.pp} and cp={plan.cp} is not modelled",
            why="Its sequences are divided over replicas, and its layers by tensor and expert parallelism",
            valid=["tp", "ep", "replicate"],
            fix=f"--set plan.pp=1 --set plan.cp=1 --set plan.replicate={plan.replicate * plan.pp * plan.cp}",
        )
    serving = Plan(tp=plan.tp, replicate=plan.dp, ep=plan.ep, expert_tp=plan.expert_tp, order=plan.order)
    workload = config.workload.but(batch=plan.dp)
    serving.check(model, workload, config.cluster, Stack(name=config.stack.name))
    return Decoding(config.but(plan=serving, workload=workload))


def fastest(config: Config) -> Decoding:
    """The pair of degrees with the fastest single token, of those that fit; noted as assumed."""
    best = decoding(config.but(plan=Plan(replicate=config.cluster.world))).alternatives[0]
    words = f"plan: tp={best.plan.tp} ep={best.plan.ep}, the fastest single token"
    return decoding(best.config.but(assumed=(*config.assumed, words)))


def _at(value: Array, index: int) -> float:
    numbers = np.ravel(value)
    number = float(numbers[index if len(numbers) > 1 else 0])
    return number if math.isfinite(number) else 0.0
