"""docs/cluster.md agrees with the code. test_openrlhf_contract.py compares the tables of flags, and
test_page_bindings.py the names of gin files and metrics."""

from __future__ import annotations

import layouts
from run_builders import ROOT

from exgrpo_orlhf.engines.openrlhf import worker_environment

GUIDE = (ROOT / "docs" / "cluster.md").read_text()


def test_its_table_of_layouts_is_what_the_sums_give_and_has_every_layout_of_gpus():
    rows = {name: layouts.needs(name) for name in layouts.LAYOUTS}
    assert f"<!-- table: layouts -->\n{layouts.table(rows)}\n<!-- end -->" in GUIDE
    files = {path.stem for path in (ROOT / "gin" / "engines").glob("openrlhf_*.gin")} - {"openrlhf_cpu"}
    assert {f"openrlhf_{name}" for name in rows} == files
    assert {name: row["short"] for name, row in rows.items() if row["short"]} == {}


def test_every_group_of_variables_is_in_the_right_half_of_its_table():
    rows = GUIDE[GUIDE.index("| variables | what happens |") :].split("\n\n")[0].splitlines()[2:]
    [passed_on] = [row for row in rows if "| forwarded " in row]
    for pattern in worker_environment._FORWARDED:
        assert f"`{pattern}`" in passed_on, pattern
    for pattern in {*worker_environment._OF_A_NODE} - {"RAY_[a-z]*"}:
        assert any(f"`{pattern}`" in row for row in rows if row != passed_on), pattern
