"""Question sets from files: parquet, JSON or CSV."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..io.json_lines import each_once, read_objects
from ..io.paths import WORKPLACE
from ..records import Question
from .catalogue import PUBLIC_SETS
from .reading import Place, QuestionRecords

RATE = "pass_rate"  # the column in which `prepare_data.py --measure` writes the share of right responses

Rows = Iterator[Mapping[str, Any]]
_DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar"}  # of CSV, as messages call them


class SpelledFloat(float):
    """A JSON number that is not whole. Its text is as it is written: 4.50 stays "4.50"."""

    text: str

    def __new__(cls, text: str) -> SpelledFloat:
        number = super().__new__(cls, text)
        number.text = str(text)
        return number

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class QuestionFile(QuestionRecords):
    """A file of questions with verifiable answers; the other fields are those of `QuestionRecords`.

    path: from the working directory, else from the project's folder (datasets/); .parquet, .jsonl (one object a line),
        .json (a list of objects, or one a line), .csv or .tsv (a header, then one question a record; the delimiter is
        the comma, semicolon, tab or bar that divides the header), in UTF-8; all but .parquet also as .gz. Its name
        without the suffix is the source of questions that say none
    """

    path: str

    @property
    def file(self) -> Path:
        """The file of `path`, which may not be there."""
        path = Path(self.path).expanduser()
        return path if path.exists() else WORKPLACE / path

    def load(self) -> list[Question]:
        """As `distinct_questions`.

        Raises FileNotFoundError, or ValueError that names the file, the row or line, and the field.
        """
        path = self.file
        names = column_names(path, "QuestionFile.path")
        layout, place = self.layout(names, str(path)), replace(place_of(path), fields=names)
        name = path.stem.removesuffix(form_of(path))  # of mine.jsonl.gz: mine
        return self.distinct_questions(read_rows(path, self.columns(layout)), place, name, layout)


def form_of(path: Path) -> str:
    """The suffix that says how a file is read: of mine.jsonl.gz .jsonl."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def place_of(path: Path) -> Place:
    """The place of a file's records. Lines of JSONL are counted from 1, as editors do; rows of a table from 0."""
    return Place(str(path), "line", 1) if form_of(path) == ".jsonl" else Place(str(path), "row", 0)


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
        if named == "QuestionFile.path" and not path.suffix:
            remedy += "; a set of the hub is Work.questions = @QuestionHub() with QuestionHub.id"
        raise FileNotFoundError(f"{path.absolute()}: {kind} file{binding}{remedy}")
    if path.suffix == ".parquet":
        return _parquet_rows(path, columns)
    readers = {".jsonl": _json_lines, ".json": _json_rows, ".csv": _csv_rows, ".tsv": _csv_rows}
    if reader := readers.get(form_of(path)):
        return reader(path)
    advice = "; unpack it with gunzip" if path.suffix == ".gz" else binding
    raise ValueError(
        f"{path}: a file of questions ends in .parquet, .jsonl, .json, .csv or .tsv, not {path.suffix!r}{advice}"
    )


def read_bytes(path: Path) -> bytes:
    """A file's content, unpacked. Raises ValueError for a damaged .gz."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole .gz file ({error}); copy or make it again") from error


def read_text(path: Path) -> str:
    """As `read_bytes`. Raises ValueError that names the line which is not UTF-8."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: not UTF-8; save the file as UTF-8") from error


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


def _json_lines(path: Path) -> Rows:
    content = read_bytes(path) if path.suffix == ".gz" else None
    return read_objects(path, content, parse_float=SpelledFloat, parse_constant=_refuse_constant)


def _json_rows(path: Path) -> Rows:
    """Of a list of objects, or of one object a line: other tools write both under this suffix."""
    text = read_text(path)
    try:
        value = json.loads(text, parse_float=SpelledFloat, parse_constant=_refuse_constant, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("["):
            raise ValueError(f"{path}: not JSON: {error}; was it written to the end?") from error
        yield from _json_lines(path)
        return
    if isinstance(value, dict) and "\n" not in text.strip():  # one object a line, and one line
        value = [value]
    wrong = [row for row in value if not isinstance(row, dict)] if isinstance(value, list) else [value]
    if wrong:
        raise ValueError(f"{path}: takes a list of objects [{{…}}, …], or one object a line; got {wrong[0]!r:.80}")
    yield from value


def json_texts(text: str) -> list[str]:
    """The objects of a JSON list as they are written."""
    decode, between, texts = json.JSONDecoder().raw_decode, re.compile(r"[\s,\[]*"), list[str]()
    at = 0
    while text[(start := between.match(text, at).end())] != "]":  # type: ignore[union-attr]
        at = decode(text, start)[1]
        texts.append(text[start:at])
    return texts


def delimiter_of(path: Path, text: str) -> str:
    """The character that divides the header of a CSV file into the most columns."""

    def columns(delimiter: str) -> int:
        try:
            return len(next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), []))
        except csv.Error:
            return 0

    return max("\t" if form_of(path) == ".tsv" else _DELIMITERS, key=columns)


def _csv_rows(path: Path) -> Rows:
    """All values are text, as written. Quoted values may hold line breaks, doubled quotes stand for one."""
    csv.field_size_limit(1 << 30)  # the library's own limit is shorter than a long question
    text = read_text(path).rstrip("\r\n")  # an empty last line is no record
    delimiter = delimiter_of(path, text)
    reader, row = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), -1
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
                    f"{len(header)} columns {', '.join(header)}; a value with {_DELIMITERS[delimiter]} stands in "
                    '"quotes"'
                )
            yield dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise ValueError(
            f"{path}, row {row + 1} (line {reader.line_num}): not CSV: {error}; was it written to the end?"
        ) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
