#!/usr/bin/env python
"""Grade responses against gold answers, without a model: test cases of a grader, or saved generations again.

    python scripts/grade.py --kind math --in cases.jsonl --out verdicts.jsonl
    python scripts/grade.py --function style.py:brief --in cases.jsonl --out rewards.jsonl
    python scripts/grade.py --rewards "{'math': 1.0, 'style.py:brief': 0.2}" --in cases.jsonl --out rewards.jsonl

Rows are {"gold": …, "response": …}; kinds that need them also read "prompt", "options" (kind choice) and "tests" (kind
code). Where the prompt opens a thought, the answer begins behind its end. A function gets the other keys, but those
that are written, as columns ("data_source" as verl's source), and rows with the same prompt and gold, one after
another, as the responses to one question. Writes one row for each row read, in order, with all its keys and "verdict"
(correct, wrong, no_answer, timeout, error) and "extracted"; of a function and of several rewards also "reward",
"reason" (why there is none, or what could not be logged), "rewards" (each of several) and "logs", and prints a summary.
A second run continues where the first one stopped; it refuses to if the rows, the settings (kept in OUT.settings.json)
or a function's file have changed, and it never writes to a file that is not its own.
Exit status: 0 when all rows are graded (whatever the verdicts), 2 for files or settings that cannot be used.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, chain, groupby, islice, takewhile
from pathlib import Path
from typing import Any

from exgrpo_orlhf.io import terminal
from exgrpo_orlhf.io.files import naming
from exgrpo_orlhf.io.json_lines import read_objects

ADDED = ("verdict", "extracted", "reward", "reason", "rewards", "logs")
SETTINGS = (  # verdicts depend on these
    "kind", "function", "timeout", "memory", "tool", "gets", "rewards", "success_by", "success_at", "thought_tags",
)  # fmt: skip
CODE = "sha256"  # kept beside these: of the functions' files, by their bindings
BATCH = 256  # rows between two writes, and more where a group would be cut off


class BadFile(ValueError):
    """A file cannot be used. The message names the file and the line."""


def main() -> int:
    arguments = _parser().parse_args()
    from exgrpo_orlhf.io.files import locked
    from exgrpo_orlhf.questions.prompts import Prompts
    from exgrpo_orlhf.rewards import Verifier
    from exgrpo_orlhf.workers.fork_server import close_workers

    settings = {name: getattr(arguments, name) for name in SETTINGS if getattr(arguments, name) is not None}
    try:
        usual = "function" if arguments.function else Verifier.kind if arguments.rewards else "math"
        settings = {"kind": usual, **settings}
        if arguments.rewards:
            try:
                settings["rewards"] = ast.literal_eval(arguments.rewards)
            except (ValueError, SyntaxError) as error:
                example = "\"{'math': 1.0, 'style.py:brief': 0.2}\""
                wrong = f"--rewards: a weight for each kind or function, {example}; got {arguments.rewards}"
                raise BadFile(wrong) from error
        own = {name: value for name, value in settings.items() if name != "thought_tags"}
        Prompts(thought_tags=tuple(settings.get("thought_tags", ())))  # raises ValueError
        verifier = Verifier(**own, workers=arguments.workers, max_failed_share=1.0)
        settings[CODE] = verifier.own_code
        check(arguments.rows, arguments.out, verifier)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        try:
            with locked(arguments.out, wait=False):
                counts = grade(verifier, arguments.rows, arguments.out, settings)
        except BlockingIOError:
            raise BadFile(f"{arguments.out}: another process writes it; wait for it, or give another --out") from None
        verdicts = [f"{n} {verdict}" for verdict, n in counts.most_common()]
        print(f"{arguments.out}: {counts.total()} rows", *verdicts, sep=", ")
        if "function" in settings or "rewards" in settings:
            summarise(arguments.out)
        return 0
    except (ValueError, SyntaxError, OSError) as error:  # BadFile and GradingError among them
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        close_workers()


def summarise(out: Path) -> None:
    """Print what each reward was over all rows."""
    rewards: dict[str, list[float]] = {"reward": []}
    missing: list[str] = []
    for number, row in enumerate(read_objects(out), 1):
        own = {"reward": row.get("reward"), **row.get("rewards", {})}
        for name, reward in own.items():
            rewards.setdefault(name, []).extend([] if reward is None else [reward])
        if own["reward"] is None:
            missing.append(f"row {number}: {row.get('reason')}")
    for name, values in rewards.items():
        span = f"mean {sum(values) / len(values):g}, {min(values):g} to {max(values):g}, " if values else ""
        print(f"{name}: {span}of {len(values)} rows")
    if missing:
        print(f"{len(missing)} rows without a reward (abstained or failed), the first {missing[0]}")


def check(source: Path, out: Path, verifier: Any) -> None:
    """Raises BadFile for a row that cannot be graded, for a file without rows, and for an output that is the input."""
    from exgrpo_orlhf.rewards.kinds import kind_named

    several = verifier.rewards is not None or kind_named(verifier.kind).takes_list
    for written in (out, _settings_of(out)):
        if written.exists() and written.samefile(source):
            raise BadFile(f"{written} is the input itself; give --out another name")
    taken, number = set[str](), 0
    for number, row in enumerate(read_objects(source), 1):
        _check_row(f"{source}, line {number}", row)
        if isinstance(row["gold"], dict) or (isinstance(row["gold"], list) and not several):
            raise BadFile(f"{source}, line {number}: --kind {verifier.kind} takes one gold, got {row['gold']!r:.80}")
        taken |= row.keys() & {*ADDED}
    if not number:
        raise BadFile(f"{source}: it has no rows")
    if taken:
        why = "this script writes these keys, so they are no columns; give a column another name"
        print(f"{source}: {', '.join(sorted(taken))}: {why}", file=sys.stderr)


def _settings_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.settings.json")


def grade(verifier: Any, source: Path, out: Path, settings: dict[str, Any]) -> Counter[str]:
    """Append the verdicts that `out` lacks. Returns the number of each verdict in it now."""
    from exgrpo_orlhf.questions.question_files import SpelledFloat

    kept, total = _settings_of(out), sum(1 for _ in read_objects(source))
    counts = _done(source, out)
    _keep(settings, kept, out, counts.total())
    grouped = verifier.function is not None or verifier.rewards is not None
    earlier, start, reported = counts.total(), time.monotonic(), 0.0
    if grouped and 0 < earlier < total:  # a function may see a whole batch: one that was cut off is graded again
        ends = accumulate(sum(map(len, batch)) for batch in _batches(read_objects(source), grouped))
        earlier = max((end for end in takewhile(earlier.__ge__, ends)), default=0)
        counts = Counter(row["verdict"] for row in islice(read_objects(out), earlier))
    if earlier:
        print(f"{out}: {earlier} rows are graded already", file=sys.stderr)
    spelled = read_objects(source, parse_float=SpelledFloat)  # 1.50 stays 1.50, as in training
    rows, tags = islice(spelled, earlier, None), tuple(settings.get("thought_tags", ()))
    with naming(out), out.open("ab+") as file:
        file.seek(0)
        # The incomplete line that an earlier run was writing when it ended goes.
        file.truncate(sum(len(line) for line in islice(file, earlier) if line.endswith(b"\n")))
        for batch in _batches(rows, grouped):
            asked = [(_question(row, i), row["response"]) for i, group in enumerate(batch) for row in group]
            grades = verifier.grade_all([(question, _written(question, text, tags)) for question, text in asked])
            for row, each in zip(chain.from_iterable(batch), grades, strict=True):
                counts[each.verdict] += 1
                own = {"verdict": each.verdict, "extracted": each.extracted}
                if grouped:
                    more = {"reason": each.reason, "rewards": dict(each.parts), "logs": dict(each.logs)}
                    own |= {"reward": each.reward, **{name: value for name, value in more.items() if value}}
                file.write(json.dumps({**row, **own}).encode("ascii") + b"\n")
            file.flush()
            now = time.monotonic()
            if now - reported > 2 or counts.total() == total:
                rate = (counts.total() - earlier) / (now - start)
                print(f"{counts.total()}/{total} rows, {rate:.0f} a second", file=sys.stderr, flush=True)
                reported = now
    return counts


def _batches(rows: Iterator[dict[str, Any]], grouped: bool) -> Iterator[list[list[dict[str, Any]]]]:
    """Groups of rows, BATCH rows or a few more in all."""
    batch: list[list[dict[str, Any]]] = []
    for group in _groups(rows, grouped):
        batch.append(group)
        if sum(map(len, batch)) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _groups(rows: Iterator[dict[str, Any]], grouped: bool) -> Iterator[list[dict[str, Any]]]:
    """Rows that are responses to one question, one after another; each row is alone without a prompt."""
    for key, same in groupby(rows, key=lambda row: [row.get("prompt"), row["gold"]]):
        group = [*same]
        yield from [group] if grouped and key[0] is not None else ([row] for row in group)


def _check_row(where: str, row: dict[str, Any]) -> None:
    """Raises BadFile for a row that cannot be graded."""
    if missing := {"gold", "response"} - set(row):
        raise BadFile(f"{where}: no {' and no '.join(sorted(missing))}; there are {', '.join(row)}")
    if not isinstance(row["response"], str):
        raise BadFile(f"{where}: a response is text, not {row['response']!r:.80}")
    turns = row["prompt"] if isinstance(row.get("prompt"), list) else []
    if not all(isinstance(turn, dict) and {"role", "content"} <= set(turn) for turn in turns):
        raise BadFile(f"{where}: a prompt is text or messages with role and content, not {turns!r:.80}")


def _done(source: Path, out: Path) -> Counter[str]:
    """Count the verdicts of an earlier run; changes nothing. Raises BadFile for a file that is not this script's."""
    counts: Counter[str] = Counter()
    if not out.exists():
        return counts
    originals = read_objects(source)
    for number, row in enumerate(read_objects(out, skips_torn=True), 1):
        original = next(originals, None)
        if original is None:
            raise BadFile(f"{out}, line {number}: {source} has fewer rows; it belongs to another file")
        if _rest(row) != _rest(original) or row.get("verdict") is None:
            raise BadFile(f"{out}, line {number}: not the row of {source}, line {number}; remove it to begin again")
        counts[row["verdict"]] += 1
    if not counts and out.stat().st_size:
        raise BadFile(f"{out}: not one whole line of it is a graded row of {source}; remove it to begin again")
    return counts


