"""`verify` of a user's own module: the comparison passes, finds planted bugs, and errors in the user's file are one sentence."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional

import ranks  # noqa: F401  preloads what ranks import
from meshwright import api
from meshwright.cli import main
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.proof.user_module import code, prove, step
from meshwright.proof.user_module.job import ModuleJob
from meshwright.training.launch.rank import RankContext

HERE = "test_own_module"
EXAMPLE = Path(__file__).parents[2] / "examples" / "verify_module.py"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 11)

    def hidden(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids):
        return self.head(self.hidden(ids))


class Skipping(Net):
    """The head, in the last pipeline stage, reads the embedding of the first."""

    def forward(self, ids):
        first = x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x * first.tanh())


class BatchNormed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, ids):
        return self.head(self.norm(self.hidden(ids)))


class Centred(Net):
    """Depends on the batch as a whole, in a way that no class shows."""

    def forward(self, ids):
        x = self.hidden(ids)
        return self.head(x - x.mean(0, keepdim=True))


class Counting(Net):
    """Its buffer depends on the batch of a rank, and no gradient does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(()))

    def forward(self, ids):
        self.seen += len(ids)
        return super().forward(ids)


class OwnLoss(Net):
    """Returns its loss, and takes a dictionary."""

    def forward(self, ids, labels):
        return loss(super().forward(ids), labels)


class SingleInside(Net):
    """A part computes in float32 whatever its inputs are, as the norms of many libraries do."""

    def forward(self, ids):
        return self.head(self.hidden(ids).float().square().to(self.head.weight.dtype))


class SingleOnly(Net):
    def forward(self, ids):
        return self.head(self.embed(ids) @ torch.ones(8, 8, dtype=torch.float32))


class Noisy(Net):
    def forward(self, ids):
        return self.head(functional.dropout(self.hidden(ids), 0.1))


class FailsOnRanks(Net):
    def forward(self, ids):
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            raise RuntimeError("not on ranks")
        return super().forward(ids)


def drifting(drift=[0.0]):  # noqa: B006
    drift[0] += 1.0
    module = Net()
    module.head.bias.data += drift[0]
    return module


def raises():
    raise ValueError("no weights here\nsecond line")


def number():
    return 3


def example(seed):
    ids = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(seed))
    return ids, ids.roll(-1, 1)


def labelled(seed):
    ids, targets = example(seed)
    return {"ids": ids, "labels": targets}


def loss(output, targets):
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def loss_of_one(output):
    return output.mean()


PARTS = ("embed", "head", "blocks.*.norm")
SPLIT = [("blocks.*.up", "column"), ("blocks.*.down", "row"), *((name, "replicated") for name in PARTS)]
TWO_REGIONS = [("blocks.*.up", "region"), ("blocks.*.up", "region"), *SPLIT]  # sums the gradient of the norm twice


def proof_of(make, plan, steps=2, **given):
    return prove.prove_module(make, plan, **{"example": example, "loss": loss, **given}, steps=steps)


def test_a_script_is_proved_from_the_command_line(tmp_path, capsys):
    out = tmp_path / "proof.json"
    plan = tmp_path / "plan.toml"
    plan.write_text("[plan]\nreplicate = 2\ntp = 2\nmicrobatch = 2\nparam_dtype = 'bf16'\n")
    words = ["verify", f"{EXAMPLE}:make", "--plan", str(plan), "--steps", "2", "--device", "cpu", "--out", str(out)]
    with pytest.raises(SystemExit) as leaving:
        main([*words, "--json"])
    assert not leaving.value.code
    reported = json.loads(capsys.readouterr().out)
    assert reported == json.loads(out.read_text())
    assert (reported["passed"], reported["ranks"], reported["steps"]) == (True, 4, 2)
    assert reported["errors"]["fp64"]["gradient"] < 1e-13
    assert "in float64 instead of bf16" in reported["changes"]


@pytest.mark.parametrize(
    ("make", "plan", "given"),
    [
        (OwnLoss, {"shard": 2, "zero": 3, "microbatch": 1}, {"example": labelled, "loss": None}),
        (f"{HERE}:Skipping", {"pp": 2, "microbatch": 1}, {"layers": "blocks"}),
    ],
    ids=["zero3", "pipeline with a skip"],
)
def test_two_ranks_equal_one_device(make, plan, given):
    proof = proof_of(make, plan, **given)
    assert proof.passed, str(proof)
    assert max(proof.agreements[0].errors.values()) < 1e-13
    assert "not compared" in str(proof)


def test_a_planted_bug_is_named():
    proof = proof_of(Net, {"tp": 2}, table=TWO_REGIONS)
    first = proof.as_dict()["first_break"]
    assert not proof.passed
    assert (first["axis"], first["what"], first["step"]) == ("tp", "gradient", 0)
    assert re.search(r"blocks\.1\.norm", first["name"])
    assert "Net of" in str(proof)


def test_batch_statistics_without_the_check_are_named():
    with pytest.raises(MeshwrightError, match="batch"):
        proof_of(Centred, {"replicate": 2})
    proof = proof_of(Centred, {"replicate": 2}, check=False)
    first = proof.as_dict()["first_break"]
    assert (proof.passed, first["axis"], first["what"], first["step"]) == (False, "replicate", "loss", 0)


def test_batch_statistics_are_those_of_one_device():
    assert proof_of(BatchNormed, {"replicate": 2}).passed


def test_a_difference_in_the_last_step_has_a_meaning():
    """What differs is the change of a buffer since the step before, or since the start."""
    proof = proof_of(Counting, {"replicate": 2}, steps=1, check=False)
    assert str(proof.decisive.diagnosis) == "update: a factor, × 0.5 = 1/dp"


