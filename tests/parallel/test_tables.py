"""Every parameter of our models has the style of the sharding table; tables for classes of other libraries name their modules."""

from types import SimpleNamespace

from meshwright.describe.model import Model
from meshwright.describe.sharding import RULES, parameters
from meshwright.parallel.tensor.split import matches
from meshwright.parallel.tensor.tables import llama, phi3, table_of

MODEL = Model(hidden=16, layers=4, heads=4, kv_heads=2, ffn=24, vocab=32)


def test_the_table_of_a_model_has_a_style_for_every_parameter_of_the_sharding_table():
    latent = {"attention": "mla", "kv_heads": 0, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
    for model in (MODEL, MODEL.but(**latent), Model(kind="mlp", hidden=16, layers=2)):
        table = table_of(model)
        for parameter in parameters(model, range(model.layers)):
            module, styles = parameter.module, [style for pattern, style in table if matches(parameter.module, pattern)]
            assert [s for s in styles if s in RULES] == [parameter.style.removesuffix("-bias")], (module, styles)


def test_a_fused_table_replaces_the_projections_that_are_fused():
    config = SimpleNamespace(head_dim=8, num_attention_heads=4, num_key_value_heads=2)
    plain, fused = ({name.rpartition(".")[2] for name, _ in table(config)} for table in (llama, phi3))
    assert plain - fused == {"q_proj", "[kv]_proj", "gate_proj", "up_proj"}
