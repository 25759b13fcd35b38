#!/usr/bin/env python
"""Make the folder of a checkpoint as it goes to the Hugging Face hub, and send it.

    python scripts/publish.py runs/x/checkpoint-120 --out published/x --license apache-2.0
    python scripts/publish.py runs/x/checkpoint-120 --out published/x --push owner/name      # a private repository

The folder has the weights (of LoRA the merged ones, and the adapter where its base model is on the hub), the tokenizer,
config.gin and README.md: a card with method, recipe, data, buffer, versions and the run's own metrics. Absolute paths
keep only their last part. What the card cannot say is named. Nothing is overwritten, neither a folder nor a repository
with files. Exit status: 0, 1 if the folder is made and was not sent, 2 for a checkpoint that cannot be published.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

from exgrpo_orlhf.io import terminal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint of a run: runs/x/checkpoint-120, or runs/x/best")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="the folder, which must not exist yet"
    )
    parser.add_argument("--license", metavar="ID", help="as the hub names it, such as apache-2.0 (default: not stated)")
    parser.add_argument("--push", type=_repository, metavar="OWNER/NAME", help="the repository that it is sent to")
    parser.add_argument("--public", action="store_true", help="make a new repository public")
    arguments = parser.parse_args()
    terminal.messages()
    from exgrpo_orlhf.checkpoints.manifest import ManifestError

    try:
        if arguments.license and not re.fullmatch(r"[a-z0-9.+-]+", arguments.license):
            raise ValueError(f"--license takes the hub's id, such as apache-2.0; got {arguments.license!r}")
        missing = make_folder(arguments.checkpoint.resolve(), arguments.out, arguments.license)
    except (ManifestError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join([f"{arguments.out}:", *sorted(f"  {path.name}" for path in arguments.out.iterdir())]))
    for text in missing:
        print(f"missing: {text}")
    if not arguments.push:
        return 0
    try:
        print(push(arguments.out, arguments.push, private=not arguments.public))
    except Exception as error:  # of the network, of the hub, of its client
        more = "" if arguments.public else " --private"
        print(
            f"error: not sent: {' '.join(str(error).split())[:400]}\nThe folder is complete. Where there is a network: "
            f"hf auth login, then hf upload{more} {arguments.push} {arguments.out} .",
            file=sys.stderr,
        )
        return 1
    return 0


def make_folder(checkpoint: Path, out: Path, license_id: str | None) -> list[str]:
    """Makes the folder `out` whole or not at all. Returns what it lacks. Raises OSError, ValueError, ManifestError."""
    from exgrpo_orlhf.checkpoints import manifest
    from exgrpo_orlhf.engines import lora
    from exgrpo_orlhf.evaluation.model_card import card, is_hub_id, without_folders

    if out.exists():
        raise FileExistsError(f"{out} exists; name another folder with --out, or remove it")
    text, missing = card(checkpoint, license_id)
    manifest.verify_model(checkpoint)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".unfinished-") as temporary:
        unfinished = Path(temporary) / out.name
        unfinished.mkdir()
        for file in checkpoint.iterdir():
            if file.is_file() and file.name != manifest.NAME:
                shutil.copyfile(file, unfinished / file.name)
        if (adapter := checkpoint / lora.FOLDER).is_dir():
            manifest.verify_model(checkpoint, lora.FOLDER)
            base = json.loads((adapter / lora.CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
            if is_hub_id(base, checkpoint):
                (unfinished / lora.FOLDER).mkdir()
                for name in (lora.CONFIG, lora.WEIGHTS):
                    shutil.copyfile(adapter / name, unfinished / lora.FOLDER / name)
            else:
                missing.append(f"{lora.FOLDER}/: its base model {Path(base).name} is not on the hub")
        if (config := checkpoint.parent / "config.gin").is_file():
            (unfinished / config.name).write_text(without_folders(config.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            missing.append(f"config.gin: {config} is not there")
        (unfinished / "README.md").write_text(text, encoding="utf-8")
        unfinished.rename(out)
    return missing


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Sends a folder, in one commit. Returns its address. Raises FileExistsError for a repository that has files, and
    what the hub's client raises."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repository, private=private, exist_ok=True)
    if files := {*api.list_repo_files(repository)} - {".gitattributes"}:
        raise FileExistsError(f"{repository} has files already ({min(files)}); name another repository")
    return str(api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"{folder.name}"))


def _repository(text: str) -> str:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if "/" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not OWNER/NAME")
    return text


if __name__ == "__main__":
    sys.exit(main())
