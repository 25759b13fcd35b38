"""docs/cluster.md agrees with the code."""

from __future__ import annotations

import re

from run_builders import ROOT

from exgrpo_orlhf.engines.openrlhf import flags

GUIDE = (ROOT / "docs" / "cluster.md").read_text()


def test_the_flag_table_is_the_one_that_the_engine_follows():
    shown = {}
    for kind, heading in (
        ("honoured", "| honoured |"),
        ("untested", "| untested |"),
        ("refused", "| refused |"),
        ("bound", "| decided by gin |"),
    ):
        table = GUIDE[GUIDE.index(heading) :].split("\n\n")[0].splitlines()[2:]
        shown[kind] = dict(re.fullmatch(r"\| `(.+?)` \| (.*?) ?\|", row).groups() for row in table)
    assert shown == {
        "honoured": flags.HONOURED,
        "untested": flags.UNTESTED,
        "refused": flags.REFUSED,
        "bound": flags.BOUND,
    }


def test_every_gin_file_and_metric_it_names_exists():
    for name in re.findall(r"(?:gin/)?((?:engines|models|recipes|baselines)/\w+\.gin)", GUIDE):
        assert (ROOT / "gin" / name).exists(), name
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    for name in re.findall(r"\| `((?:rollout|reward|replay|policy)/\w+)`", GUIDE):
        assert name in metrics, name
