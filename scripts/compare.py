#!/usr/bin/env python
"""Compare the runs of a study over their seeds: means with intervals, differences from a baseline, curves.

    python scripts/compare.py --group paper --baseline on_policy
    python scripts/compare.py --experiment exgrpo --group paper --metric eval/avg --out compare.html --png compare.png

Runs come from MLflow (MLFLOW_TRACKING_URI, --uri, else the project's mlflow.db): with --group the children of that
group, by their tags variant and seed; without it all runs with the metric, with their gin files as the variant. Runs
whose settings differ, apart from the seed and what may change when a run is continued, are variants of their own; a
setting that a run does not have, because it is an older one, counts as its default.
Exit status: 0, or 2 if nothing can be compared.
"""

from __future__ import annotations

import argparse
import os
import sys

from exgrpo_orlhf.io import terminal
from exgrpo_orlhf.io.files import write
from exgrpo_orlhf.io.paths import WORKPLACE

DYNAMICS = (  # of the paper's Figs. 4 to 8: reward, length, entropy, buffered, retired, replayed
    *("reward/pass_at_1", "rollout/response_tokens", "policy/entropy_fresh"),
    *("replay/candidates", "replay/retired", "replay/actual_share"),
)


def main() -> int:
    arguments = _parser().parse_args()
    terminal.messages()
    from exgrpo_orlhf import config
    from exgrpo_orlhf.study import comparison_charts, comparison_tables
    from exgrpo_orlhf.study.comparison import ComparisonError, compare, differing_settings
    from exgrpo_orlhf.study.store import Store, StoreError

    uri = arguments.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{WORKPLACE / 'mlflow.db'}"
    metrics = list(dict.fromkeys(arguments.metric or (DYNAMICS if arguments.dynamics else ["eval/greedy_accuracy"])))
    try:
        defaults = config.all_settings()
        store = Store(uri, config.variant_of, defaults)
        which = (arguments.experiment, arguments.group, metrics, arguments.filter, arguments.unfinished)
        runs, notes = store.select(*which)
        curves = store.curves(runs, metrics)
        # On-policy training, say, has no metrics of replay: there the others are shown without differences.
        variants = {metric: {curve.run.variant for curve in curves[metric]} for metric in metrics}
        without = [m for m in metrics if arguments.baseline in set().union(*variants.values()) - variants[m]]
        compared = [compare(m, curves[m], None if m in without else arguments.baseline) for m in metrics]
        mixed = [note for each in compared for note in differing_settings(each.variants, defaults)[1]]
        notes += dict.fromkeys(mixed)
        notes += [f"{arguments.baseline} has no {metric}: the others are not compared with it" for metric in without]
        print(comparison_tables.terminal(compared, notes))
        title = f"{arguments.experiment}{', ' + arguments.group if arguments.group else ''}: {', '.join(metrics)}"
        about = f"{len(runs)} runs of experiment {arguments.experiment}"
        about += f", group {arguments.group}" if arguments.group else ""
        about += f", with {arguments.filter}" if arguments.filter else ""
        about += f", from {store.uri}"
        outputs = (
            (arguments.markdown, lambda: comparison_tables.markdown(title, compared, notes)),
            (arguments.csv, lambda: comparison_tables.values_csv(compared)),
            (arguments.curves, lambda: comparison_tables.curves_csv(compared)),
            (arguments.png, lambda: comparison_charts.picture(compared)),
            (arguments.out, lambda: comparison_tables.page(title, about, compared, notes, defaults)),
        )
        for path, make in outputs:
            if path is not None:
                write(path, make())
                print(f"wrote {path}", file=sys.stderr)
    except (StoreError, ComparisonError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="exgrpo", help="MLflow experiment (default exgrpo)")
    parser.add_argument("--group", help="the study: tag `group` of its runs, as scripts/ablate.py sets it")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--metric", action="append", metavar="NAME", help="repeatable; higher is better (default eval/greedy_accuracy)"
    )
    what.add_argument("--dynamics", action="store_true", help="how training went, instead of --metric: see DYNAMICS")
    parser.add_argument("--baseline", metavar="VARIANT", help="the others are compared with it, seed by seed")
    parser.add_argument(
        "--filter", metavar="TEXT", help="further, in MLflow's language: \"params.`train.steps` = '200'\""
    )
    parser.add_argument("--unfinished", action="store_true", help="include runs that failed, were stopped or still run")
    parser.add_argument("--uri", help="tracking server or sqlite:///FILE")
    parser.add_argument(
        "--out", type=terminal.output_file, metavar="FILE.html", help="a page with tables, charts and the runs"
    )
    parser.add_argument("--markdown", type=terminal.output_file, metavar="FILE", help="the tables")
    parser.add_argument(
        "--csv", type=terminal.output_file, metavar="FILE", help="values of runs and variants, and differences"
    )
    parser.add_argument("--curves", type=terminal.output_file, metavar="FILE", help="CSV: every run's curves")
    parser.add_argument("--png", type=terminal.output_file, metavar="FILE", help="curves and last values")
    return parser


if __name__ == "__main__":
    sys.exit(main())