def test_what_parallelize_refuses_is_one_sentence():
    with pytest.raises(MeshwrightError, match=r"MW-TP-011: 'blocks\.0\.up' is split by columns.*Fix: a row"):
        proof_of(Net, {"tp": 2}, table=SPLIT)


def test_what_raises_on_ranks_only_is_one_sentence():
    with pytest.raises(MeshwrightError, match=r"MW-VERIFY-006.*not on ranks \(test_own_module.py, line \d+\)"):
        proof_of(FailsOnRanks, {"replicate": 2})


def test_a_part_in_float32_widens_the_bound(one_device):
    reference = one_device(make=SingleInside)
    assert reference.single is not None
    assert "float32 inside SingleInside" in reference.notes[0]
    assert one_device(make=Net).single is None


@pytest.fixture
def one_device():
    """The reference in this process."""
    before = torch.get_default_dtype()
    context = RankContext(0, 1, "cpu", lambda message: None)

    def run(**changes):
        given = {"name": "make", "make": Net, "example": example, "loss": loss, "table": None, "plan": Plan()}
        return step.record_one_device(context, ModuleJob(**{**given, **changes}, steps=1))

    yield run
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"make": 3}, "make is a value of type int, not a function"),
        (
            {"make": raises},
            r"make\(\) raises ValueError: no weights here \(test_own_module.py, line \d+\)\. Fix: def make",
        ),
        ({"make": number}, r"make\(\) returns a value of type int, not an nn.Module"),
        ({"make": partial(nn.Flatten)}, "without trainable parameters"),
        ({"make": drifting}, r"make\(\) returns other weights when it is called again: 'head.bias'"),
        ({"make": SingleOnly}, r"in float64 raises RuntimeError: expected m1 and m2 .*line \d+\)"),
        ({"make": Noisy}, "draws random numbers: the output of head differs"),
        ({"example": None}, "there is no example"),
        ({"example": torch.zeros(4, 5).long()}, "example is a value of type Tensor, and there is a loss"),
        ({"example": (1, 2)}, "without a tensor"),
        ({"example": raises}, r"example\(seed\) raises TypeError"),
        ({"loss": loss_of_one}, r"loss\(output, targets\) raises TypeError.*Fix: def loss"),
        ({"loss": 1}, "loss is a value of type int"),
        ({"loss": None}, r"MW-VERIFY-005.*raises TypeError|MW-OWN-003"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:24],
)
def test_mistakes_of_the_user_are_one_sentence(changes, words, one_device):
    with pytest.raises(MeshwrightError, match=words):
        one_device(**changes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def make(: pass", r"raises SyntaxError: .* \(mine.py, line 1\)"),
        ("\nimport nothing_of_this_name", r"raises ModuleNotFoundError: .* \(mine.py, line 2\)"),
        ("raise SystemExit(3)", "raises SystemExit: 3"),
        ("def made(): ...", "'mine.py' has no 'make'. Valid: made. Fix: mine.py:made"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(text, words, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    monkeypatch.delitem(__import__("sys").modules, "meshwright_user_mine", raising=False)
    with pytest.raises(MeshwrightError, match=words):
        code.load(code.named(f"{tmp_path}/mine.py:make"))


def test_what_another_process_cannot_import_is_refused_before_any_starts():
    def inside():
        return Net()

    for make in (inside, lambda: Net(), partial(inside)):
        with pytest.raises(MeshwrightError, match="make= cannot be sent to another process"):
            proof_of(make, {"replicate": 2})
    with pytest.raises(MeshwrightError, match="loss= cannot be sent"):
        proof_of(Net, {"replicate": 2}, loss=lambda output, targets: output)
    with pytest.raises(MeshwrightError, match="Net is a module, not a function"):
        proof_of(Net(), {"replicate": 2})
    for place, words in (
        ("mine.py", "Fix: mine.py:make"),
        ("absent.py:make", "no file 'absent.py'"),
        ("a b", "script.py:make"),
    ):
        with pytest.raises(MeshwrightError, match=words):
            proof_of(place, {"replicate": 2})
    with pytest.raises(MeshwrightError, match="there is no plan"):
        proof_of(Net, None)
    with pytest.raises(MeshwrightError, match=r"'--set model\.layers=2' has no effect"):
        proof_of(Net, {"replicate": 2}, settings=["model.layers=2"])
    for lossy in ({"compression": "top-k"}, {"comm_dtype": "bf16"}, {"param_dtype": "fp8"}):
        ((name, value),) = lossy.items()
        with pytest.raises(MeshwrightError, match=rf"MW-VERIFY-002: plan\.{name}={value} cannot be proved"):
            proof_of(Net, {"replicate": 2, **lossy})
    assert code.load(code.sendable(partial(loss, targets=1), "loss")).keywords == {"targets": 1}
    assert code.load(code.sendable(functional.cross_entropy, "loss")) is functional.cross_entropy


def test_options_without_an_effect_are_refused(tmp_path, capsys):
    (tmp_path / "plan.toml").write_text("[plan]\ntp = 2\n")
    for words in (["plan.toml", "--loss", "mine"], [f"{EXAMPLE}:make", "--plan", "plan.toml", "--gpus", "8"]):
        with pytest.raises(SystemExit) as leaving:
            main(["verify", *words])
        assert leaving.value.code == 2
        assert "has no effect here" in capsys.readouterr().err
    with pytest.raises(MeshwrightError, match=r"MW-VERIFY-002: whole has no effect here: your module has no run file"):
        api.verify(f"{EXAMPLE}:make", plan=Plan(tp=2), whole=True)
