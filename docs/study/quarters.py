"""How replay changes during a run: the mean of its metrics over each quarter of the steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from exgrpo_orlhf.tracking.metrics_log import MetricsLog

QUARTERS = 4
METRICS = {  # column -> metric, averaged over the steps that replay something
    "age": "replay/age_mean",
    "ess": "replay/ess",
    "log_weight_max": "replay/log_weight_max",
    "saturated": "replay/saturated_share",
    "share": "replay/actual_share",
}
STATES = {"candidates": "replay/candidates", "retired": "replay/retired"}  # averaged over all steps
HEAD = ("variant", "seed", "quarter", *METRICS, *STATES)


def rows(runs: Path) -> Iterator[dict[str, object]]:
    """Rows of HEAD for a part's runs (<variant>/seed<n>) that replay. Columns without a value are left out.

    Raises ValueError for a file that is not a metrics log.
    """
    for run in sorted(runs.glob("*/seed*")):
        steps = [row for row in MetricsLog(run / "metrics.jsonl").rows() if row["step"] > 0]
        if not any(row.get("replay/actual_share") for row in steps):
            continue
        for quarter in range(QUARTERS):
            low, high = (len(steps) * i // QUARTERS for i in (quarter, quarter + 1))
            every = steps[low:high]
            replaying = [row for row in every if row.get("replay/actual_share")]
            means = {
                name: sum(values) / len(values)
                for columns, of in ((METRICS, replaying), (STATES, every))
                for name, metric in columns.items()
                if (values := [row[metric] for row in of if row.get(metric) is not None])
            }
            yield {"variant": run.parent.name, "seed": run.name.removeprefix("seed"), "quarter": quarter + 1, **means}
