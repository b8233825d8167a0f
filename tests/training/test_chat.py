"""Conversations: their text, tokens and learned parts are those of Transformers; masks reach the targets; bad rows are refused."""

import json

import numpy as np
import pytest

from chat_tokenizer import CHAT, trained_tokenizer
from meshwright.errors import MeshwrightError
from meshwright.models.loss import IGNORED
from meshwright.training.data.page import contents
from meshwright.training.data.prepare.chat import chat_text, learned_tokens
from meshwright.training.data.prepare.run import prepare
from meshwright.training.data.samples import Sequences
from meshwright.training.data.sources import Documents
from meshwright.training.data.token_file import check_offsets, open_tokens, verify_hashes
from meshwright.training.data.tokenizer import FileTokenizer

SYSTEM = {"role": "system", "content": "Answer briefly."}
# The public templates, reduced to user and assistant turns and, where the template has it, a system turn.
EVERY = "{% for m in messages %}"
JINJA = {
    "chatml": EVERY + "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}",
    "llama3": EVERY + "{% if loop.first %}{{ bos_token }}{% endif %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}",
    "mistral": "{{ bos_token }}" + EVERY + "{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}{% else %}{{ ' ' }}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}" + EVERY + "{% if m.role == 'user' %}{{ '<start_of_turn>user\n' + m.content | trim + '<end_of_turn>\n' }}"
    "{% else %}{{ '<start_of_turn>model\n' }}{% generation %}{{ m.content | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}"
    "{% endif %}{% endfor %}",
    "zephyr": EVERY + "{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content + eos_token }}{% endif %}{{ '\n' }}{% endfor %}",
}  # fmt: skip
BEGIN = {"llama3": "<|begin_of_text|>", "gemma": "<bos>"}


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def tokenizer(request, tmp_path_factory):
    return trained_tokenizer(tmp_path_factory.mktemp(request.param) / "tokenizer.json", request.param)


def rows(path, *found):
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


@pytest.mark.parametrize("name", JINJA)
@pytest.mark.parametrize("system", [False, True])
def test_tokens_and_learned_parts_are_those_of_transformers(tokenizer, tmp_path, name, system):
    from transformers import PreTrainedTokenizerFast

    chat = [SYSTEM, *CHAT] if system else CHAT
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), bos_token=BEGIN.get(name, "<s>"), eos_token="</s>")
    shown = chat
    if system and name in ("mistral", "gemma"):
        shown = [{"role": "user", "content": SYSTEM["content"] + "\n\n" + CHAT[0]["content"]}, *CHAT[1:]]
    expected = oracle.apply_chat_template(
        shown, chat_template=JINJA[name], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    source = rows(tmp_path / "a.jsonl", {"messages": chat, "id": 1}, {"messages": chat})
    header = prepare([source], tmp_path / "out", str(tokenizer), template=name, workers=1)
    file = open_tokens(tmp_path / "out")
    first, end = file.offsets[:2]
    assert file.tokens[first:end].tolist() == expected["input_ids"]
    assert file.learned[first:end].tolist() == expected["assistant_masks"]
    assert (header.documents, header.end_token, header.options) == (2, None, {"template": name, "learn": "assistant"})
    assert 0 < sum(expected["assistant_masks"]) < end


def test_every_form_of_a_conversation_gives_the_same_tokens(tmp_path):
    import pyarrow
    import pyarrow.parquet

    ask, answer = ({"role": r, "content": c} for r, c in (("user", "Add: 1\n\n2"), ("assistant", "3")))
    forms = [
        {"messages": [ask, answer]},
        {"prompt": "Add: 1\n\n2", "completion": "3"},
        {"prompt": [ask], "completion": [answer]},
        {"instruction": "Add: 1", "input": "2", "output": "3"},
    ]
    text, spans = "User: Add: 1\n\n2\nAssistant: 3\n", ((27, 29),)
    for form in forms:
        assert chat_text(form, "row", "plain", "assistant") == (text, spans)
    assert chat_text(forms[0], "row", "plain", "all") == (text, ((0, 29),))
    assert text[27:29] == "3\n"
    folders = []
    for number, form in enumerate(forms):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([form] * 3), tmp_path / f"{number}.parquet")
        for source in (rows(tmp_path / f"{number}.jsonl", *[form] * 3), tmp_path / f"{number}.parquet"):
            out = tmp_path / f"out-{source.name}"
            prepare([source], out, template="plain", end_token="0", workers=1, batch=40)
            folders.append([(out / name).read_bytes() for name in ("tokens.bin", "documents.bin", "learned.bin")])
    assert all(folder == folders[0] for folder in folders)
    tokens, _, learned = folders[0]
    assert tokens == (text.encode() + b"\0") * 3
    assert learned == bytes([0] * 27 + [1] * 3) * 3


