"""Residual networks: torchvision's count for ResNet-50, Transformers' logits, and the sharding table."""

import math

import pytest
import torch

from meshwright.describe import legality
from meshwright.describe.catalog import load
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.sharding.parameters import parameters
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.models import build, loss_function
from meshwright.models.loss import IGNORED

TINY = Model(name="tiny", kind="counts", layers=3, resnet={"stages": (1, 2), "width": 4, "image": 20, "classes": 10})


@pytest.mark.parametrize("model", [TINY, load("models", "resnet-50")])
def test_the_network_has_the_parameters_of_its_table(model):
    built = {name: tuple(p.shape) for name, p in build(model).named_parameters()}
    assert built == {p.name: p.shape for p in parameters(model, range(model.layers))}
    assert sum(map(math.prod, built.values())) == model.total
    assert model.total == 25_557_032 or model is TINY


def test_numbers_that_the_stages_determine_cannot_be_given():
    with pytest.raises(MeshwrightError, match="MW-MODEL-010"):
        load("models", "resnet-50").but(given_parameters=7e9)


def test_logits_equal_those_of_transformers():
    """With the statistics of the batch, as both compute in training."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[16, 32], depths=[1, 2], num_labels=10)
    theirs = transformers.ResNetForImageClassification(config).double().train()
    ours = build(TINY).to_empty(device="cpu").double()
    kind = {"conv1": "layer.0", "conv2": "layer.1", "conv3": "layer.2", "shortcut": "shortcut"}
    generator = torch.Generator().manual_seed(0)
    for name, parameter in ours.named_parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        part, *rest = name.split(".")
        if part == "head":
            path = "classifier.1." + rest[-1]
        elif part == "stem":
            path = f"resnet.embedder.embedder.{'convolution' if rest[0] == 'conv' else 'normalization'}.{rest[1]}"
        else:
            stage, block = ((0, 0), (1, 0), (1, 1))[int(rest[0])]
            at = {f"norm{i + 1}": place for i, place in enumerate(kind.values())} | kind
            module = "convolution" if rest[1] in kind else "normalization"
            path = f"resnet.encoder.stages.{stage}.layers.{block}.{at[rest[1]]}.{module}.{rest[2]}"
        theirs.get_parameter(path).data.copy_(parameter.data)
    images = torch.randn(3, 3, 20, 20, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(ours(images), theirs(images).logits, rtol=1e-11, atol=1e-11)
    loss = loss_function(TINY)(ours(images), torch.tensor([1, IGNORED, 3]))
    torch.testing.assert_close(
        loss, torch.nn.functional.cross_entropy(ours(images)[::2], torch.tensor([1, 3]), reduction="sum")
    )


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"tp": 2}, "MW-PLAN-009"), ({"cp": 2}, "MW-PLAN-009"), ({"pp": 2}, "MW-PLAN-009"), ({"sp": True}, "MW-PLAN-009"),
     ({"recompute": "selective"}, "MW-PLAN-009"), ({"recompute": "full", "recompute_every": 2}, "MW-PLAN-009")],
)  # fmt: skip
def test_axes_that_divide_nothing_of_it_are_refused(changes, code):
    with pytest.raises(MeshwrightError) as caught:
        legality.check(Plan(**changes), TINY, Workload(batch=8))
    assert caught.value.code == code
    assert "residual network" in str(caught.value)


def test_fp8_is_refused_by_the_trainer():
    with pytest.raises(MeshwrightError, match="MW-BUILD-002"):
        legality.check(Plan(), TINY, Workload(batch=8, precision="fp8"), trainer=True)


def test_a_shape_that_contradicts_itself_is_refused():
    with pytest.raises(MeshwrightError, match=r"--set model.layers=4"):
        TINY.but(resnet={"stages": (2, 2)})
    with pytest.raises(MeshwrightError, match=r"model.resnet.image=16"):
        TINY.but(resnet={"stages": (1, 2), "image": 8})
