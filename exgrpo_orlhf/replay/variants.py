"""The classes that a setting of the replay may refer to, of which a run uses one of each kind."""

from .injection import Beside, InPlace, LateInjection, UnlessSolved
from .prefix import AdaptiveShare, FixedShare, Prefix, UniformShare
from .share import Reincarnation
from .store_rule import AboveMean, AllFinished, OneSuccess, Successes, WithSignal
from .stored_group import StoredGroup
from .stored_rows import StoredRows

VARIANTS: tuple[type, ...] = (  # what another one has as its default before it
    *(Beside, InPlace, UnlessSolved, LateInjection),
    *(FixedShare, UniformShare, AdaptiveShare, Prefix),
    *(StoredGroup, StoredRows),
    *(Successes, OneSuccess, AboveMean, AllFinished, WithSignal, Reincarnation),
)
