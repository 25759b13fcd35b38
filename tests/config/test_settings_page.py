"""docs/settings.md is what docs/dev/settings.py makes of the classes of today."""

from __future__ import annotations

import inspect
import re
import runpy

from run_builders import ROOT

from exgrpo_orlhf.config import build

PAGE = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")


def test_the_page_is_current():
    written = runpy.run_path(str(ROOT / "docs" / "dev" / "settings.py"))["page"]()
    assert written == PAGE, "run python docs/dev/settings.py"


def test_every_parameter_that_gin_binds_has_a_row_and_words():
    sections = {part.partition("\n")[0]: part for part in re.split(r"\n##+ ", PAGE)[1:]}
    for name, target in build._TARGETS.items():
        for parameter in set(inspect.signature(target).parameters) - set(build._SUPPLIED.get(name, ())):
            [row] = [line for line in sections[name].splitlines() if line.startswith(f"| `{parameter}` |")]
            assert not row.endswith("|  |"), f"{name}.{parameter}"
