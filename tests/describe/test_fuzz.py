"""Hostile input: any input gives a configuration or one clear error, quickly and in little memory."""

import tomllib

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.describe import catalog
from meshwright.describe.config import CLASSES, Config, load
from meshwright.describe.draft import Draft, parse_value
from meshwright.describe.files import parse_toml
from meshwright.errors import MeshwrightError

WORDS = st.sampled_from(
    [
        "plan",
        "model",
        "cluster",
        "workload",
        "stack",
        "extends",
        "levels",
        "link",
        "accelerator",
        "tp",
        "name",
        "peak",
        "llama3-8b",
        "dgx-h100",
        "nvlink4",
        "layers_per_stage",
        "published",
        "order",
        "80GiB",
        "-1us",
        "../x",
        "x.json",
        "",
    ]
)
NUMBERS = st.integers(-(10**35), 10**35) | st.floats() | st.sampled_from([0, 1, -1, 2**63, 10**30])
LEAVES = st.booleans() | NUMBERS | WORDS | st.text(max_size=20) | st.datetimes()
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=8), inner, max_size=5),
    max_leaves=25,
)
FIELDS = {name: sorted(cls.model_fields) for name, cls in CLASSES.items()}


@st.composite
def documents(draw) -> dict:
    """Documents that look like plan files, with arbitrary values in the fields."""
    out = {}
    for section in draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=5)):
        keys = st.sampled_from(FIELDS[section]) | st.just("extends")
        out[section] = draw(TREES | st.dictionaries(keys, TREES, max_size=4))
    return out


def loads_or_fails_clearly(make) -> None:
    """The input gives a configuration or a clear error, never another exception or an endless message."""
    failure = None
    try:
        config = make()
        if isinstance(config, Config):
            config.check()
            assert Config.from_parts(**tomllib.loads(config.to_toml())) == config
    except MeshwrightError as error:
        failure = error
    assert failure is None or (len(str(failure)) < 5000 and failure.exit_code == 2)


@given(documents())
def test_any_document_loads_or_fails_clearly(document) -> None:
    loads_or_fails_clearly(lambda: Config.from_parts(**{"model": "nano", "cluster": "laptop", **document}))


@given(st.data())
def test_any_value_in_any_field_loads_or_fails_clearly(data) -> None:
    section = data.draw(st.sampled_from(sorted(FIELDS)))
    field = data.draw(st.sampled_from(FIELDS[section]))
    base = {"model": "llama3-8b", "cluster": "dgx-h100", "stack": "default"}
    fields = {"extends": base[section]} if section in base else {}
    loads_or_fails_clearly(lambda: Config.from_parts(**{**base, section: {**fields, field: data.draw(TREES)}}))


@given(st.binary(max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_load_or_fail_clearly(tmp_path, blob) -> None:
    path = tmp_path / "any.toml"
    path.write_bytes(blob)
    loads_or_fails_clearly(lambda: load(path))


@given(documents())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_loads_or_fails_clearly(tmp_path, document) -> None:
    path = tmp_path / "any.toml"
    path.write_bytes(tomli_w.dumps({"model": "nano", "cluster": "laptop", **document}).encode("utf-8", "replace"))
    loads_or_fails_clearly(lambda: load(path))


@given(st.text(alphabet="[]{}=.,\"'#\n\\ab19-_eTZ:", max_size=80))
def test_any_toml_text_loads_or_fails_clearly(text) -> None:
    loads_or_fails_clearly(lambda: parse_toml(text, "text"))


@given(
    st.lists(st.sampled_from([*FIELDS, *FIELDS["plan"], "levels", "0", "1", "link", "9", "-1", ""]), max_size=6),
    st.text(max_size=30) | st.sampled_from(["8", "nan", "[1", "{a=1}", "h200", '"', "1e999"]),
)
def test_any_override_loads_or_fails_clearly(keys, value) -> None:
    base = {"model": "llama3-8b", "cluster": "dgx-h100"}
    loads_or_fails_clearly(lambda: Config.from_parts(**base, overrides=[f"{'.'.join(keys)}={value}"]))


@given(st.text(max_size=50))
def test_any_override_text_loads_or_fails_clearly(word) -> None:
    loads_or_fails_clearly(lambda: Draft().override(word))
    loads_or_fails_clearly(lambda: parse_value(word, "plan.tp"))


@given(st.text(max_size=30) | WORDS, st.sampled_from([*catalog.KINDS, "nothing"]))
def test_any_name_loads_or_fails_clearly(name, kind) -> None:
    loads_or_fails_clearly(lambda: catalog.load(kind, name))


@pytest.mark.parametrize("size", [10**12, 10**30])
def test_absurd_sizes_are_handled_quickly(size) -> None:
    for section, field in [
        ("model", "layers"),
        ("model", "experts"),
        ("plan", "pp"),
        ("plan", "replicate"),
        ("cluster", "gpus"),
        ("workload", "seq"),
    ]:
        base = {"model": "mixtral-8x7b", "cluster": "dgx-h100"}
        loads_or_fails_clearly(lambda s=section, f=field, b=base: Config.from_parts(**b, overrides=[f"{s}.{f}={size}"]))


def test_a_file_with_many_keys_loads_quickly() -> None:
    """Many different keys: the time to merge them must not grow with their square."""
    loads_or_fails_clearly(lambda: Config.from_parts("nano", "laptop", plan={f"k{i}": [{}] for i in range(20_000)}))
    draft = Draft()
    for _ in range(3):
        draft.merge("plan", {f"k{i}": [i] for i in range(20_000)}, "again", None)  # type: ignore[arg-type]
    assert len(draft.origins) == 20_000