def _keep(settings: dict[str, Any], kept: Path, out: Path, rows: int) -> None:
    """Write the settings beside the output. Raises BadFile if rows were graded with other settings."""
    old, old_code = dict[str, Any](), dict[str, str]()
    code, settings = settings[CODE], {name: value for name, value in settings.items() if name != CODE}
    if kept.exists():
        old = next(read_objects(kept), {})
        if not {"kind", "timeout", "memory"} <= set(old) <= {*SETTINGS, CODE}:
            raise BadFile(f"{kept}: not the settings of an earlier run; remove it to begin again")
        old_code = old.pop(CODE, {})
        old = {name: value for name, value in old.items() if value is not None}
    elif rows:
        raise BadFile(f"{kept} is missing: how the {rows} rows of {out} were graded is unknown; remove {out}")
    order = lambda values: list(values.get("rewards", ()))  # the first of them decides on success by default
    names = [n for n in SETTINGS if old.get(n) != settings.get(n) or (n == "rewards" and order(old) != order(settings))]
    if rows and names:
        other = [f"--{name} {old.get(name)} and not {settings.get(name)}" for name in names]
        raise BadFile(f"{out}: graded so far with {', '.join(other)}; give the same, or another --out")
    if changed := [name for name, digest in old_code.items() if rows and code.get(name) != digest]:
        raise BadFile(f"{out}: graded before the file of {', '.join(changed)} was changed; remove it to begin again")
    from exgrpo_orlhf.io.files import write_json

    write_json(kept, {**settings, CODE: code} if code else settings, indent=None)


