"""Chat templates of tokenizers: text and tokens are those of Transformers, exactly the answers are learned, and a hostile template ends."""

import json
import time

import pytest

from chat_tokenizer import CHAT, trained_tokenizer
from meshwright.errors import MeshwrightError
from meshwright.training.data.prepare import own_template
from meshwright.training.data.prepare.chat import learned_tokens
from meshwright.training.data.prepare.run import prepare
from meshwright.training.data.token_file import open_tokens
from meshwright.training.data.tokenizer import FileTokenizer

DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]
CALLS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"]
SYSTEM = {"role": "system", "content": "Answer briefly."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "<é>"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds & more", "parameters": {}}}]
USED = [
    CHAT[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "name": "add"},
    {"role": "assistant", "content": "It is 4."},
]
THOUGHT = [CHAT[0], {"role": "assistant", "content": "<think>\nTwo\n</think>\n\n4"}, CHAT[2], {**CHAT[3]}]
LESS = [CHAT[0], {"role": "assistant", "content": "<th>a"}]
# In the manner of public templates, in our words.
CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA = """{{- bos_token }}{%- if not day is defined %}{%- set day = strftime_now('%d %b %Y') %}{%- endif %}
{%- if messages[0].role == 'system' %}{%- set rules = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set rules = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + day + '\n\n' + rules + '<|eot_id|>' }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""
GEMMA = """{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
QWEN = """{%- if tools %}{{- '<|im_start|>system\n# Tools' }}{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(last=messages | length - 1, open=true) %}
{%- for m in messages[::-1] %}{%- if ns.open and m.role == 'user' %}{%- set ns.open = false %}
    {%- set ns.last = messages | length - loop.index %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}{%- continue %}{%- endif %}
    {%- set content, thought = m.content or '', '' %}
    {%- if m.role == 'assistant' and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.last %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}
    {{- content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>\n' + {"name": call.function.name, "arguments": call.function.arguments} | tojson + '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
R1 = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% else %}
{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""
TAGGED = """{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\n' }}
{%- generation %}{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ '<|user|>\n' + m.content + '\n' }}{% endif %}{% endfor %}"""
PLAIN = """{% for m in messages %}{{ m.role | capitalize + ': ' + m.content | trim + '\n' }}{% endfor %}
{%- if add_generation_prompt %}Assistant: {% endif %}"""
PARTS = """{% macro text(content) %}
{%- if content is string %}{{ content }}{% else %}{% for part in content %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ text(m.content) ~ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
IN_PARTS = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in CHAT]
ANSWERS = [m["content"] for m in CHAT[1::2]]
ENDED = [text + "<|im_end|>" for text in ANSWERS]
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "<é>"}}\n</tool_call>'
# Template, special tokens, conversation, tools, learned texts.
CASES = {
    "chatml": (CHATML, {}, [SYSTEM, *CHAT], None, ENDED),
    "llama": (LLAMA, {"bos_token": "<|begin_of_text|>"}, [SYSTEM, *CHAT], None, ["It is 4.<|eot_id|>", "8, of course<|eot_id|>"]),
    "mistral": (MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"}, CHAT, None, [f" {text}</s>" for text in ANSWERS]),
    "gemma": (GEMMA, {"bos_token": "<bos>"}, CHAT, None, ["It is 4.<end_of_turn>", "8, of course<end_of_turn>"]),
    "qwen": (QWEN, {}, CHAT, None, [ENDED[0], f"<think>\n\n</think>\n\n{ENDED[1]}"]),
    "qwen, tools": (QWEN, {}, USED, TOOLS, [f"<think>\n\n</think>\n\n{CALLED}<|im_end|>", "<think>\n\n</think>\n\nIt is 4.<|im_end|>"]),
    "qwen, thoughts": (QWEN, {}, THOUGHT, None, ["4<|im_end|>", f"<think>\n\n</think>\n\n{ENDED[1]}"]),
    "deepseek": (R1, {"bos_token": DEEPSEEK[0], "eos_token": DEEPSEEK[3]}, THOUGHT, None, [f"{t}{DEEPSEEK[3]}" for t in ("\n\n4", ANSWERS[1])]),
    "deepseek, < first": (R1, {"bos_token": DEEPSEEK[0], "eos_token": DEEPSEEK[3]}, LESS, None, [f"<th>a{DEEPSEEK[3]}"]),
    "tagged": (TAGGED, {"bos_token": "<s>", "eos_token": "</s>"}, CHAT, None, [f"{text}</s>" for text in ANSWERS]),
    "plain": (PLAIN, {}, CHAT, None, ["It is 4.\n", "8, of course\n"]),
    "parts": (PARTS, {}, IN_PARTS, None, ENDED),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    trained_tokenizer(path / "tokenizer.json", "bytes", [*DEEPSEEK, *CALLS])
    return path


@pytest.fixture
def with_template(folder):
    """The tokenizer with a template in its folder."""

    def write(template, **variables):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **variables}))
        return str(folder / "tokenizer.json")

    return write


