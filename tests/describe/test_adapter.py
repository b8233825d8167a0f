"""`[adapter]`: which parameters train, their counts as PEFT prints them, their rows in the sharding table, and what is refused."""

import pytest

from meshwright.describe.adapter import Adapter
from meshwright.describe.config import Config, configure
from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import boxes, parameters
from meshwright.errors import MeshwrightError

# `print_trainable_parameters` of peft 0.21.2 on transformers 5.23.0, on the meta device, with these targets: trainable, all.
PEFT = [
    ("llama3-8b", {"rank": 16}, 6_815_744, 8_037_076_992),
]


def adapted(name: str, **fields: object) -> Model:
    return configure(name, "dgx-h100").model.but(adapter=Adapter(**fields))


@pytest.mark.parametrize(("name", "fields", "trained", "total"), PEFT)
def test_counts_are_those_that_peft_prints(name: str, fields: dict[str, object], trained: int, total: int) -> None:
    model = adapted(name, **fields)
    assert (model.trained, model.total) == (trained, total)
    table = parameters(model, range(model.layers))
    assert sum(_size(p.shape) for p in table if p.learns) == trained
    assert sum(_size(p.shape) for p in table) == total


def _size(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def tiny(**fields: object) -> Model:
    shape = dict(hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=96)
    return Model(name="tiny", **shape, adapter=Adapter(**fields))


def moe(**fields: object) -> Model:
    shape = dict(hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=96, experts=4, top_k=2, expert_ffn=128)
    return Model(name="moe", **shape, adapter=Adapter(**fields))


def rows(model: Model, plan: Plan, rank: int = 0) -> dict[str, tuple[object, ...]]:
    table = boxes(model, plan, Layout(plan), rank, range(model.layers))
    return {b.name.removeprefix("layers.0."): (b.shape, b.partial) for b in table if "lora" in b.name}


@pytest.mark.parametrize("sp", [False, True])
def test_adapters_are_cut_as_their_matrices(sp: bool) -> None:
    table = rows(tiny(rank=4, targets=("all-linear",)), Plan(tp=4, sp=sp))
    assert table["attention.q.lora_a.weight"] == ((4, 64), "tp")
    assert table["attention.q.lora_b.weight"] == ((16, 4), "")
    assert table["attention.k.lora_b.weight"] == ((16, 4), "kv_copies")  # two ranks have copies of a KV head
    assert table["attention.o.lora_a.weight"] == ((4, 16), "")
    assert table["attention.o.lora_b.weight"] == ((64, 4), "tp")
    assert table["ffn.down.lora_a.weight"] == ((4, 32), "")


def test_adapters_of_experts_are_stacked_and_cut_over_ep_and_expert_tp() -> None:
    table = rows(moe(rank=4, expert_rank=2, targets=("gate_proj", "w2")), Plan(tp=2, replicate=2, ep=2, expert_tp=2))
    assert table["moe.experts.gate.lora_a.weight"] == ((2, 2, 64), "expert_tp")
    assert table["moe.experts.gate.lora_b.weight"] == ((2, 64, 2), "")
    assert table["moe.experts.down.lora_a.weight"] == ((2, 2, 64), "")
    assert table["moe.experts.down.lora_b.weight"] == ((2, 64, 2), "expert_tp")
    assert "attention.q.lora_a.weight" not in table


def test_zero_shards_a_frozen_base_only_where_it_is_gathered() -> None:
    for zero in (1, 2, 3):
        plan = Plan(shard=4, zero=zero)
        table = {b.name: b for b in boxes(tiny(rank=4), plan, Layout(plan), 0, range(2))}
        assert (table["layers.0.attention.q.weight"].zero is not None) == (zero == 3)
        assert table["layers.0.attention.q.lora_a.weight"].zero is not None


def test_patterns_choose_what_trains() -> None:
    trained = {p.module for p in parameters(tiny(trains=("*norm", "lm_head")), range(2)) if p.learns}
    assert trained == {f"layers.{i}.{n}" for i in (0, 1) for n in ("attention_norm", "ffn_norm")} | {
        "head.norm",
        "head.project",
    }
    frozen = {p.module for p in parameters(tiny(freezes=("embed_tokens",)), range(2)) if not p.learns}
    assert frozen == {"embedding.tokens"}
    both = {
        p.module for p in parameters(tiny(rank=4, targets=("attention.*",), trains=("v_proj",)), range(1)) if p.learns
    }
    assert both == {
        f"layers.0.attention.{n}" for n in ("q.lora_a", "q.lora_b", "k.lora_a", "k.lora_b", "v", "o.lora_a", "o.lora_b")
    }


def test_only_frozen_matrices_of_layers_are_packed() -> None:
    packed = {p.module for p in parameters(moe(rank=4, base="nf4", trains=("q_proj",)), range(1)) if p.packed}
    assert packed == {
        f"layers.0.{n}"
        for n in ("attention.k", "attention.v", "attention.o", *(f"moe.experts.{x}" for x in ("gate", "up", "down")))
    }
    a = Adapter(rank=4, base="nf4")
    assert a.row_bytes(4096) == 2048 + 4 * 64  # 4 bits each, and a float32 for 64 of them
    assert (
        a.but(double_quantised=True).row_bytes(4096) == 2048 + 64 + 4
    )  # a byte for 64 of them, and a float32 for the row
    assert a.row_bytes(10, first=60) == 8 + 2 * 4  # codes end at a multiple of four bytes; two blocks are touched
    assert a.but(base="int8").row_bytes(10) == 12 + 4


def test_the_section_is_part_of_the_model_and_round_trips(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = configure("llama3-8b", "dgx-h100", set=["adapter.rank=16", "adapter.base=nf4"])
    assert config.model.adapter == config.adapter == Adapter(rank=16, base="nf4")
    (tmp_path / "plan.toml").write_text(config.to_toml())
    assert "[adapter]" in config.to_toml()
    assert 'model = "llama3-8b"' in config.to_toml()
    again = configure(tmp_path / "plan.toml")
    assert again == config
    assert again.origin("adapter.rank").startswith(str(tmp_path))
    assert configure(config, set=["adapter.rank=8"]).adapter == Adapter(rank=8, base="nf4")
    assert configure(config.model, "dgx-h100").adapter == config.adapter
    assert config.but(adapter=Adapter()).model == configure("llama3-8b", "dgx-h100").model
    assert Config.from_document({"model": "llama3-8b", "cluster": "dgx-h100", "adapter": {"rank": 4}}).adapter.rank == 4


@pytest.mark.parametrize(
    ("words", "code", "fix"),
    [
        (["rank=16", "targets=q_prj"], "MW-ADPT-002", "adapter.targets=q_proj"),
        (["rank=16", "targets=layers.3.attention.q"], "MW-ADPT-002", ""),
        (["rank=16", "trains=layers.*.nothing"], "MW-ADPT-002", ""),
        (["targets=q_proj"], "MW-ADPT-001", "adapter.rank=16"),
        (["base=nf4"], "MW-ADPT-001", "adapter.rank=16"),
        (["rank=16", "double_quantised=true"], "MW-ADPT-001", "adapter.base=nf4"),
        (["rank=1025"], "MW-ADPT-004", "adapter.rank=16"),  # v is 1024 wide
        (["freezes=*"], "MW-ADPT-005", "adapter.freezes="),
        (["rank=16", "trains=q_proj,v_proj"], "MW-ADPT-002", "adapter.targets=all-linear"),
        (["rank=16", "expert_rank=4"], "MW-ADPT-001", "adapter.expert_rank=0"),
        (["rank=16", "trains=lm_head", "freezes=embed_tokens"], "MW-ADPT-001", "adapter.freezes="),
    ],
)
def test_what_has_no_effect_or_does_not_fit_is_refused(words: list[str], code: str, fix: str) -> None:
    with pytest.raises(MeshwrightError) as error:
        configure("llama3-8b", "dgx-h100", set=[f"adapter.{word}" for word in words])
    assert error.value.code == code
    assert fix in error.value.fix
    if fix:  # a fix that we offer is legal
        configure(
            "llama3-8b", "dgx-h100", set=[*(f"adapter.{w}" for w in words), error.value.fix.removeprefix("--set ")]
        )


def test_a_model_of_totals_takes_no_adapter() -> None:
    with pytest.raises(MeshwrightError, match="MW-ADPT-003") as error:
        configure("resnet-50", "dgx-h100", set=["adapter.freezes=*"])
    fixes = error.value.fix.replace("--set ", "").split()
    assert not configure("resnet-50", "dgx-h100", set=["adapter.freezes=*", *fixes]).adapter.on
    with pytest.raises(MeshwrightError, match="MW-ADPT-003"):
        Model(name="total", kind="counts", given_parameters=1e9, given_flops=1e9, adapter=Adapter(rank=4))
