"""A checkpoint for another number of actors than have saved it, by DeepSpeed's universal format.

Each actor saves its own part of the optimiser's state and of the float32 weights. The universal format has whole
tensors, of which every actor takes what it needs; it is made of a checkpoint when a run is resumed, and not kept.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ...checkpoints import CheckpointError

log = logging.getLogger(__name__)
FOLDER = "universal"  # in the run's folder, from the start of a resumed run until its actors have loaded it


def convert(args: Any, checkpoint: Path, run: Path) -> None:
    """Has OpenRLHF load whole tensors if its actors are more or fewer than those of the checkpoint.

    args: OpenRLHF's, which are changed. Raises CheckpointError if DeepSpeed cannot convert it.
    """
    ranks: int = args.actor.num_nodes * args.actor.num_gpus_per_node
    tag = (checkpoint / "_actor" / "latest").read_text(encoding="utf-8").strip()
    parts, folder = checkpoint / "_actor" / tag, run / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    if (saved := len(list(parts.glob("*_optim_states.pt")))) == ranks:
        return
    log.info("%s was saved by %d actors, and is converted for %d", checkpoint, saved, ranks)
    whole = folder / "_actor"
    whole.mkdir(parents=True)
    for path in checkpoint.iterdir():
        if path.name != "_actor":
            (folder / path.name).symlink_to(path)
    words = ["--input_folder", str(parts), "--output_folder", str(whole / tag), "--inject_missing_state"]
    words += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
        raise CheckpointError(f"{checkpoint} cannot be converted for {ranks} actors instead of {saved}:\n{lines}")
    (whole / "latest_universal").write_text(tag, encoding="utf-8")
    args.ckpt.path, args.ds.use_universal_ckpt = str(folder), True
