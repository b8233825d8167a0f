"""`--tokens chinchilla`: the compute-optimal tokens of the model, with the predicted loss and its source among what is assumed."""

import pytest

import meshwright as mw
from meshwright.errors import MeshwrightError


def test_the_budget_is_the_compute_optimal_one() -> None:
    result = mw.estimate("llama2-7b", "dgx-h100", tokens="chinchilla", plan={"shard": 8, "zero": 3}, batch=64)
    n = result.model.total
    assert result.workload.tokens == round(mw.formulas.optimal_tokens(n))
    (words,) = [words for words in result.prediction.assumed if words.startswith("tokens:")]
    assert f"predicted loss {mw.formulas.chinchilla_loss(n, result.workload.tokens):.3f} nats" in words
    assert "arXiv 2404.10102" in words


def test_a_search_says_it_too_and_counts_the_days() -> None:
    result = mw.plan("gpt2-xl", "dgx-h100", gpus=2, tokens="Chinchilla", batch=64, seq=1024, common=True)
    tokens = result.config.workload.tokens
    assert tokens == round(mw.formulas.optimal_tokens(result.config.model.total))
    assert any("arXiv 2404.10102" in words for words in result.explanation.assumed)
    assert "compute-optimal" in str(result)


def test_experts_count_with_the_active_parameters() -> None:
    config = mw.load("mixtral-8x7b", cluster="dgx-h100", tokens="chinchilla")
    assert config.workload.tokens == round(mw.formulas.optimal_tokens(config.model.active))
    assert any("active parameters" in words and "dense" in words for words in config.assumed)


def test_models_without_a_law_and_misspelt_words_are_refused() -> None:
    with pytest.raises(MeshwrightError, match="MW-LAW-001"):
        mw.load("resnet-50", cluster="dgx-h100", tokens="chinchilla")
    with pytest.raises(MeshwrightError, match="MW-UNIT"):
        mw.load("llama2-7b", cluster="dgx-h100", tokens="chinchila")
