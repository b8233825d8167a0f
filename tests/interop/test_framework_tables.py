"""The tables of keys in `frameworks/keys.toml`."""

from meshwright.interop.frameworks import READABLE
from meshwright.interop.keys import Key
from meshwright.interop.tables import KeyTable, document, key_of, rows_of


def test_every_table_and_every_shared_value_is_used() -> None:
    """A table that no framework reads and no other includes, or a name that no row gives, would be dead."""
    tables = document()["keys"]
    read = {f.table.keys.name for f in READABLE.values() if isinstance(f.table.keys, KeyTable)} | {"plain"}
    rows = [row for table in tables.values() for row in table]
    assert read | {row["include"] for row in rows if "include" in row} == set(tables)
    for field in ("words", "match", "unset"):
        assert {row[field] for row in rows if isinstance(row.get(field), str)} == set(document()[field])


def test_a_row_is_a_key() -> None:
    row = {"key": ["bf16", "half"], "fact": "half", "words": {"true": "bf16", "null": "fp32", "no": "unset"}}
    assert key_of(row) == Key("bf16", "half", words={True: "bf16", None: "fp32", "no": None}, was=("half",))
    assert key_of({"key": "n", "fact": "tp", "match": [["a", 2], [".", "unset"]]}).match == (("a", 2), (".", None))
    assert key_of({"key": "lr", "fact": "learning_rate", "words": "switch"}).words == {True: True, False: False}


def test_included_rows_are_those_of_the_other_table() -> None:
    megatron, deepspeed = ({key.name: key for key in rows_of(name)} for name in ("megatron-lm", "deepspeed"))
    taken = deepspeed["--tensor-model-parallel-size"]
    assert taken == megatron["--tensor-model-parallel-size"].only_read() != megatron["--tensor-model-parallel-size"]
    assert "--global-batch-size" in megatron
    assert deepspeed["--global-batch-size"].was == ("--batch_size",)  # DeepSpeed's own row: Megatron's is left out
    assert "tensor_model_parallel_size" in {key.name for key in rows_of("ms-swift")}  # with underscores
