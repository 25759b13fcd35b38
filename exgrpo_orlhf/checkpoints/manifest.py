"""What a checkpoint consists of: manifest.json names its step, its run, and each file with its size and SHA-256.

It is written last and holds a checksum of its own entries. A file is hashed by the process that wrote it. Before a run
is resumed, `verify` compares every file with it.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ..io.files import THREADS, Entry, Files, checksum, record, sha256, sync, write

NAME = "manifest.json"
FORMAT = "exgrpo-checkpoint"
VERSION = 1


class ManifestError(RuntimeError):
    """A checkpoint that is not as it was saved. The message names the file and what is wrong with it."""


class UnreadableFile(ManifestError):
    """A file that could not be read, which says nothing of its content: the next attempt may read it."""


class Manifest(NamedTuple):
    """step: of the checkpoint, None of a cached model; run: the run's identity (`metrics.id` in its folder), or the
    cached model's name"""

    step: int | None
    run: str
    files: Files


def seal(folder: Path, step: int | None, run: str, written: Files) -> None:
    """Write the manifest of a checkpoint, or of a cached model, that is otherwise complete, and put it on the disk.

    written: files that were hashed and synced by whoever wrote them; the others are hashed and synced here
    Raises ManifestError for one of them that is not there, or has another size.
    """
    for name, entry in written.items():
        if wrong := _wrong_size(folder / name, entry):
            raise ManifestError(wrong)
    files = written | record(folder, (folder / name for name in sorted(_names(folder) - written.keys())))
    entries = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "run": run,
        "files": {name: files[name]._asdict() for name in sorted(files)},
    }
    write(folder / NAME, _text({**entries, "checksum": checksum(entries)}))
    for path in (*filter(Path.is_dir, folder.rglob("*")), folder):
        sync(path)


def read(folder: Path, renamed: bool = False) -> Manifest:
    """The manifest of checkpoint-<step>, or of a cached model.

    Raises ManifestError if it is missing, damaged, or that of another folder (unless that was `renamed`).
    """
    path = folder / NAME
    try:
        text = path.read_text(encoding="ascii")
        manifest: Any = json.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        raise ManifestError(f"{path}: the file is missing") from None
    except OSError as error:
        raise UnreadableFile(f"{path}: the file cannot be read ({error})") from None
    except ValueError as error:
        raise ManifestError(f"{path}: the file is damaged and cannot be read ({error})") from None
    if (
        not isinstance(manifest, dict)
        or text != _text(manifest)
        or manifest.pop("checksum", None) != checksum(manifest)
    ):
        raise ManifestError(f"{path}: the file is damaged, its checksum does not fit its entries")
    if (manifest["format"], manifest["version"]) != (FORMAT, VERSION):
        raise ManifestError(
            f"{path}: {manifest['format']} {manifest['version']} cannot be read, only {FORMAT} {VERSION}"
        )
    name = manifest["run"] if manifest["step"] is None else f"checkpoint-{manifest['step']}"
    if folder.name != name and not renamed:
        raise ManifestError(f"{path}: this is the manifest of {name}; the folder, or this file, is another one's")
    files = {name: Entry(**entry) for name, entry in manifest["files"].items()}
    return Manifest(manifest["step"], manifest["run"], files)


def _text(manifest: dict[str, Any]) -> str:
    return json.dumps(manifest, indent=1) + "\n"


def verify(folder: Path, contents: bool = True) -> Manifest:
    """Compare checkpoint-<step> with its manifest: every file is there, with its size and its content, and no other.

    contents: whether the files are hashed
    Raises ManifestError.
    """
    manifest = read(folder)
    wrong = _wrong(folder, manifest.files, contents)
    # A file more may change what transformers loads. Hidden ones are those of file systems and editors.
    extra = sorted(name for name in _names(folder) - manifest.files.keys() if not Path(name).name.startswith("."))
    wrong += [f"{folder / name}: the file is not part of the checkpoint; move it elsewhere" for name in extra]
    if wrong:
        raise ManifestError(wrong[0] + (f" (and {len(wrong) - 1} more files are not as saved)" if wrong[1:] else ""))
    return manifest


def verify_model(folder: Path, part: str = "") -> None:
    """Compare a model's own files, or those in the subfolder `part`, with the manifest beside them, if there is one.
    The folder may have been renamed, and other files be gone. Raises ManifestError.
    """
    path = folder / NAME
    if not path.is_file() or FORMAT not in path.read_text(encoding="utf-8", errors="replace"):  # or of another program
        return
    files = {name: entry for name, entry in read(folder, renamed=True).files.items() if name.rpartition("/")[0] == part}
    if wrong := _wrong(folder, files, contents=True):
        raise ManifestError(f"{wrong[0]}; if that was changed on purpose, remove {path}")


def verify_file(folder: Path, name: str) -> None:
    """Compare one file of checkpoint-<step> with the manifest. Raises ManifestError."""
    if (entry := read(folder).files.get(name)) is None:
        raise ManifestError(f"{folder / name}: {NAME} does not name it")
    if wrong := _wrong(folder, {name: entry}, contents=True):
        raise ManifestError(wrong[0])


def _names(folder: Path) -> set[str]:
    """All files but the manifest."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {NAME}


def _wrong(folder: Path, files: Files, contents: bool) -> list[str]:
    """What is wrong with each file that is not as it was saved."""
    wrong = [problem for name, entry in files.items() if (problem := _wrong_size(folder / name, entry))]
    if wrong or not contents:
        return wrong
    with ThreadPoolExecutor(THREADS) as threads:
        problems = threads.map(_wrong_content, (folder / name for name in files), files.values())
        return [problem for problem in problems if problem]


def _wrong_size(path: Path, entry: Entry) -> str | None:
    if not path.is_file():
        return f"{path}: the file is missing"
    size = path.stat().st_size
    return None if size == entry.bytes else f"{path}: the file has {size:,} bytes instead of {entry.bytes:,}"


def _wrong_content(path: Path, entry: Entry) -> str | None:
    try:
        digest = sha256(path)
    except FileNotFoundError:
        return f"{path}: the file is missing"
    except OSError as error:
        raise UnreadableFile(f"{path}: the file cannot be read ({error})") from None
    if digest == entry.sha256:
        return None
    return f"{path}: the content is not what was saved (SHA-256 {digest[:12]}… instead of {entry.sha256[:12]}…)"
