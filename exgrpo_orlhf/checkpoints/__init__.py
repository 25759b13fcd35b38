"""A run's checkpoints: folders that are whole or not there, and the manifest of what each consists of."""

from .aside import mark_best as mark_best
from .aside import set_aside as set_aside
from .aside import set_newer_aside as set_newer_aside
from .aside import unmark_best as unmark_best
from .folder import BEST as BEST
from .folder import CheckpointError as CheckpointError
from .folder import RunFolderError as RunFolderError
from .folder import UnusableCheckpoint as UnusableCheckpoint
from .folder import claim as claim
from .folder import find as find
from .folder import in_use as in_use
from .folder import name_end_tokens as name_end_tokens
from .folder import read_state as read_state
from .folder import refuse_earlier as refuse_earlier
from .folder import refuse_other as refuse_other
from .folder import remove_partial as remove_partial
from .folder import save as save
from .folder import to_resume as to_resume
from .folder import verified as verified
from .folder import write_state as write_state
from .identity import identify as identify
from .identity import identities as identities
from .identity import note_identity as note_identity
from .identity import original_of as original_of
