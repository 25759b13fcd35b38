"""What stands at the root for users and for whoever carries on: CITATION.cff, the commands."""

from __future__ import annotations

import tomllib

import yaml
from run_builders import ROOT

import exgrpo_orlhf
from exgrpo_orlhf import __main__


def test_the_citation_is_of_this_version():
    """It was valid by schema 1.2.0 of citation-file-format.github.io, whose required keys these are."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"authors", "cff-version", "message", "title"} <= citation.keys()
    assert (citation["cff-version"], citation["license"]) == ("1.2.0", "Apache-2.0")
    assert citation["version"] == exgrpo_orlhf.__version__
    for work in (citation, *citation["references"]):
        assert all({"name"} == {*author} or {"family-names", "given-names"} == {*author} for author in work["authors"])


def test_every_command_runs_the_script_of_its_name():
    """What each prints with --help is compared with an installation by test_packaging.py."""
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert commands.keys() == {f"exgrpo-{name}" for name in __main__.SCRIPTS}
    for command, target in commands.items():
        name = command.removeprefix("exgrpo-")
        assert getattr(__main__, target.rpartition(":")[2]).args == (name,)
        assert (ROOT / __main__.SCRIPTS[name]).is_file()
