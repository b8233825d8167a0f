"""A conversation, and small tokenizers with the special tokens of chat templates."""

from meshwright.training.data.prepare.chat import TEMPLATES

CHAT = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4.\n"},
    {"role": "user", "content": "  \nand äé∑ 🙂 doubled "},
    {"role": "assistant", "content": "\n8, of course"},
]
SPECIAL = sorted({text for template in TEMPLATES.values() for text in template.special})


def trained_tokenizer(path, kind, more=()):
    """A tokenizer.json of bytes with merges (as GPT-2's) or of pieces that begin with a mark (as Llama 2's), with all special tokens."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    if kind == "bytes":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.post_processor, made.decoder = processors.ByteLevel(trim_offsets=True), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        alphabet = []
    texts = [turn["content"] for turn in CHAT] + [
        "user\n\nIt is system\n\n\nassistant\n [INST] [/INST] <|user|>model"
    ] * 8
    special = ["<unk>", *SPECIAL, *more]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    made.save(str(path))
    return path
