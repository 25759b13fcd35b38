"""The seed of one response: it does not change when other questions or samples are asked for too."""

from __future__ import annotations

import hashlib


def response_seed(seed: int, benchmark: str, row: int, question: str, sample: int) -> int:
    """Below 2^63. question: its id"""
    name = f"{seed} {benchmark} {row} {question} {sample}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1
