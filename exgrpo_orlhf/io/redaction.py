"""What is never written: values of settings and flags that are keys, tokens or passwords by their name; of addresses
user and password, and parameters that are such. Programs take them from the environment (docs/training.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "***"
_ALWAYS = r"(password|passwd|pwd|passphrase|passcode|secret|credentials?|authorization|signature|cookie|jwt)"
_SECRET = re.compile(
    r"key|token|(db|user|login)?[_-]?pass|(.*[_-])?(sas|pat)"
    r"|.*(api|access|secret|private|auth|session|refresh|bearer|hf|hub|wandb|subscription|account|functions?|master"
    r"|shared|security|signing|encryption|client)[_-]?(key|token)s?"
    rf"|.*{_ALWAYS}",
    re.IGNORECASE,
)
# The last words of the name of a text, as of judge_key and GITLAB_TOKEN, but of a column, a metric or a special token.
_SECRET_TEXT = re.compile(r"(.*_)?(key|token|auth|pw|bearer|key_id)")
_NO_SECRET = re.compile(
    r"(.*_)?((input|output|prompt|question|answer|label|response|reward|chosen|rejected|image|metric|sort)_key"
    r"|(bos|eos|pad|unk|sep|cls|mask|image|special|start|end|stop)_token)"
)
_BETWEEN_WORDS = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")  # of db_pwd, X-Amz-Signature and apiKey
# A word of a parameter's name. A setting such as data.input_key is no secret, but an address has no other keys.
_SECRET_PARAMETER = re.compile(rf"code|sig|sign|auth|pass|pw|pat|sas|pin|otp|sid|session|odbc|.*(key|token|{_ALWAYS})")
_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][\w.+-]{0,30})://(?P<rest>[^\s'\"]*)")
# Up to the last '@' before the first '/', as a URL has it; or, of a password with '/', '?' or '#', up to the last '@'.
# What follows the colon is then no port; of a database, no port with a query behind it.
_USER = re.compile(r"[^/?#]+@|[^/?#:\[]*:(?!\d+([/?#:\s]|$)).*@", re.DOTALL)
_DATABASE_USER = re.compile(r"[^/?#:\[]*:(?!\d*(/[^?@]*)?\?[\w.-]+=).*@|[^/?#]+@", re.DOTALL)


def redacted(name: str, value: Any) -> Any:
    """The value of a setting or a flag as it may be written.

    name: such as 'Tracking.uri' or 'logger.wandb.key'; of a dict's values their own names count too
    Returns the value itself where there is nothing to hide.
    """
    if isinstance(value, Mapping):
        secret = _is_secret(name) or _is_secret_text(name)
        return {key: redacted(name if secret else str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redacted(name, inner) for inner in value)
    if _is_secret(name) and value is not None and not isinstance(value, bool):
        return REDACTED
    if not isinstance(value, str):
        return value
    return REDACTED if _is_secret_text(name) else without_password(value)


def without_password(text: str) -> str:
    """A text without user and password of the addresses in it, and without the secrets among their parameters."""
    if (whole := _ADDRESS.match(text)) and text.count("://") == 1 and "@" in text[whole.end() :]:
        return _shown(whole["scheme"], text.partition("://")[2])  # a password with a space or a quote
    return _ADDRESS.sub(lambda match: _shown(match["scheme"], match["rest"]), text)


def address_only(url: str) -> str:
    """An address without its user, password and query, which may hold a key under any name."""
    return re.split(r"[?#]", without_password(url), maxsplit=1)[0]


def _shown(scheme: str, rest: str) -> str:
    """An address as it may be written."""
    user = (_DATABASE_USER if "sql" in scheme.lower() else _USER).match(rest)
    hidden = lambda part: f"{part[1]}={REDACTED}" if _is_secret_parameter(part[1]) else part[0]
    return f"{scheme}://" + re.sub(r"(?<=[?&;#])([^=&;#?]+)=[^&;#]+", hidden, rest[user.end() if user else 0 :])


def _is_secret_parameter(name: str) -> bool:
    return any(_SECRET_PARAMETER.fullmatch(word.lower()) for word in _BETWEEN_WORDS.split(name))


def _is_secret(name: str) -> bool:
    return _SECRET.fullmatch(re.split("[./]", name)[-1]) is not None


def _is_secret_text(name: str) -> bool:
    words = "_".join(_BETWEEN_WORDS.split(re.split("[./]", name)[-1])).lower()
    return _SECRET_TEXT.fullmatch(words) is not None and _NO_SECRET.fullmatch(words) is None
