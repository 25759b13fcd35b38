"""Files of JSON objects, one a line, that are appended to: what a run logs by step, and what an evaluation collects."""

from __future__ import annotations

import json
import logging
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any

from .files import naming, sync

log = logging.getLogger(__name__)


def read_objects(
    path: Path, content: bytes | None = None, *, skips_torn: bool = False, **decoding: Any
) -> Iterator[dict[str, Any]]:
    """The objects of a file that somebody else wrote, one a line; a byte order mark is skipped.

    content: of the file, where it had to be unpacked
    skips_torn: leave out a last line without its end; decoding: further arguments of json.loads
    Raises ValueError with file and line for what is no object.
    """
    with (
        path.open("rb") if content is None else BytesIO(content) as file
    ):  # bytes: only "\n" ends a line, not a U+2028 inside a text
        for number, line in enumerate(file, 1):
            if skips_torn and not line.endswith(b"\n"):
                return
            if not line.strip():
                raise ValueError(f"{path}, line {number}: an empty line is no row; remove it")
            torn = "" if line.endswith(b"\n") else "; the file ends here, was it written to the end?"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = json.loads(text, object_pairs_hook=each_once, **decoding)
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not UTF-8; save the file as UTF-8{torn}") from error
            except (ValueError, RecursionError) as error:
                torn = "; write that number in quotes" if "integer string conversion" in str(error) else torn
                raise ValueError(f"{path}, line {number}: not JSON: {error}{torn}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a row is an object {{…}}, not {row!r:.80}")
            yield row


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError for a key with two values, of which json.loads would take the last."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} stands twice in an object")
    return row


class JsonLines:
    """A file of rows that are appended whole or not at all.

    A process that is killed while writing leaves an incomplete last line, which is no row and which `cut` removes. A
    corrupt line anywhere else raises ValueError with file and line when the file is opened, which changes nothing.
    """

    ROW = "a row"  # what a line is called in that message

    def __init__(self, path: Path, *, compact: bool = False) -> None:
        """compact: rows are written without spaces"""
        self.path, self._separators = Path(path), (",", ":") if compact else None
        self._scan()

    def _scan(self) -> None:
        self.keys: list[Any] = []  # of the rows, as `_key` has them
        self.ends = [0]  # byte offsets: the i-th row's line lies between the i-th and the next
        self._torn = False
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):  # bytes: only "\n" ends a line, a text may contain U+2028
                if not line.endswith(b"\n"):
                    self._torn = True
                    return
                try:
                    self.keys.append(self._key(json.loads(line)))
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    raise ValueError(
                        f"{self.path}, line {number}: not {self.ROW} ({error}): {line[:120]!r}; correct or remove it"
                    ) from error
                self.ends.append(self.ends[-1] + len(line))

    def _key(self, row: Any) -> Any:
        """What is kept in memory of a row, which comes after `keys`. Raises ValueError, TypeError, KeyError if it is
        unsound."""
        if not isinstance(row, dict):
            raise ValueError("no object {…}")

    def line(self, row: Mapping[str, Any]) -> bytes:
        """A row as it is written."""
        return json.dumps(row, separators=self._separators).encode() + b"\n"

    def add(self, *rows: Mapping[str, Any]) -> None:
        """Write rows of JSON values and hand them to the operating system.

        Raises ValueError for an unsound row, after an incomplete last line, or in a file that another program writes
        too, and OSError if not all could be written: then none is.
        """
        keys = [self._key(row) for row in rows]
        if self._torn:
            raise ValueError(f"{self.path} ends in an incomplete line; call cut_back with the checkpoint's step first")
        lines = [self.line(row) for row in rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with naming(self.path), self.path.open("ab", buffering=0) as file:
            if file.tell() != self.ends[-1]:
                raise ValueError(f"{self.path} was changed by another program; two runs in one folder?")
            rest = memoryview(b"".join(lines))
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except BaseException:
                file.truncate(self.ends[-1])
                raise
        self.ends += list(accumulate(map(len, lines), initial=self.ends[-1]))[1:]
        self.keys += keys

    def cut(self, count: int) -> None:
        """Keep the first `count` rows, without an incomplete last line behind them."""
        if self._torn or count < len(self.keys):
            os.truncate(self.path, self.ends[count])
            sync(self.path)
            del self.ends[count + 1 :], self.keys[count:]
            self._torn = False

    def read(self, first: int = 0) -> Iterator[Any]:
        """The rows from the `first` one on, counted from 0."""
        if first < len(self.keys):
            with self.path.open("rb") as file:
                file.seek(self.ends[first])
                yield from (json.loads(line) for line in file if line.endswith(b"\n"))


class StepLog(JsonLines):
    """{"step": n, …} in each row, steps increasing. It is cut back when a run is resumed."""

    ROW = "a row with a 'step'"

    def _key(self, row: Any) -> Any:
        if type(row["step"]) is not int or row["step"] <= self.last_step:
            raise ValueError(
                f"{self.path}: step {row['step']!r} after step {self.last_step}; steps are increasing integers"
            )
        return row["step"]

    @property
    def last_step(self) -> int:
        """The last complete row's step, −1 for an empty log."""
        return self.keys[-1] if self.keys else -1

    def rows(self, after: int = -1) -> Iterator[dict[str, Any]]:
        """The rows of the steps above `after`, in order."""
        return self.read(bisect_right(self.keys, after))

    def sync(self) -> None:
        """Put the rows on the disk, so that they survive a power failure."""
        if self.path.exists():
            sync(self.path)

    def tail(self, step: int) -> bytes:
        """The lines of the rows after `step`, without an incomplete last one."""
        first = self.ends[bisect_right(self.keys, step)]
        if first == self.ends[-1]:
            return b""
        with self.path.open("rb") as file:
            file.seek(first)
            return file.read(self.ends[-1] - first)

    def cut_back(self, step: int) -> int:
        """Drops the rows after `step` and an incomplete last line: for resuming from a checkpoint of that step, before
        anything else reads the log. Returns the number of rows dropped."""
        keep = bisect_right(self.keys, step)
        dropped = len(self.keys) - keep
        self.cut(keep)
        return dropped

    def warn_if_missing(self, steps: Iterable[int]) -> None:
        """Log a warning if some of these steps, which were written, have no row."""
        if missing := sorted({*steps} - {*self.keys}):
            shown = ", ".join(map(str, missing[:5])) + (", …" if missing[5:] else "")
            text = "%s: %d rows are missing (steps %s): the file was changed or deleted. What reads it lacks them"
            log.warning(text, self.path, len(missing), shown)
