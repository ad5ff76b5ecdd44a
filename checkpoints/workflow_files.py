"""The model files that a workflow names, and whether they are here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files.errors import FileError
from ..supported_models import architectures
from .resolve import Unresolved, resolve
from .roots import kind_of_folder, open_roots

PRESENT, VARIANT, MISSING = "present", "another precision", "missing"
_ENDINGS = "|".join(("safetensors", "sft", "ckpt", "pth", "pt", "gguf"))
_MODEL = rf"(?i)(?!\w+://)[^\n\"<>|]{{1,250}}\.(?:{_ENDINGS})"


@dataclass(frozen=True)
class Wanted:
    """A file that a workflow names; folder: ComfyUI's name or "", url: where the workflow says it is from."""

    name: str
    folder: str = ""
    url: str = ""


@dataclass(frozen=True)
class Answer:
    """Whether a file that a workflow names is here, in another precision, or missing."""

    wanted: Wanted
    # PRESENT, VARIANT or MISSING.
    state: str
    # Of the variant, that is the other precision.
    path: Path | None
    # Where a missing one is from, if known.
    url: str

    def __str__(self) -> str:
        place = f"{self.wanted.folder}/{self.wanted.name}" if self.wanted.folder else self.wanted.name
        if self.state == MISSING:
            return f"missing   {place}" + (f"  from {self.url}" if self.url else "  (no source known)")
        return f"{'present' if self.state == PRESENT else 'variant'}   {place}  {self.path}"


def check_workflow(
    workflow: str | os.PathLike, *, models_dir: str | os.PathLike, extra_paths: str | os.PathLike | None = None
) -> list[Answer]:
    """Every model file that a workflow (of the editor or of the API) names. Raises FileError, FileNotFoundError."""
    open_roots(models_dir, extra_paths)
    answers = []
    for wanted in model_files(read_workflow(workflow)):
        url = wanted.url or _known_url(wanted.name)
        try:
            found = resolve(wanted.name, models_dir=models_dir, folder=wanted.folder or None, extra_paths=extra_paths)
        except Unresolved:
            answers.append(Answer(wanted, MISSING, None, url))
            continue
        answers.append(Answer(wanted, VARIANT if found.precision else PRESENT, found.path, url))
    return answers


def read_workflow(path: str | os.PathLike) -> Any:
    """Raises FileError: no JSON, or no workflow."""
    with open(path, encoding="utf-8") as file:
        try:
            content = json.load(file)
        except ValueError as error:
            raise FileError(path, f"is not JSON: {error}") from None
    if not _is_workflow(content):
        raise FileError(path, "is JSON, but no workflow: neither the editor's, with nodes, nor one for the server")
    return content


def _is_workflow(content: Any) -> bool:
    """Of the editor, of the API, or either as a server or a picture carries it (``prompt``, ``workflow``)."""
    if not isinstance(content, Mapping):
        return False
    inner = [content, content.get("prompt"), content.get("workflow")]
    return any(
        isinstance(one.get("nodes"), list)
        or any(isinstance(node, Mapping) and "class_type" in node for node in one.values())
        for one in inner
        if isinstance(one, Mapping)
    )


def model_files(workflow: Any) -> list[Wanted]:
    """The files a workflow names: what its nodes list under ``properties.models`` (name, url, folder), and names of
    model files in the nodes' values. Each file once; notes for people are not read."""
    listed: dict[str, Wanted] = {}
    for entry in _listed(workflow):
        wanted = Wanted(
            _plain(entry["name"]), kind_of_folder(str(entry.get("directory") or "")), entry.get("url") or ""
        )
        listed.setdefault(wanted.name.rpartition("/")[2], wanted)
    for name in _values(workflow):
        base = name.rpartition("/")[2]
        if base not in listed or (listed[base].name != name and "/" in name):
            known = listed.get(base)
            listed[base] = Wanted(name, known.folder if known else "", known.url if known else "")
    return list(listed.values())


def _listed(value: Any) -> Iterator[Mapping[str, Any]]:
    """Entries of every list called ``models``, wherever it is: of nodes, of the workflow, within subgraphs."""
    if isinstance(value, Mapping):
        models = value.get("models")
        for entry in models if isinstance(models, list) else ():
            if (
                isinstance(entry, Mapping)
                and isinstance(entry.get("name"), str)
                and re.fullmatch(_MODEL, entry["name"].strip())
            ):
                yield entry
        for inner in value.values():
            yield from _listed(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _listed(inner)


def _values(value: Any) -> Iterator[str]:
    """Names of model files in nodes: ``widgets_values`` of the editor's form, ``inputs`` of the API's."""
    if isinstance(value, Mapping):
        if value.get("type") in ("MarkdownNote", "Note") or value.get("class_type") in ("MarkdownNote", "Note"):
            return
        for name in ("widgets_values", "inputs"):
            found = value.get(name)
            entries = found.values() if isinstance(found, Mapping) else found if isinstance(found, list) else ()
            for entry in entries:
                if isinstance(entry, str) and re.fullmatch(_MODEL, _plain(entry)):
                    yield _plain(entry)
        for inner in value.values():
            yield from _values(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner)


def _plain(name: str) -> str:
    return name.strip().replace("\\", "/")


def _known_url(name: str) -> str:
    base = name.rpartition("/")[2]
    exact = (card.downloads[base] for card in architectures() if base in card.downloads)
    return next(exact, "")
