"""A run's checkpoints: folders that are whole or not there, and the manifest of what each consists of."""

from .folder import (
    BEST,
    CheckpointError,
    RunFolderError,
    UnusableCheckpoint,
    claim,
    find,
    mark_best,
    name_end_tokens,
    read_state,
    refuse_earlier,
    remove_partial,
    save,
    set_aside,
    to_resume,
    write_state,
)

__all__ = [
    "BEST",
    "CheckpointError",
    "RunFolderError",
    "UnusableCheckpoint",
    "claim",
    "find",
    "mark_best",
    "name_end_tokens",
    "read_state",
    "refuse_earlier",
    "remove_partial",
    "save",
    "set_aside",
    "to_resume",
    "write_state",
]
