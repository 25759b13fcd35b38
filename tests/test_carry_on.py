"""What stands at the root for users and for whoever carries on: CITATION.cff."""

from __future__ import annotations

import yaml
from run_builders import ROOT

import exgrpo_orlhf


def test_the_citation_is_of_this_version():
    """It was valid by schema 1.2.0 of citation-file-format.github.io, whose required keys these are."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"authors", "cff-version", "message", "title"} <= citation.keys()
    assert (citation["cff-version"], citation["license"]) == ("1.2.0", "Apache-2.0")
    assert citation["version"] == exgrpo_orlhf.__version__
    for work in (citation, *citation["references"]):
        assert all({"name"} == {*author} or {"family-names", "given-names"} == {*author} for author in work["authors"])
