"""From gin files to a built experiment. Only this package imports gin."""

from ..checks import ConfigError
from .build import all_settings, load, load_suite, may_change, overrides_as_bound, variant_of
from .other_tools import here

__all__ = [
    "ConfigError",
    "all_settings",
    "here",
    "load",
    "load_suite",
    "may_change",
    "overrides_as_bound",
    "variant_of",
]