def _rest(row: dict[str, Any]) -> str:
    """The row without the added keys, as text: NaN is not equal to itself."""
    return json.dumps({key: value for key, value in row.items() if key not in ADDED}, sort_keys=True)


def _question(row: dict[str, Any], group: int = 0) -> Any:
    """group: its number, by which the verifier knows the responses to one question"""
    from exgrpo_orlhf.records import Question

    gold, prompt = row["gold"], row.get("prompt", "")
    if gold is None or isinstance(gold, list):
        gold = "" if gold is None else tuple(each for each in gold if each is not None)
    if isinstance(prompt, list):
        prompt = tuple((turn["role"], turn["content"]) for turn in prompt)
    meta = {key: value for key, value in row.items() if key not in ("gold", "response", "prompt", *ADDED)}
    prompt = prompt if isinstance(prompt, str | tuple) else ""
    return Question(str(group), prompt, gold, str(row.get("data_source") or ""), meta)


def _written(question: Any, response: str, tags: Any) -> Any:
    """tags: as Prompts.thought_tags"""
    from exgrpo_orlhf.grader.thoughts import opens_thought
    from exgrpo_orlhf.rewards import Written

    text, turns = (question.prompt, ()) if isinstance(question.prompt, str) else ("", question.prompt)
    return Written(response, opens_thought(text, turns, tags), tags=tags)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", help="math (default), choice, code, function, exact, modular_chain: as Verifier.kind")
    parser.add_argument(
        "--in", dest="rows", type=Path, required=True, metavar="FILE", help="JSONL with gold and response"
    )
    parser.add_argument(
        "--out", type=terminal.output_file, required=True, metavar="FILE", help="JSONL to write, or to continue"
    )
    parser.add_argument("--function", help="file.py or file.py:name, instead of a kind")
    parser.add_argument("--tool", choices=["openrlhf", "trl", "verl"], help="for which the function is written")
    parser.add_argument("--gets", choices=["group", "batch"], help="what the function gets at a time")
    parser.add_argument("--rewards", help="several, with weights: as Verifier.rewards")
    parser.add_argument("--success-by", help="which of several decides on success (default: the first)")
    parser.add_argument("--success-at", type=float, help="least reward of a success (default 1)")
    parser.add_argument(
        "--thought-tags", nargs=2, metavar=("OPEN", "CLOSE"), help="of the responses, as Prompts.thought_tags"
    )
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds for each answer (default 5)")
    parser.add_argument("--memory", type=int, default=1024, help="MiB for each answer (default 1024)")
    parser.add_argument("--workers", type=int, default=0, help="grading processes (default: one a core)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
