"""Attention and products that are fast on a CPU. Each way gives what torch and transformers give, up to rounding, and
says where it fits; models for which it does not are computed as transformers does.

For a training pass `packing.Packed` (each distinct prompt once), for sampling `shared_prompt.SharedPromptCache` (a
prompt's keys and values once) and `shared_prompt.reserve` (a cache that grows in place), both switched on by
`packing.attention_is`; for large layers `products.product`. This room imports no other.
"""
