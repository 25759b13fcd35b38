"""Question sets from files: parquet, JSONL or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..io.json_lines import read_objects
from ..io.paths import WORKPLACE
from ..records import Question
from .catalogue import PUBLIC_SETS
from .reading import Place, QuestionRecords

RATE = "pass_rate"  # the column in which `prepare_data.py --measure` writes the share of right responses

Rows = Iterator[Mapping[str, Any]]


class _Decimal(float):
    """A JSON number that is not whole. Its text is as it is written: 4.50 stays "4.50"."""

    text: str

    def __new__(cls, text: str) -> _Decimal:
        number = super().__new__(cls, text)
        number.text = str(text)
        return number

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class QuestionFile(QuestionRecords):
    """A file of questions with verifiable answers; the other fields are those of `QuestionRecords`.

    path: from the working directory, else from the project's folder (datasets/); .parquet, .jsonl (one object a line),
        or .csv (a header, then one question a record; UTF-8). Its name without the suffix is the source of questions
        that say none
    """

    path: str

    def load(self) -> list[Question]:
        """As `distinct_questions`.

        Raises FileNotFoundError, or ValueError that names the file, the row or line, and the field.
        """
        path = Path(self.path).expanduser()
        path = path if path.exists() else WORKPLACE / path
        names = column_names(path, "QuestionFile.path")
        layout, place = self.layout(names, str(path)), replace(place_of(path), fields=names)
        return self.distinct_questions(read_rows(path, self.columns(layout)), place, path.stem, layout)


def place_of(path: Path) -> Place:
    """The place of a file's records. Lines of JSONL are counted from 1, as editors do; rows of a table from 0."""
    return Place(str(path), "line", 1) if path.suffix == ".jsonl" else Place(str(path), "row", 0)


def column_names(path: Path, named: str = "") -> list[str]:
    """The columns of a file's first row, nested ones as dotted paths; [] without a row. named: as `read_rows`"""
    return [*column_paths(next(read_rows(path, (), named), {}))]


def read_rows(path: Path, columns: Sequence[str], named: str = "") -> Rows:
    """The rows of a file; of a parquet file only the given columns are read, or all where none is given.

    named: the path's binding, for messages
    """
    binding = f" ({named})" if named else ""
    if not path.is_file():
        kind = "this is a folder, not a" if path.is_dir() else "no such"
        remedy = f"; python scripts/prepare_data.py --only {path.stem} makes datasets/{path.stem}.parquet"
        remedy = remedy if path.stem in PUBLIC_SETS else ""
        raise FileNotFoundError(f"{path.absolute()}: {kind} file{binding}{remedy}")
    if path.suffix == ".parquet":
        return _parquet_rows(path, columns)
    if path.suffix == ".jsonl":
        return read_objects(path, parse_float=_Decimal, parse_constant=_refuse_constant)
    if path.suffix == ".csv":
        return _csv_rows(path)
    advice = "; unpack it with gunzip" if path.suffix == ".gz" else binding
    raise ValueError(f"{path}: a file of questions ends in .parquet, .jsonl or .csv, not {path.suffix!r}{advice}")


def column_paths(record: Mapping[str, Any]) -> Iterator[str]:
    """The dotted paths of a record's fields, nested records included."""
    for name, value in record.items():
        yield name
        if isinstance(value, dict):
            yield from (f"{name}.{path}" for path in column_paths(value))


def _parquet_rows(path: Path, columns: Sequence[str]) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=list(columns) or None, batch_size=1024 if columns else 1):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: cannot be read as parquet ({' '.join(str(error).split())}); copy or make it again"
        ) from error


def _csv_rows(path: Path) -> Rows:
    """All values are text, as written. Quoted values may hold line breaks, doubled quotes stand for one."""
    csv.field_size_limit(1 << 30)  # the library's own limit is shorter than a long question
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: not UTF-8; save the file as UTF-8") from error
    reader, row = csv.reader(io.StringIO(text, newline=""), strict=True), -1
    try:
        header = next(reader, [])
        if not header:
            raise ValueError(f"{path}: the file has no header: its first line is empty, or it has none")
        if len(set(header)) < len(header):
            raise ValueError(f"{path}: the header names a column twice: {', '.join(header)}")
        for row, values in enumerate(reader):
            if len(values) != len(header):
                raise ValueError(
                    f"{path}, row {row} (ends in line {reader.line_num}): {len(values)} values for the "
                    f'{len(header)} columns {", ".join(header)}; a value with a comma stands in "quotes"'
                )
            yield dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise ValueError(
            f"{path}, row {row + 1} (line {reader.line_num}): not CSV: {error}; was it written to the end?"
        ) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
