"""What the campaign does to tokenizers: each is read as its tokenizer.json says, unless transformers refuses it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from damage import Problem, Trial
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from exgrpo_orlhf.io import tokenizer_file

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_end|>")
PIECES = (*"abcXYZßÀ 0123456789\n\t.,+=()é汉ﬁ½▁'", "  ", "is", "e\u0301", "\u00a0", "CamelCase", "<think>", *SPECIAL)
TYPES = ("llama", "gemma", "gemma2", "gpt2", "gpt_neox", "mistral", "phi3", "qwen2", "qwen3", "t5")
CLASSES = (
    *(None, "PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizerFast", "GPT2Tokenizer"),
    *("GPTNeoXTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "CodeLlamaTokenizerFast", "T5TokenizerFast"),
)
NORMALISERS = {
    **{type(one).__name__: one for one in (normalizers.NFC(), normalizers.NFKC(), normalizers.Lowercase())},
    **{type(one).__name__: one for one in (normalizers.Strip(), normalizers.StripAccents())},
    "marks": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "none": None,
}
SPLITTERS = {
    **{f"bytes{i}": pre_tokenizers.ByteLevel(add_prefix_space=i == 1, use_regex=i < 2) for i in range(3)},
    **{f"marks, {when}": pre_tokenizers.Metaspace(prepend_scheme=when) for when in ("always", "first", "never")},
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "words": pre_tokenizers.Whitespace(),
}
DECODERS = {
    **{"bytes": decoders.ByteLevel(), "marks": decoders.Metaspace(), "words": decoders.WordPiece(), "none": None},
    "fallback": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
}


def tokenizer_trials(folder: Path, rng: random.Random, count: int) -> Iterator[tuple[str, str, Trial]]:
    """Kind of damage, what is damaged, and the trial."""
    parts = {"class": CLASSES, "type": TYPES, "flags": (False, True)}
    parts |= {"normaliser": NORMALISERS, "splitter": SPLITTERS, "decoder": DECODERS}
    for _ in range(count):
        drawn = {name: rng.choice([*of]) for name, of in parts.items()}
        texts = ["".join(rng.choices(PIECES, k=30)) for _ in range(50)]
        yield "tokenizers", json.dumps(drawn), partial(_as_its_file, folder / "tokenizer", drawn, texts)


def _as_its_file(folder: Path, drawn: dict[str, Any], texts: list[str]) -> Problem | None:
    pieces = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, *"▁汉ﬁ½é", "is"]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("i", "s")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = SPLITTERS[drawn["splitter"]]
    if normaliser := NORMALISERS[drawn["normaliser"]]:
        tokenizer.normalizer = normaliser
    if decoder := DECODERS[drawn["decoder"]]:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([*SPECIAL])
    if drawn["flags"]:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        tokenizer.add_tokens([AddedToken("<think>", lstrip=True), AddedToken("CamelCase", single_word=True)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": drawn["class"], "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    (folder / "config.json").write_text(json.dumps({"model_type": drawn["type"]}))
    try:
        read = tokenizer_file.load(folder)
    except Exception as error:  # find_model refuses it in one line; ours alone would refuse what can be read
        try:
            AutoTokenizer.from_pretrained(folder)
        except Exception:  # of transformers or tokenizers, of any class
            return None
        return "lost", repr(error)
    for text in texts:
        ids = tokenizer.encode(text).ids
        if read(text)["input_ids"] != ids or read.decode(ids) != tokenizer.decode(ids, skip_special_tokens=False):
            return "silent", f"{text!r} is read as {read.decode(read(text)['input_ids'])!r}"
    return None
