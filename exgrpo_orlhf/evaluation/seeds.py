"""The seed of one response. It does not depend on which other questions or samples are evaluated."""

from __future__ import annotations

import hashlib


def response_seed(seed: int, benchmark: str, row: int, question: str, sample: int) -> int:
    """An integer below 2^63. question: the question's id"""
    name = f"{seed} {benchmark} {row} {question} {sample}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1
