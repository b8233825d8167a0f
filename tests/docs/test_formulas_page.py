"""The page of formulas: it equals the code's output, has every function, and its formulas give its results."""

import math

from formulas_page import PAGE, SECTIONS, functions, markdown, value_of


def test_the_page_equals_the_generated_one() -> None:
    """After a change: make pages"""
    assert PAGE.read_text("utf-8") == markdown()


def test_every_function_has_an_example() -> None:
    calls = " ".join(example.call for _, examples in SECTIONS.values() for example in examples)
    assert {name for name in functions() if f"{name}(" not in calls} == set()


def test_results_by_hand() -> None:
    values = {e.call: value_of(e) for _, examples in SECTIONS.values() for e in examples}
    assert math.isclose(values['ridge("989TFLOP/s", "450GB/s")'], 989e12 / 450e9)
    assert math.isclose(values['bubble_fraction("1f1b", 4, 8)'], 3 / 11)
    assert values['state_memory("7B", ranks=8, stage=3).total'] == 14e9
    assert (
        values["activation_memory(2048, 1, 12288, 96, layers=96)"] == 2048 * 12288 * (34 + 5 * 96 * 2048 / 12288) * 96
    )
    assert values["kv_cache(4096, layers=80, kv_heads=8, head_dim=128)"] == 2 * 8 * 128 * 2 * 4096 * 80
