"""Units: printed values can be parsed, and bits differ from bytes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import units
from meshwright.errors import MeshwrightError

SIZES = st.floats(min_value=1e-3, max_value=1e18)


def test_bits_bytes_and_binary_bytes_differ() -> None:
    assert units.parse_bytes("1GB") == 1e9
    assert units.parse_bytes("1Gb") == 1e9 / 8
    assert units.parse_bytes("1GiB") == 2**30
    assert units.parse_rate("400Gb/s") == units.parse_rate("50 GB/s") == 50e9


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bytes, "80GiB", 80 * 2**30),
        (units.parse_bytes, "25 MB", 25e6),
        (units.parse_bytes, "1_000", 1000),
        (units.parse_bytes, "1,024KiB", 2**20),
        (units.parse_rate, "900 GB/s", 900e9),
        (units.parse_rate, "3.35TB/s", 3.35e12),
        (units.parse_rate, "200Gbps", 25e9),
        (units.parse_seconds, "1.5us", 1.5e-6),
        (units.parse_seconds, "1.5µs", 1.5e-6),
        (units.parse_seconds, "3h", 10800),
        (units.parse_flops, "989TFLOP/s", 989e12),
        (units.parse_flops, "1.4PFLOPS", 1.4e15),
        (units.parse_count, "15T", 15e12),
        (units.parse_count, "175B", 175e9),
        (units.parse_count, 7, 7),
    ],
)
def test_parse(parse, text, value) -> None:
    assert parse(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("parse", "show"),
    [
        (units.parse_bytes, units.format_bytes),
        (units.parse_bytes, units.format_decimal_bytes),
        (units.parse_rate, units.format_rate),
        (units.parse_seconds, units.format_seconds),
        (units.parse_flops, units.format_flops),
        (units.parse_count, units.format_count),
    ],
)
@given(value=SIZES)
def test_printed_values_can_be_parsed(parse, show, value) -> None:
    # Durations of days are printed to a tenth; all other values keep as many digits as it is asked for.
    rel = 0.05 if show is units.format_seconds else 1e-4
    assert parse(show(value, 6)) == pytest.approx(value, rel=rel)


@given(value=st.floats(min_value=0, max_value=1e15), prefix=st.sampled_from(sorted(units.BINARY)))
def test_binary_prefixes(value, prefix) -> None:
    assert units.parse_bytes(f"{value!r}{prefix}B") == pytest.approx(value * units.BINARY[prefix])


@given(st.floats(max_value=-1e-9) | st.sampled_from([math.inf, math.nan, -math.inf]) | st.booleans())
def test_not_a_quantity(value) -> None:
    with pytest.raises(MeshwrightError):
        units.parse_bytes(value)


@given(st.text(max_size=100))
def test_any_text_parses_or_is_refused(text) -> None:
    for parse in (units.parse_bytes, units.parse_rate, units.parse_seconds, units.parse_flops, units.parse_count):
        try:
            value = parse(text)
        except MeshwrightError:
            continue
        assert math.isfinite(value)
        assert value >= 0


def test_the_error_for_a_bad_unit_lists_the_units_and_suggests_one() -> None:
    with pytest.raises(MeshwrightError) as caught:
        units.parse_bytes("80Gib")
    assert caught.value.code == "MW-UNIT-002"
    assert "GiB" in caught.value.valid
    assert caught.value.fix in ("80GiB", "80Gibit")


@pytest.mark.parametrize("text", ["", "GiB", "1e400GB", "-3GB", "1 2", "9" * 1000, "٣GB"])
def test_refused(text) -> None:
    with pytest.raises(MeshwrightError):
        units.parse_bytes(text)


@pytest.mark.parametrize("text", ["1,5GB", "1,50GB", "12,34", "1,2345KiB", "1,02,400", "1,", ",5GB", "0,5"])
def test_an_ambiguous_comma_is_refused(text) -> None:
    """1,5GB was read as 15 GB."""
    with pytest.raises(MeshwrightError, match="MW-UNIT-00"):
        units.parse_bytes(text)


def test_a_comma_groups_digits_by_three() -> None:
    assert units.parse_bytes("1,024KiB") == 2**20
    assert units.parse_bytes("12,345,678") == 12345678
    with pytest.raises(MeshwrightError) as refused:
        units.parse_bytes("1,5GB")
    assert "decimals follow a point" in refused.value.why
    assert units.parse_bytes(refused.value.fix) == 1.5e9
