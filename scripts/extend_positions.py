#!/usr/bin/env python
"""Copy a model with more positions: for models that were trained with fewer than a run needs.

    python scripts/extend_positions.py Qwen/Qwen2.5-Math-1.5B --out models/Qwen2.5-Math-1.5B-16k

Weights and tokenizer stay as they are; config.json gets another base of the rotary embedding and more positions, by
default those of the ExGRPO paper's models (LUFFY, arXiv 2504.14945). The model reads long texts well only after
training on them. Exit status: 0, or 2 for a model that cannot be copied.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from exgrpo_orlhf.io import terminal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("--out", type=Path, required=True, help="folder of the copy, which must not exist yet")
    parser.add_argument("--positions", type=int, default=16_384, help="max_position_embeddings (default 16384)")
    parser.add_argument(
        "--rope-theta", type=float, default=40_000.0, help="base of the rotary embedding (default 40000)"
    )
    arguments = parser.parse_args()
    terminal.messages()
    try:
        config = extend(arguments.model, arguments.out, arguments.positions, arguments.rope_theta)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.out}: {config['max_position_embeddings']} positions")
    return 0


def extend(model: str, out: Path, positions: int, rope_theta: float) -> dict[str, object]:
    """The copy's configuration. Raises OSError, or ValueError for a model without one rotary embedding or with as many
    positions."""
    if out.exists():
        raise FileExistsError(f"{out} exists; name another folder with --out, or remove it")
    folder = Path(model).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, ignore_patterns=["*.bin", "*.pth", "*.gguf"]))
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    before, rope = config.get("max_position_embeddings"), config.get("rope_parameters") or config
    scaled = config.get("rope_scaling") or rope.get("rope_type", "default") != "default"
    if not isinstance(before, int) or "rope_theta" not in rope or scaled:
        raise ValueError(
            f"{path}: no max_position_embeddings with a plain rope_theta; this model cannot be extended so"
        )
    if before >= positions:
        raise ValueError(f"{path}: the model has {before} positions already; nothing to extend to {positions}")
    config["max_position_embeddings"], rope["rope_theta"] = positions, rope_theta
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".unfinished-") as temporary:
        unfinished = Path(temporary) / out.name
        unfinished.mkdir()
        for file in folder.iterdir():
            if file.is_file():
                shutil.copyfile(file, unfinished / file.name)  # through the links of the hub's cache
        if not any(unfinished.glob("*.safetensors")) and not any(unfinished.glob("pytorch_model*.bin")):
            raise ValueError(f"{model} has no weights that are copied (*.safetensors, or *.bin in a folder)")
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        settings = unfinished / "tokenizer_config.json"
        if settings.is_file():
            tokenizer = json.loads(settings.read_text(encoding="utf-8"))
            tokenizer["model_max_length"] = positions
            settings.write_text(json.dumps(tokenizer, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        unfinished.rename(out)
    return config


if __name__ == "__main__":
    sys.exit(main())
