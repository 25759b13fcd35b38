"""HTML pages: one template and style sheet for evaluations and comparisons, and the pieces that pages are made of.

A page is one file. It needs no network. Its policy (CSP) allows no script except the one given here, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from .plots import PALETTE

_HERE = Path(__file__).parent


def page(title: str, about: str, sections: Sequence[tuple[str, str, str]], script: str = "", data: str = "") -> str:
    """Fill the template.

    Args:
        title: plain text.
        about: HTML below the title.
        sections: (id, heading as plain text, HTML of the section).
        script: the page's JavaScript; it finds `data`, JSON text without <, > and &, in the element with id "data".
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    colours = "".join(f"--{name}: {value}; " for name, value in PALETTE.items())
    parts = {
        "title": escape(title),
        "style": f":root {{ {colours}}}\n{read('page.css')}",
        "script_source": f"'sha256-{digest}'" if script else "'none'",
        "about": about,
        "links": "".join(f'<a href="#{key}">{escape(heading)}</a>' for key, heading, _ in sections),
        "sections": "\n".join(
            f'<section id="{key}"><h2>{escape(heading)}</h2>{inner}</section>' for key, heading, inner in sections
        ),
        "scripts": f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>'
        * bool(script),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda field: parts[field[1]], read("page.html"))  # one pass: parts are not parsed


def read(name: str) -> str:
    """A file that lies beside this module."""
    return (_HERE / name).read_text(encoding="utf-8")


def paragraph(words: str) -> str:
    return f'<p class="about">{escape(words)}</p>'


def notes(items: Sequence[str], more: str = "") -> str:
    """A list of plain texts; '' for none. more: further CSS classes"""
    lines = "".join(f"<li>{escape(each)}</li>" for each in items)
    return f'<ul class="notes {more}">{lines}</ul>' if items else ""


def legend(entries: Sequence[tuple[str, str]], more: str = "") -> str:
    """entries: (CSS classes of the entry's mark, name as plain text)"""
    items = "".join(f'<li class="{mark}"><i class="{mark}"></i>{escape(name)}</li>' for mark, name in entries)
    return f'<ul class="legend {more}">{items}</ul>'


def table(
    head: Sequence[str], bodies: Sequence[Sequence[Sequence[str]]], left: int, caption: str = "", box: str = ""
) -> str:
    """A table whose numbers do not wrap.

    Args:
        head: plain texts.
        bodies: groups of rows of cells; a cell is HTML.
        left: number of columns, from the first, that are flush left; the others are numbers.
        caption: plain text.
        box: CSS class of an element around the table: "wide" scrolls sideways, "scroll" both ways.
    """
    names = "".join(f'<th scope="col"{" class=left" * (i < left)}>{escape(name)}</th>' for i, name in enumerate(head))
    rows = "".join(f"<tbody>{''.join(_row(cells, left) for cells in body)}</tbody>" for body in bodies)
    top = f"<caption>{escape(caption)}</caption>" if caption else ""
    text = f"<table>{top}<thead><tr>{names}</tr></thead>{rows}</table>"
    return f'<div class="{box}">{text}</div>' if box else text


def _row(cells: Sequence[str], left: int) -> str:
    classes = ("left",) * left + ("num",) * (len(cells) - left)
    inner = "".join(f'<td class="{name}">{cell}</td>' for name, cell in zip(classes, cells, strict=False))
    return f"<tr>{inner}</tr>"


def figure(title: str, chart: str) -> str:
    """A chart under its title, plain text of any length."""
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>"


def panels(charts: Sequence[str], more: str = "") -> str:
    """Charts or figures side by side. more: "three" for three in a row"""
    return f'<div class="panels {more}">{"".join(charts)}</div>'


def wide(chart: str) -> str:
    return f'<div class="wide">{chart}</div>'