def rows(path, *found):
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def refused(tokenizer, source, out, code, template="tokenizer", **options):
    with pytest.raises(MeshwrightError) as error:
        prepare([source], out, tokenizer, template=template, workers=1, **options)
    assert error.value.code == code, error.value
    assert not out.exists()
    return str(error.value)


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers_and_answers_are_learned(with_template, tmp_path, name):
    from transformers import PreTrainedTokenizerFast

    template, variables, chat, tools, answers = CASES[name]
    named = {k: {"content": v} for k, v in variables.items()} if name == "llama" else variables
    tokenizer = with_template(template, **named)
    oracle = PreTrainedTokenizerFast(tokenizer_file=tokenizer, **variables)
    options = {"chat_template": template, "tools": tools}
    expected = oracle.apply_chat_template(
        chat, tokenize=True, return_dict=True, return_assistant_tokens_mask="generation" in template, **options
    )
    row = {"messages": chat, "tools": json.dumps(tools) if tools else None}
    prepare([rows(tmp_path / "a.jsonl", row)], tmp_path / "out", tokenizer, template="tokenizer", workers=1)
    file = open_tokens(tmp_path / "out")
    assert file.tokens.tolist() == expected["input_ids"]
    if "assistant_masks" in expected and name == "tagged":
        assert file.learned.tolist() == expected["assistant_masks"]
    text = oracle.apply_chat_template(chat, tokenize=False, **options)
    ((_, offsets),) = FileTokenizer(tokenizer).encode_with_offsets([text])
    spans, end = [], 0
    for answer in answers:
        start = text.index(answer, end)
        spans.append((start, end := start + len(answer)))
    assert file.learned.tolist() == learned_tokens(offsets, spans).tolist()


def test_a_table_has_no_null_fields_in_a_template(with_template, tmp_path):
    import pyarrow
    import pyarrow.parquet

    tokenizer = with_template(QWEN.replace("m.tool_calls or []", "(m.tool_calls if 'tool_calls' in m else [])"))
    found = [{"messages": USED, "tools": json.dumps(TOOLS)}, {"messages": CHAT, "tools": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(found), tmp_path / "a.parquet")
    rows(tmp_path / "a.jsonl", *found)
    for name in ("a.parquet", "a.jsonl"):
        prepare([tmp_path / name], tmp_path / f"{name}.out", tokenizer, template="tokenizer", workers=1)
    for array in ("tokens.bin", "learned.bin"):
        assert (tmp_path / "a.parquet.out" / array).read_bytes() == (tmp_path / "a.jsonl.out" / array).read_bytes()


def test_a_file_or_a_named_template_or_a_jinja_file_is_found(with_template, folder, tmp_path):
    source, outs = rows(tmp_path / "a.jsonl", {"prompt": "Hi", "completion": "Ho"}), []
    rows(tmp_path / "t.jsonl", {"messages": CHAT, "tools": TOOLS})

    def made(source, template="tokenizer"):
        outs.append(tmp_path / f"out-{len(outs)}")
        prepare([source], outs[-1], str(folder / "tokenizer.json"), template=template, workers=1)
        return (outs[-1] / "tokens.bin").read_bytes()

    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": PLAIN}]
    with_template(named)
    default, tools = made(source), made(tmp_path / "t.jsonl")
    (tmp_path / "b.jinja").write_text(PLAIN)
    assert made(tmp_path / "t.jsonl", str(tmp_path / "b.jinja")) == tools != made(tmp_path / "a.jsonl")
    with_template(PLAIN)
    (folder / "chat_template.jinja").write_text(CHATML)
    try:
        assert made(source) == default
    finally:
        (folder / "chat_template.jinja").unlink()


def test_the_date_is_an_option_of_the_preparation(with_template, tmp_path):
    source, tokenizer = rows(tmp_path / "a.jsonl", {"messages": CHAT}), with_template(LLAMA, bos_token="<s>")
    options = {"template": "tokenizer", "workers": 1}
    header = prepare([source], tmp_path / "out", tokenizer, date="2024-07-26", **options)
    file = open_tokens(tmp_path / "out")
    assert "Today: 26 Jul 2024" in FileTokenizer(tokenizer).decode(file.tokens)
    assert header.options["date"] == "2024-07-26"
    assert prepare([source], tmp_path / "out", tokenizer, date="2024-07-26", **options) == header
    with pytest.raises(MeshwrightError, match="MW-DATA-015"):
        prepare([source], tmp_path / "out", tokenizer, date="2024-07-27", **options)
    new = tmp_path / "new"
    assert "is not a date" in refused(tokenizer, source, new, "MW-DATA-018", date="tomorrow")
    assert "no effect" in refused(tokenizer, source, new, "MW-DATA-018", "chatml", date="2024-07-26")
    tokenizer = with_template(CHATML)
    assert "no effect" in refused(tokenizer, source, new, "MW-DATA-018", date="2024-07-26")


HOSTILE = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "more than 1 s",
    "{{ 'a' * 10 ** 10 }}": "MemoryError",
    "{{ 10 ** (10 ** 10) }}": "",  # out of time, or of memory
    "{{ 'a' * (messages | length * 2 ** 24) }}": "more than 16,777,216 characters",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe",
    "{{ cycler.__init__.__globals__ }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{% for a in range(10 ** 9) %}{% endfor %}": "Range too big",
    "{% for": "",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "recursion",
}


