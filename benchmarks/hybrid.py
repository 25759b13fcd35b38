"""Which architectures may be packed: log-probs of rows in one pass against those of each row alone, on random models.

For each architecture of transformers a model of a few layers, one of each kind: its packed rows (one after another,
told apart by positions that restart, as the OpenRLHF actor packs them) and its padded rows, in float32, and what the
actor says at its start, in bfloat16. Logits that are more than the output layer's are refused by both engines.

Goal: packing is refused for every architecture whose rows it mixes by more than 0.001 nats and for no other, and padded
rows are right. Takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import transformers
from command_line import finish, make_parser
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from exgrpo_orlhf.engines.model import changes_logits, mixing_of_rows
from exgrpo_orlhf.engines.rows import ForwardRow, padded, probe_rows
from exgrpo_orlhf.records import Measured
from exgrpo_orlhf.sampling.batch import check_rows

LIMIT = 1e-3  # nats
BASE: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
BASE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
BASE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LINEAR: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
LINEAR |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
ZAMBA = {"n_mamba_heads": 8, "mamba_headdim": 16, "mamba_d_state": 16, "mamba_ngroups": 1, "attention_head_dim": 32}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "n_routed_experts": 4}
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8, "use_mamba_kernels": False}
GRIFFIN = {"lru_width": 64, "attention_window_size": 8, "block_types": ["recurrent", "attention"]}
XLSTM = {"num_blocks": 2, "num_heads": 4, "sequence_kernel": "native_sequence__native", "step_kernel": "native"}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Llama": {},
    "Gemma3Text": SLIDING,
    "GptOss": {**SLIDING, **EXPERTS},  # attention: eager, which ignores positions
    "OlmoHybrid": LINEAR,
    "Qwen3Next": {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 64},
    "Qwen3_5Text": LINEAR,
    "Bamba": {**MAMBA, "attn_layer_indices": [1]},
    "MiniMax": {**EXPERTS, "layer_types": LINEAR["layer_types"], "block_size": 8},
    "Zamba2": {**ZAMBA, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "use_mem_eff_path": False},
    "GraniteMoeHybrid": {**MAMBA, **EXPERTS, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 64},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "NemotronH": {**NEMOTRON, **EXPERTS, "layers_block_type": ["mamba", "attention", "moe"], "num_hidden_layers": 3},
    "Jamba": {**JAMBA, **EXPERTS},
    "FalconH1": {**MAMBA, "mamba_d_ssm": 128},
    "RecurrentGemma": GRIFFIN,
    "xLSTM": {**XLSTM, "chunkwise_kernel": "chunkwise--native_autograd", "max_inference_chunksize": 64},
}


@torch.no_grad()
def measured(model: PreTrainedModel, rows: Sequence[ForwardRow], packed: bool) -> list[Measured]:
    """The log-probs of each row's response, from one pass over all rows."""
    ids = torch.from_numpy(padded(rows)[0])  # (R, W)
    real = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
    inputs: dict[str, Tensor] = {"input_ids": ids, "position_ids": (real.long().cumsum(1) - 1).clamp(min=0)}
    if packed:
        logits = model(**{name: table[real][None] for name, table in inputs.items()}, use_cache=False).logits[0]
    else:
        logits = model(**inputs, attention_mask=real.long(), use_cache=False).logits[real]
    of_rows = zip(logits.float().log_softmax(1).split([len(row) for row in rows]), rows, strict=True)
    parts = ((part[len(row.prompt) - 1 : -1], torch.from_numpy(row.token_ids).long()) for part, row in of_rows)
    return [Measured(part.gather(1, tokens[:, None])[:, 0].numpy(), 0.0) for part, tokens in parts]


def off(model: PreTrainedModel, packed: bool) -> float:
    """The largest difference of rows in one pass from the same rows alone, nats."""
    rows = [row for step in (7, 5) for row in probe_rows(BASE["vocab_size"], ((2, 10), (4, 5)), step)]
    pairs = zip(measured(model, rows, packed), (measured(model, [row], packed)[0] for row in rows), strict=True)
    return max(float(abs(together.logprobs - alone.logprobs).max()) for together, alone in pairs)


def generation(model: PreTrainedModel) -> str:
    try:
        check_rows(model, 0)
    except ValueError:
        return "refused"
    return "accepted"


def main() -> int:
    arguments = make_parser(__doc__).parse_args()
    transformers.logging.set_verbosity_error()
    figures: dict[str, Any] = {}
    print("| architecture | packed | padded | packing | logits | local generation |\n|---|---|---|---|---|---|")
    for name in ARCHITECTURES:
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**BASE, **ARCHITECTURES[name]})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        packed, beside, local = off(model, True), off(model, False), generation(model)
        logits = "changed: refused" if changes_logits(model) else "accepted"
        mixed = mixing_of_rows(partial(measured, model.bfloat16(), packed=True), BASE["vocab_size"])
        actor = "accepted" if mixed is None else f"refused: {mixed:.2g} nats"
        print(f"| {name} | {packed:.1g} | {beside:.1g} | {actor} | {logits} | {local} |", flush=True)
        right = (packed > LIMIT) == (mixed is not None) and beside < LIMIT
        figures[name] = {"packed": packed, "padded": beside, "refused": mixed is not None, "right": right}
    wrong = [name for name, row in figures.items() if not row["right"]]
    summary = f"of {len(figures)} architectures these are accepted, refused or padded wrongly: {wrong or 'none'}"
    return finish(arguments, {**figures, "wrong": len(wrong), "met": not wrong}, summary)


if __name__ == "__main__":
    sys.exit(main())
