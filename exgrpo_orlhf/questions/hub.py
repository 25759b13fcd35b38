"""Question sets of the Hugging Face hub, through its `datasets` library."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..records import Question
from .question_files import column_paths
from .reading import Place, QuestionRecords

logger = logging.getLogger(__name__)


class HubError(ValueError):
    """A set cannot be loaded from the hub. The message says why, and what to do."""


@dataclass(frozen=True)
class QuestionHub(QuestionRecords):
    """A set of questions from the hub, or a local folder that `datasets.load_dataset` can open.

    id: owner/name, or a folder, also one of save_to_disk; the name is the source of questions that say none
    subset: one of the set's configurations ('main', 'ARC-Challenge', …); None where it has only one
    split: 'train', 'test', …, or a part of one ('train[:1000]')
    revision: commit, tag or branch; None: the newest. Pin it: a set that has changed makes a different experiment
    The other fields are those of `QuestionRecords`.
    """

    id: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    source: str | None = field(default=None, kw_only=True)

    def load(self) -> list[Question]:
        """As `distinct_questions`. Raises HubError if the set cannot be loaded, or ValueError with row and field."""
        table = load_table(self.id, self.subset, self.split, self.revision, "QuestionHub")
        first = next(table_rows(table.select(range(min(1, len(table)))), tuple(table.column_names)), {})
        place = Place(f"{self.id}, split {self.split!r}", "row", 0, [*column_paths(first)])
        layout = self.layout([*column_paths(first)], place.name)
        return self.distinct_questions(table_rows(table, self.columns(layout)), place, Path(self.id).name, layout)


def load_table(set_id: str, subset: str | None, split: str, revision: str | None, binding: str) -> Any:
    """A `datasets.Dataset`. binding: what the user sets to fix an error, such as QuestionHub. Raises HubError."""
    import datasets  # takes half a second, and only sets of the hub need it
    from huggingface_hub.errors import HfHubHTTPError

    try:
        if (Path(set_id) / "state.json").is_file() or (Path(set_id) / "dataset_dict.json").is_file():
            table = _saved(datasets.load_from_disk(set_id), subset, split)  # by save_to_disk
        else:
            table = datasets.load_dataset(set_id, subset, split=split, revision=revision)
    except ValueError as error:  # an unknown subset or split: the message lists those there are
        why = " ".join(str(error).split())
        raise HubError(f"{set_id}: {why}; set {binding}.subset and {binding}.split") from error
    except (OSError, datasets.exceptions.DatasetsError, HfHubHTTPError) as error:
        raise HubError(explain(error, set_id, f"{binding}.id")) from error
    logger.info("%s, split %r: %d rows, %s", set_id, split, len(table), table.version or "no version")
    return table


def _saved(saved: Any, subset: str | None, split: str) -> Any:
    """One split, or a part of one, of what save_to_disk wrote. Raises ValueError for another split, or a subset."""
    import datasets

    splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
    name = split.partition("[")[0]
    if subset is not None or name not in splits:
        raise ValueError(f"a folder of save_to_disk has no subsets; the splits of this one are {', '.join(splits)}")
    [part] = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(splits[name])})
    return splits[name].select(range(part.from_, part.to))


def commit(set_id: str, revision: str | None, binding: str) -> str:
    """The full commit of a revision, or of the newest one. One short request to the hub, so that errors come at once.

    binding: what the user sets to fix an error. Raises HubError.
    """
    import httpx
    from huggingface_hub import HfApi, errors

    try:
        return str(HfApi().dataset_info(set_id, revision=revision, timeout=30).sha)
    except (httpx.HTTPError, OSError, errors.HfHubHTTPError) as error:
        raise HubError(explain(error, set_id, binding)) from error


def table_rows(table: Any, needed: tuple[str, ...]) -> Iterator[Mapping[str, Any]]:
    """The rows of a `datasets.Dataset`, read in batches, only the columns that hold the needed fields."""
    columns = [column for column in table.column_names if any(f"{name}.".startswith(f"{column}.") for name in needed)]
    for batch in table.select_columns(columns).with_format("arrow").iter(batch_size=1024):
        yield from batch.to_pylist()


def explain(error: Exception, set_id: str, binding: str) -> str:
    """Why a set of the hub cannot be loaded, and what to do about it."""
    why = " ".join(str(error).split())[:300]
    lower = f"{type(error).__name__} {why}".lower()
    if lower.startswith("gated") or "is a gated" in lower:  # an unknown set's error mentions gated ones too
        return (
            f"{set_id} is gated: accept its terms at https://huggingface.co/datasets/{set_id}, then log in on this "
            f"machine with `hf auth login` ({why})"
        )
    if any(sign in lower for sign in ("connect", "reach", "offline", "timed out", "timeout", "name resolution")):
        return (
            f"{set_id}: the hub cannot be reached from here, and the set is in no local cache; run this where there "
            f"is a network, or copy the set (`hf download --repo-type dataset {set_id} --local-dir FOLDER`) and give "
            f"the folder instead ({why})"
        )
    return f"{set_id}: no such set on the hub, no folder of that name, or no access to it; check {binding} ({why})"
