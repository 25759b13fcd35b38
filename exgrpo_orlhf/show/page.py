"""Pages: a template of templates/, filled by Jinja. Every text is escaped there.

A page is one file. It needs no network. Its policy (CSP) allows no script except its own, by its hash, and no pictures
but those in the file.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from .charts import PALETTE

_TEMPLATES = Path(__file__).parent / "templates"


def page(template: str, script: str = "", **values: object) -> str:
    """Fill a template. script: the file with the page's JavaScript; values: of the template's names"""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}  # its default sorts the keys
    source = _read(script) if script else ""
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    values |= {"palette": PALETTE, "file": lambda name: Markup(_read(name)), "script": Markup(source)}
    return environment.get_template(template).render(
        script_source=f"'sha256-{digest}'" if source else "'none'", **values
    )


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")
