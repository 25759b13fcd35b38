"""Tokenizers built to differ, each in the files that a model's folder has."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from exgrpo_orlhf.io.weights import save as save_model

TEXT = ["user\nWhat is 3 + 4?", "def f(x):\n    return x ** 2", "It's 12345 in a naïve café: 汉字 の 3.14"] * 3
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
LETTERS = sorted({*"".join(TEXT), *"abcdefghijklmnopqrstuvwxyz▁"})


def byte_level(*before, normaliser=None, prefix=False) -> Tokenizer:
    """before: pre-tokenizers that come first"""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*before, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not before)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if normaliser:
        tokenizer.normalizer = normaliser
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=310, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def sentencepiece(prepend="first", legacy=False) -> Tokenizer:
    """As Llama 2's, byte fallback included."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, "▁a", "is", "▁is"]))}
    merges = [("▁", "a"), ("i", "s"), ("▁", "is")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    replace = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(replace)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def unigram() -> Tokenizer:
    scores = [(piece, -1.0 - i / 100) for i, piece in enumerate(dict.fromkeys([*SPECIAL, *LETTERS, "▁is", "▁a"]))]
    tokenizer = Tokenizer(models.Unigram(scores, 0, False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def words() -> Tokenizer:
    known = dict.fromkeys([*SPECIAL, *LETTERS, *" ".join(TEXT).split()])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def with_beginning(tokenizer: Tokenizer) -> Tokenizer:
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=ids)
    return tokenizer


def flagged(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", rstrip=True, special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("CamelCase", single_word=True)])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16, pad_token="</s>", pad_id=2)
    return tokenizer


def digits(pattern: str):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


MISREAD = {  # name → (the file, model_type, tokenizer_class): transformers 5.15.0 reads another tokenizer
    "bytes as Llama": (byte_level, "llama", "LlamaTokenizerFast"),
    "bytes as Gemma": (byte_level, "gemma", None),
    "digits in threes": (lambda: byte_level(digits(r"\p{N}{1,3}|[^\p{N}]+")), "qwen2", "PreTrainedTokenizerFast"),
    "not normalised": (lambda: byte_level(digits(r"\p{N}| ?\p{L}+|[^\p{N}\p{L}]+")), "qwen3", "Qwen2Tokenizer"),
    "compatibility forms": (lambda: byte_level(normaliser=normalizers.NFKC()), "gpt2", "GPT2TokenizerFast"),
    "a space before": (lambda: byte_level(prefix=True), "gpt_neox", "GPTNeoXTokenizerFast"),
    "Llama 2's own": (lambda: with_beginning(sentencepiece(legacy=True)), "llama", "LlamaTokenizer"),
    "never a space before": (lambda: sentencepiece("never"), "llama", "LlamaTokenizerFast"),
    "flags of tokens": (lambda: flagged(byte_level()), "qwen2", "Qwen2TokenizerFast"),
    "no space is kept": (words, "qwen2", "PreTrainedTokenizerFast"),
}
READ = {
    "Llama 2's as of now": (lambda: with_beginning(sentencepiece()), "llama", "LlamaTokenizerFast"),
    "bytes": (lambda: with_beginning(flagged(byte_level())), "llama", "PreTrainedTokenizerFast"),
    "pieces": (unigram, "mistral", "PreTrainedTokenizerFast"),
}


def write(folder: Path, tokenizer: Tokenizer, model_type: str, kind: str | None, **config) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n \n", encoding="utf-8")
    config = {**NAMED, "tokenizer_class": kind, **config}
    given = {key: value for key, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(given), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    return folder


def misread_llama(folder: Path) -> Path:
    """A tiny Llama whose prompts begin with <s>, with a byte-level tokenizer that is saved as Llama's."""
    write(folder, with_beginning(byte_level()), "llama", "LlamaTokenizerFast")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=310, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    save_model(LlamaForCausalLM(config), folder)
    return folder
