#!/usr/bin/env python
"""What it costs to score the candidates of each step, and what reusing scores saves and changes.

Goal: at least 95 % of the tokens forwarded for scoring are tokens of trajectories, not padding; reusing scores
(gin/ablation_score_reuse.gin) halves the forwarded tokens with at most 2 % other choices on modular chains, or this
script says what it costs instead.

Real training runs with reuse on. Beside each, and outside its accounts, every candidate is scored in full at every
step, and the trajectory which those scores choose is compared with the one that was replayed. The work is the
quickstart's with 160 questions and without retirement, so that questions have several trajectories to choose from;
the last row is the quickstart's own, where few have. About three minutes, and one more where the tiny model has to be
warmed up first.

Found: at 1 of 3 to 4 candidates measured again, the cost is mostly that one and those too old; asking for two makes
nearly all choices the full ones and saves a quarter to a third, since few questions have many candidates here.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

import transformers
from command_line import TINY, finish, make_parser

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.local.forward import ForwardRow, micro_batches
from exgrpo_orlhf.experiment import Experiment
from exgrpo_orlhf.run import train
from exgrpo_orlhf.training import TrainingRun

GOAL_USEFUL, GOAL_COST, GOAL_OTHER = 0.95, 0.5, 0.02


class Ledger:
    """Watches a run's engine and selector: every request of the run, and the full scores beside it."""

    def __init__(self, experiment: Experiment) -> None:
        self.x = experiment
        self.useful = self.padded = self.full = 0
        self.choices = self.other = 0
        self.plan = self.full_scores = None

    def watch(self, run: TrainingRun) -> None:
        engine, selector = run.engine, self.x.selector
        score, choose = engine.score, selector.choose

        def rows(plan, asked):
            questions = {question.id: question for question in plan.replayed}
            return [
                ForwardRow(engine.prompts.encode(questions[question_id]), trajectory.token_ids)
                for question_id, stored in asked.items()
                for trajectory in stored
            ]

        def watched_score(plan, asked, measure):
            candidates = selector.to_score(plan.candidates)
            self.full_scores = score(plan, candidates, measure)
            self.full += sum(map(len, rows(plan, candidates)))
            requested = rows(plan, asked)
            for part in micro_batches(requested, engine.settings.micro_batch_tokens):
                lengths = [len(requested[i]) for i in part]
                self.useful += sum(lengths)
                self.padded += len(lengths) * max(lengths)
            return score(plan, asked, measure)

        def watched_choose(candidates, scores, rng):
            chosen = choose(candidates, scores, rng)
            for question_id, values in self.full_scores.items():
                self.choices += 1
                self.other += selector.best(question_id, candidates[question_id], values) is not chosen[question_id]
            return chosen

        engine.score, selector.choose = watched_score, watched_choose


def measure(steps: int, bindings: list[str]) -> dict[str, float]:
    experiment = config.load(
        ["ablation_score_reuse.gin"],
        [
            f"train.steps = {steps}",
            "train.eval_every = None",
            "train.save_every = 100000",
            "Tracking.enabled = False",
            "ScoreReuse.check_share = 0.0",
            *bindings,
        ],
    )
    ledger = Ledger(experiment)
    setup = TrainingRun.__init__

    def watched_setup(run, *arguments) -> None:
        setup(run, *arguments)
        ledger.watch(run)

    TrainingRun.__init__ = watched_setup
    try:
        with tempfile.TemporaryDirectory() as folder:
            train(experiment, Path(folder) / "run", resume=False, tracking_uri="", tags={})
    finally:
        TrainingRun.__init__ = setup
    return {
        "max_age": experiment.scoring.max_age or 0,
        "refresh": experiment.scoring.refresh,
        "useful": ledger.useful / max(1, ledger.padded),
        "cost": ledger.useful / max(1, ledger.full),
        "other": ledger.other / max(1, ledger.choices),
        "choices": ledger.choices,
        "tokens_in_full": ledger.full,
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=60, help="training steps of each row (default 60)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    many = ["RetirementPolicy.at_accuracy = None", "ModularChains.count = 160"]
    settings = [
        [*many, "ScoreReuse.max_age = None"],
        [*many, "ScoreReuse.max_age = 4"],
        many,
        [*many, "ScoreReuse.refresh = 2"],
        [],
    ]
    if arguments.small:  # without the reuse of scores
        settings = [[*settings[0], *TINY, "ReplayMixer.start_at_accuracy = None"]]
    rows = [measure(10 if arguments.small else arguments.steps, bindings) for bindings in settings]
    print("scores are reused up to max_age steps, the `refresh` best measured again")
    print("cost: tokens forwarded, as a share of those of scoring everything in every step")
    print(f"{'max_age':>8}{'refresh':>9}{'useful':>9}{'cost':>8}{'other choices':>15}{'of':>7}")
    for row in rows:
        print(
            f"{row['max_age'] or 'never':>8}{row['refresh']:>9}{row['useful']:>9.1%}{row['cost']:>8.1%}"
            f"{row['other']:>15.1%}{row['choices']:>7}"
        )
    useful = rows[0]["useful"]
    figures = {"rows": rows, "met": useful >= GOAL_USEFUL}
    summary = f"{useful:.1%} of the tokens useful (goal {GOAL_USEFUL:.0%})"
    if not arguments.small:
        reuse = rows[2]
        cheap = figures["reuse_met"] = bool(reuse["cost"] <= GOAL_COST and reuse["other"] <= GOAL_OTHER)
        summary += (
            f"; {'met' if cheap else 'not met, what reuse costs'}: {reuse['cost']:.1%} of the tokens (goal "
            f"{GOAL_COST:.0%}) with {reuse['other']:.1%} other choices (goal {GOAL_OTHER:.0%})"
        )
    return finish(arguments, figures, summary)


if __name__ == "__main__":
    sys.exit(main())
