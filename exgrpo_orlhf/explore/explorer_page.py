"""The experience of a run as one HTML page: charts, and every question with its life."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..evaluation import html
from . import buffer_charts
from .history import KINDS, History, summary

_HERE = Path(__file__).parent
_COLOURS = (
    (buffer_charts.REPLAYED, "replayed"),
    (buffer_charts.STORED, "stored now"),
    (buffer_charts.FRESH, "fresh"),
    ("m7", "stored, not chosen"),
)


def page(history: History, name: str, notes: Sequence[str] = ()) -> str:
    """The whole page. name: of the run; notes: what the reader should know of it, plain texts"""
    numbers = summary(history)
    stored = "no replay buffer"
    if history.buffer_step is not None:
        stored = f"the replay buffer of step {history.buffer_step:,} with {numbers['stored']:,} trajectories"
    about = (
        f"{numbers['steps']:,} steps, {numbers['questions']:,} questions, {numbers['replays']:,} replays; {stored}. "
        f"{numbers['retired']:,} retirements, {numbers['returned']:,} returns, {numbers['evicted']:,} evicted "
        f"trajectories, {numbers['forgotten']:,} questions forgotten at the end."
    )
    sections = [
        ("questions", "Questions", (_HERE / "explore.html").read_text(encoding="utf-8")),
        ("buckets", "Buckets over steps", _buckets(history)),
        ("replayed", "What is replayed", _replayed(history)),
        ("lucky", "Lucky guesses and forgotten questions", _lucky(history)),
        ("diversity", "Diversity of what is stored", html.panels(buffer_charts.diversity(history), "three")),
    ]
    style = (_HERE / "explore.css").read_text(encoding="utf-8")
    head = f"{html.paragraph(about)}{html.notes(notes, 'quiet')}<style>{style}</style>"
    script = (_HERE / "explore.js").read_text(encoding="utf-8")
    return html.page(f"Experience of {name}", head, sections, script, json.dumps(packed(history)))


def _buckets(history: History) -> str:
    about = "Questions with stored trajectories by latest accuracy; unsolved: fallen to 0. At the top: the retired."
    names = [(colour, level) for level, colour in buffer_charts.LEVELS.items()]
    return html.paragraph(about) + html.legend(names) + html.wide(buffer_charts.buckets(history))


def _replayed(history: History) -> str:
    about = (
        "Above: the median, and the band from the 10 % to the 90 % quantile. Below: distributions over all replays of "
        "the run, against the buffer."
    )
    return html.paragraph(about) + html.legend(_COLOURS) + html.panels(buffer_charts.replayed(history), "three")


def _lucky(history: History) -> str:
    about = (
        "A lucky guess is a correct answer whose reasoning does not hold. A forgotten question was solved once, and "
        "its latest group had no success."
    )
    lucky = buffer_charts.lucky(history)
    panels = [*filter(None, [lucky]), buffer_charts.forgotten(history)]
    names = [(buffer_charts.FRESH, "fresh"), (buffer_charts.REPLAYED, "replayed"), ("m5", "forgotten")]
    key = html.legend(names) if lucky else html.paragraph("Nothing checks the reasoning of this run's answers.")
    return html.paragraph(about) + key + html.panels(panels, "three")


def packed(history: History) -> str:
    """The page's data, as JSON in gzip in base64."""
    events = {name: values for name, values in history.events.items() if name != "checked"}
    replays = {name: history.replays[name] for name in ("age", "of", "place", "entropy", "log_weight", "sound")}
    columns = ("ids", "prompts", "accuracy", "retired", "stored", "distinct", "logged", "texts")
    data: dict[str, Any] = {
        "steps": [history.steps[0], history.step],
        "kinds": KINDS,
        "bufferStep": history.buffer_step,
        "events": events,
        "replays": replays,
        **{name: getattr(history, name) for name in columns},
    }
    text = json.dumps(data, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(text, 6, mtime=0)).decode("ascii")
