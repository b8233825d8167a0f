"""Each kind of model has its table of tensor-parallel styles."""

from meshwright.describe.model import Model
from meshwright.parallel.tensor.tables import LLAMA, TABLES, phi3, table_of

MODEL = Model(hidden=16, layers=4, heads=4, kv_heads=2, ffn=24, vocab=32)


def test_each_kind_of_model_has_its_table():
    latent = {"attention": "mla", "kv_heads": 0, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
    assert table_of(MODEL) is TABLES["transformer"]
    assert table_of(MODEL.but(**latent)) is TABLES["mla"]
    assert table_of(Model(kind="mlp", hidden=16, layers=2)) is TABLES["mlp"]
    assert {name.rpartition(".")[2] for name, _ in LLAMA} - {name.rpartition(".")[2] for name, _ in phi3(4, 2)} == {
        "q_proj",
        "[kv]_proj",
        "gate_proj",
        "up_proj",
    }
