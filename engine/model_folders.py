"""Where model files are: ComfyUI's folder layout, several roots, the pack's own demo files last."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.folders import MODEL_FOLDERS, model_folders
from ..host import POLICY_FOLDER

__all__ = ["DEMO", "FileList", "ModelFolders"]

DEMO = Path(__file__).parent.parent / "demo"

# ComfyUI's name for a kind of file -> the folders it is looked for in, under each root.
SUBFOLDERS: dict[str, tuple[str, ...]] = {
    "diffusion_models": ("diffusion_models", "unet"),
    "text_encoders": ("text_encoders", "clip"),
    "vae": ("vae",),
    "loras": ("loras",),
    "checkpoints": ("checkpoints",),
    "embeddings": ("embeddings",),
    POLICY_FOLDER: (POLICY_FOLDER,),
}
EXTENSIONS = (".safetensors", ".sft", ".ckpt", ".pt", ".pt2", ".bin", ".pth", ".pkl", ".gguf")
# Folders of other things than weights.
OTHER_EXTENSIONS = {POLICY_FOLDER: (".toml",)}


class FileList(list):
    """File names offered to a node, which remembers the folder they are from."""

    def __init__(self, names: Iterable[str], folder: str):
        super().__init__(names)
        self.folder = folder


Root = str | os.PathLike | Mapping[str, Any]


class ModelFolders:
    """Roots are searched in order, the demo files last. Each is a folder in the layout of ComfyUI's models, or what an
    entry of its file of extra paths says.

    Raises FileNotFoundError for a folder that does not exist.
    """

    # An entry of extra_model_paths.yaml: {"base_path": ..., "diffusion_models": "unet", "loras": ["a", "b"]}.

    def __init__(self, roots: Root | Iterable[Root] | None = None):
        if roots is None:
            roots = ()
        elif isinstance(roots, (str, os.PathLike, Mapping)):
            roots = (roots,)
        self.roots: list[Path] = []
        self._places: list[Mapping[str, list[Path]] | Path] = []
        for root in roots:
            if isinstance(root, Mapping):
                self._places.append(_named_folders(root))
                continue
            if not Path(root).is_dir():
                raise FileNotFoundError(f"{root}: no such models folder; name the folder that holds diffusion_models")
            self.roots.append(Path(root))
            self._places.append(Path(root))
        self._listed: dict[str, dict[str, Path]] = {}
        self._models: dict[str, Path] | None = None

    def _folders(self, folder: str) -> Iterator[Path]:
        for place in [*self._places, DEMO]:
            for subfolder in SUBFOLDERS.get(folder, (folder,)):
                if isinstance(place, Path):
                    yield place / subfolder
                else:
                    yield from place.get(subfolder, ())

    def files(self, folder: str) -> dict[str, Path]:
        """Name as ComfyUI shows it (with / between folders) -> path. The first root that has a name wins."""
        if folder not in self._listed:
            found: dict[str, Path] = {}
            for place in self._folders(folder):
                for name, path in _walk(place, OTHER_EXTENSIONS.get(folder, EXTENSIONS)):
                    found.setdefault(name, path)
            self._listed[folder] = found
        return self._listed[folder]

    def list(self, folder: str) -> FileList:
        return FileList(sorted(self.files(folder), key=str.lower), folder)

    def model_folders(self) -> dict[str, Path]:
        """ "FOLDER/NAME" -> path of the diffusers folders and sharded models; the first root that has a name wins."""
        if self._models is None:
            self._models = {}
            for kind in MODEL_FOLDERS:
                for place in self._folders(kind):
                    for name, path in model_folders(place):
                        self._models.setdefault(f"{kind}/{name}", path)
        return self._models

    def find(self, folder: str, name: str) -> str:
        """The listed name that ``name`` means. Workflows come from other systems: ``\\`` is read as ``/``, letter case
        is forgiven, and a bare file name finds its only namesake in a subfolder.

        Raises ValueError that names the folders searched, or the candidates when several fit.
        """
        files = self.files(folder)
        wanted = "/".join(part for part in str(name).replace("\\", "/").split("/") if part not in ("", "."))
        for same in (str, str.lower):
            fits = [known for known in files if same(known) == same(wanted)]
            if len(fits) == 1:
                return fits[0]
        base = wanted.rsplit("/", 1)[-1].lower()
        fits = [known for known in files if known.rsplit("/", 1)[-1].lower() == base]
        if len(fits) == 1:
            return fits[0]
        if fits:
            raise ValueError(f"{name!r} is ambiguous in {folder}: {', '.join(sorted(fits))}; write one of these")
        raise ValueError(self._missing(folder, str(name)))

    def _missing(self, folder: str, name: str) -> str:
        import difflib

        places = [str(root / SUBFOLDERS.get(folder, (folder,))[0]) for root in self.roots]
        where = f"put it into {places[0]}" if places else "say where your models are with --models-dir (models_dir=)"
        files = self.files(folder)
        close = difflib.get_close_matches(name, files, n=3, cutoff=0.5)
        elsewhere = [kind for kind in SUBFOLDERS if kind != folder and name in self.files(kind)]
        message = f"file {name!r} is not among the {folder}; {where}"
        if elsewhere:
            message += f"; there is one of that name in {', '.join(elsewhere)}"
        if close:
            message += f"; similar: {', '.join(close)}"
        return message

    def path(self, folder: str, name: str) -> Path:
        """Raises ValueError as ``find``."""
        return self.files(folder)[self.find(folder, name)]


def _named_folders(entry: Mapping[str, Any]) -> dict[str, list[Path]]:
    base = Path(os.path.expanduser(entry.get("base_path") or ""))
    folders = {}
    for kind, paths in entry.items():
        if kind not in ("base_path", "is_default"):
            # The YAML file writes several folders as lines of one text.
            lines = str(paths).splitlines() if isinstance(paths, (str, os.PathLike)) else paths
            folders[kind] = [base / os.path.expanduser(line) for line in map(str, lines) if str(line).strip()]
    return folders


def _walk(folder: Path, extensions: tuple[str, ...]):
    """(name, path) of the model files under a folder; links to folders are followed once each."""
    if not folder.is_dir():
        return
    seen: set[str] = set()
    for base, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(base)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.lower().endswith(extensions):
                path = Path(base) / name
                yield path.relative_to(folder).as_posix(), path