@pytest.mark.parametrize("template", HOSTILE)
def test_a_hostile_template_is_an_error_in_bounded_time(with_template, tmp_path, monkeypatch, template):
    monkeypatch.setattr(own_template, "SECONDS", 1.0)
    began = time.monotonic()
    source = rows(tmp_path / "a.jsonl", {"messages": CHAT})
    text = refused(with_template(template), source, tmp_path / "out", "MW-DATA-018")
    assert HOSTILE[template] in text
    assert "Fix: --template chatml" in text
    assert time.monotonic() - began < 30


def test_a_row_that_a_template_does_not_fit_is_named(with_template, tmp_path):
    out, tokenizer = tmp_path / "out", with_template(MISTRAL, bos_token="<s>", eos_token="</s>")
    source = rows(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": [CHAT[0], *CHAT]})
    text = refused(tokenizer, source, out, "MW-DATA-019")
    assert "a.jsonl:2" in text
    assert "roles must alternate" in text
    for row, words in (
        ({"messages": [CHAT[0]]}, "no assistant turn"),
        ({"messages": ["x"]}, "turn 1 has no role"),
        ({"messages": CHAT, "tools": 3}, "tools is a number"),
    ):
        assert words in refused(tokenizer, rows(source, row), out, "MW-DATA-019")
    # The system's text stands in the last user's turn, so no turn but the last has a place of its own.
    moving = "{% for m in messages %}{{ m.role + ('!' if loop.revindex == 2 else ':') + m.content + '\n' }}{% endfor %}"
    text = refused(with_template(moving), rows(source, {"messages": CHAT}), out, "MW-DATA-019")
    assert "{% generation %}" in text
    prepare([source], out, tokenizer, template="tokenizer", learn="all", workers=1)
    assert open_tokens(out).learned.all()


def test_marks_in_a_conversation_do_not_change_what_is_learned(with_template, tmp_path):
    tokenizer = with_template(TAGGED, bos_token="<s>", eos_token="</s>")
    chat = [{"role": "user", "content": "\ufdd0all of this\ufdd1"}, CHAT[1]]
    source = rows(tmp_path / "a.jsonl", {"messages": chat})
    assert "U+FDD0" in refused(tokenizer, source, tmp_path / "out", "MW-DATA-019")


def test_a_tokenizer_without_a_template_is_refused(with_template, folder, tmp_path):
    source = rows(tmp_path / "a.jsonl", {"messages": CHAT})
    for config, words in (
        (None, "no chat template"),
        (3, "is not a template"),
        ([{"name": "rag", "template": "x"}], "no chat"),
    ):
        assert words in refused(with_template(config), source, tmp_path / "out", "MW-DATA-018")
    assert "no chat template" in refused("bytes", source, tmp_path / "out", "MW-DATA-018")
    (folder / "tokenizer_config.json").write_text("[1]")
    text = refused(str(folder / "tokenizer.json"), source, tmp_path / "out", "MW-DATA-018")
    assert "not a JSON object" in text
    refused("bytes", source, tmp_path / "out", "MW-CONF-004", str(tmp_path / "missing.jinja"))