@pytest.fixture
def chats(tmp_path):
    random = np.random.default_rng(0)
    found = [{"prompt": "ab" * random.integers(1, 20), "completion": "xyz" * random.integers(1, 9)} for _ in range(40)]
    prepare([rows(tmp_path / "a.jsonl", *found)], tmp_path / "chats", template="plain", end_token="0", workers=1)
    return tmp_path / "chats"


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("validation", [0.0, 0.3])
def test_only_learned_tokens_are_targets(chats, pack, masked, validation):
    from meshwright.proof.windows import windows

    part = Documents(open_tokens(chats), validation)
    sequences = Sequences(part, 16, pack, masked, 256)
    read = [np.stack(sequences[i]) for i in range(sequences.count)]
    assert all(np.array_equal(a, b) for a, b in zip(read, windows(part, 16, pack, masked), strict=True))
    targets = np.concatenate([row[1] for row in read])
    assert set(targets[targets != IGNORED]) == set(b"xyz\n\0")
    assert any((row[1] == IGNORED).all() for row in read)  # a sequence without a target
    if not pack:  # every document is read in full: no learned token is lost
        starts, lengths = part.starts, part.lengths()
        assert (targets != IGNORED).sum() == sum(
            part.file.learned[a : a + n].sum() for a, n in zip(starts, lengths, strict=True)
        )


def test_a_masked_file_is_shown_and_verified(chats):
    verify_hashes(chats)
    shown, file = contents(chats), open_tokens(chats)
    check_offsets(file)
    assert shown["learned_share"] == file.learned.mean()
    damaged = bytearray((chats / "learned.bin").read_bytes())
    damaged[0] ^= 1
    (chats / "learned.bin").write_bytes(damaged)
    with pytest.raises(MeshwrightError, match="MW-DATA-004"):
        verify_hashes(chats)
    (chats / "learned.bin").write_bytes(damaged[:-1])
    with pytest.raises(MeshwrightError, match="MW-DATA-004"):
        open_tokens(chats)
    (chats / "learned.bin").unlink()
    with pytest.raises(MeshwrightError, match="MW-DATA-003"):
        open_tokens(chats)


def test_an_interrupted_preparation_of_conversations_continues(tmp_path, monkeypatch):
    from meshwright.training.data.prepare import run

    source = rows(tmp_path / "a.jsonl", *[{"messages": CHAT[: 2 + 2 * (i % 2)]} for i in range(20)])
    options = {"template": "plain", "workers": 1, "batch": 150}
    prepare([source], tmp_path / "whole", **options)
    plain, calls = run.encode, []

    def interrupted(batch, tokenizer):
        calls.append(batch)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return plain(batch, tokenizer)

    monkeypatch.setattr(run, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "parts", **options)
    with (tmp_path / "parts/partial/learned.bin").open("ab") as file:
        file.write(b"\1\1\1")  # of a batch that was not counted
    prepare([source], tmp_path / "parts", **options)
    names = ("tokens.bin", "documents.bin", "learned.bin", "header.json")
    assert all((tmp_path / "whole" / n).read_bytes() == (tmp_path / "parts" / n).read_bytes() for n in names)


BAD = {
    "has no conversation": {"text": "hello"},
    "is empty": {"messages": []},
    "not a list of turns": {"messages": "hello"},
    "turn 2 has the role 'bot'": {"messages": [CHAT[0], {"role": "bot", "content": "x"}]},
    "turn 1 has the role None": {"messages": ["hello"]},
    "the content of turn 2": {"messages": [CHAT[0], {"role": "assistant", "content": None}]},
    "has no assistant turn": {"messages": [CHAT[0]]},
    "has no": [1],
    "the content of turn 1 is a list": {"instruction": "x", "input": ["y"], "output": "z"},
}


@pytest.mark.parametrize("what", BAD)
def test_a_row_that_is_no_conversation_is_refused_with_its_line(tmp_path, what):
    source = rows(tmp_path / "a.jsonl", {"messages": CHAT}, BAD[what])
    with pytest.raises(MeshwrightError, match=r"MW-DATA-019: .*a\.jsonl:2") as error:
        prepare([source], tmp_path / "out", template="plain", workers=1)
    assert what in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_template_that_does_not_fit_is_refused(tmp_path, tokenizer):
    source = rows(tmp_path / "a.jsonl", {"messages": [CHAT[0], SYSTEM, *CHAT[1:]]})
    for options, said in (
        ({"template": "chatml"}, "MW-DATA-018: the tokenizer 'bytes' has no token <.im_start.>"),
        ({"template": "chatm"}, "MW-DATA-018: .*chatml"),
        ({"template": "plain", "learn": "some"}, "MW-DATA-018"),
        ({"template": "gemma", "tokenizer": str(tokenizer)}, "MW-DATA-019: .*system turn"),
        ({"learn": "all"}, "MW-DATA-018: --learn has no effect"),
        ({}, r"MW-DATA-012: .*no field 'text'[\s\S]*--template"),
        ({"template": "plain", "format": "text"}, "MW-DATA-010"),
    ):
        with pytest.raises(MeshwrightError, match=said):
            prepare([source], tmp_path / "out", workers=1, **options)
    assert FileTokenizer(tokenizer).encode(["<|im_start|>"])[0].size == 1


def test_a_token_with_one_learned_character_is_learned():
    offsets = np.array([[0, 3], [3, 5], [5, 5], [5, 9], [9, 9]])
    assert learned_tokens(offsets, ((4, 5), (8, 9))).tolist() == [0, 1, 0, 1, 0]
