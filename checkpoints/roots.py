"""Where models lie: ComfyUI's folders under one or more roots, and those of extra_model_paths.yaml."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..files.errors import FileError

EXTRA_PATHS = "extra_model_paths.yaml"
# ComfyUI's name of a kind of file -> folders under models/, in its order. Other kinds have a folder of their own name.
FOLDERS: dict[str, tuple[str, ...]] = {
    "diffusion_models": ("diffusion_models", "unet"),
    "text_encoders": ("text_encoders", "clip"),
    "controlnet": ("controlnet", "t2i_adapter"),
}
_OLD_NAMES = {"unet": "diffusion_models", "clip": "text_encoders"}
EXTENSIONS = (".safetensors", ".sft", ".ckpt", ".pt", ".pt2", ".bin", ".pth", ".pkl", ".gguf")


def kind_of_folder(name: str) -> str:
    """ComfyUI's present name for a folder: "unet" is "diffusion_models"."""
    return _OLD_NAMES.get(name, name)


@dataclass(frozen=True)
class Found:
    """A file: ``name`` relative to its folder, with ``/``; ``kind``: ComfyUI's name of the folder."""

    kind: str
    name: str
    path: Path


@dataclass
class ModelRoots:
    """The folders in which ComfyUI looks for models, and what a walk through them could not enter or follow."""

    # ComfyUI's models folder.
    models_dir: Path
    # Kind -> further folders.
    extra: dict[str, list[Path]] = field(default_factory=dict)
    # Filled by looking: what a walk could not enter, and links that lead nowhere.
    unreadable: list[Path] = field(default_factory=list)
    broken: list[Path] = field(default_factory=list)

    def kinds(self) -> list[str]:
        """The kinds of which there is a folder."""
        names = [*FOLDERS, *(child.name for child in _folders_in(self.models_dir)), *self.extra]
        return list(dict.fromkeys(kind_of_folder(name) for name in names))

    def folders(self, kind: str) -> list[Path]:
        """Folders of one kind, in the order in which ComfyUI asks them."""
        kind = kind_of_folder(kind)
        own = [self.models_dir / name for name in FOLDERS.get(kind, (kind,))]
        first = [path for path in self.extra.get(f"{kind}!", ())]
        return [*first, *own, *self.extra.get(kind, ())]

    def files(self, kind: str) -> Iterator[Found]:
        """Every model file of a kind, folder by folder; a folder that two links reach is entered once."""
        for folder in self.folders(kind):
            for name, path in self._walk(folder):
                yield Found(kind_of_folder(kind), name, path)

    def _walk(self, folder: Path) -> Iterator[tuple[str, Path]]:
        seen: set[str] = set()

        def note(error: OSError) -> None:
            # A kind without a folder is no problem; one that can't be read is.
            if not isinstance(error, FileNotFoundError) and error.filename is not None:
                self._once(self.unreadable, Path(error.filename))

        for base, folders, names in os.walk(folder, followlinks=True, onerror=note):
            real = os.path.realpath(base)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                path = Path(base) / name
                if not name.lower().endswith(EXTENSIONS):
                    continue
                if path.is_file():
                    yield path.relative_to(folder).as_posix(), path
                elif path.is_symlink():
                    self._once(self.broken, path)

    @staticmethod
    def _once(places: list[Path], path: Path) -> None:
        if path not in places:
            places.append(path)


def open_roots(models_dir: str | os.PathLike, extra_paths: str | os.PathLike | None = None) -> ModelRoots:
    """The models folder, or ComfyUI's own folder above it. The file of extra paths is, unless it is named, the one that
    ComfyUI would load, if there is one. Raises FileNotFoundError and FileError."""
    # That one is extra_model_paths.yaml beside models/.
    folder = Path(models_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; name ComfyUI's models folder")
    if folder.name != "models" and (folder / "models").is_dir():
        folder = folder / "models"
    file = Path(extra_paths) if extra_paths is not None else folder.parent / EXTRA_PATHS
    if extra_paths is not None and not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    return ModelRoots(folder, read_extra_paths(file) if file.is_file() else {})


def read_extra_paths(file: Path) -> dict[str, list[Path]]:
    """The folders that ComfyUI's file of extra paths names, by kind; those it marks as the default have their kind with
    an exclamation mark. Raises FileError, and ImportError when there is no library to read it."""
    try:
        import yaml
    except ImportError:
        raise ImportError(f"{file}: reading it needs the package pyyaml: pip install pyyaml") from None
    with open(file, encoding="utf-8") as opened:
        try:
            content = yaml.safe_load(opened)
        except UnicodeDecodeError:
            raise FileError(file, "is not UTF-8 text; save it as UTF-8, which ComfyUI wants too") from None
        except yaml.YAMLError as error:
            raise FileError(file, f"is not valid YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, Mapping):
        raise FileError(file, "is not a list of sections with folders in them; see extra_model_paths.yaml.example")
    found: dict[str, list[Path]] = {}
    for section in content.values():
        if not isinstance(section, Mapping):
            continue
        base = Path(os.path.expandvars(os.path.expanduser(str(section.get("base_path") or ""))))
        mark = "!" if section.get("is_default") else ""
        for kind, lines in section.items():
            if kind in ("base_path", "is_default"):
                continue
            for line in str(lines).splitlines():
                if line.strip():
                    path = file.parent.absolute() / base / os.path.expanduser(line.strip())
                    found.setdefault(kind_of_folder(str(kind)) + mark, []).append(Path(os.path.normpath(path)))
    return found


def _folders_in(folder: Path) -> Iterable[Path]:
    try:
        return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    except OSError:
        return []
