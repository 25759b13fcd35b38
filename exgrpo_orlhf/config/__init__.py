"""From gin files to a built experiment. Only this package imports gin."""

from ..settings import ConfigError
from .build import load, load_suite, may_change, overrides_as_bound, variant_of

__all__ = ["ConfigError", "load", "load_suite", "may_change", "overrides_as_bound", "variant_of"]
