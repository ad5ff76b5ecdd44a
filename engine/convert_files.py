"""The part of the engine's Host that converts models on disk."""

from __future__ import annotations

import os
from pathlib import Path

from ..checkpoints.folders import ALL, state_of
from ..host import AUTO, Saved
from .model_files import ModelFiles

__all__ = ["ConvertedFiles"]


class ConvertedFiles(ModelFiles):
    """Mixed into EngineHost."""

    def list_model_folders(self) -> list[str]:
        return list(self.folders.model_folders())

    def fingerprint_source(self, source: str) -> str:
        try:
            return state_of(self._source(source))
        except ValueError:
            return "missing"

    def convert_checkpoint(
        self, source: str, *, prefix: str, layout: str = "comfy", component: str = AUTO, architecture: str = AUTO
    ) -> Saved:
        from ..checkpoints.convert import convert

        path = self._source(source)
        to_folder = layout == "diffusers" or component == ALL
        target, shown = self._new_file(prefix, None, "" if to_folder else ".safetensors")
        with self.progress.bar(0, f"convert {path.name}", unit="B") as bar:

            def advance(done: int, total: int, key: str) -> None:
                bar.to(done, total)

            report = convert(
                path,
                target,
                layout=layout,
                component=None if component == AUTO else component,
                architecture=None if architecture == AUTO else architecture,
                progress=advance,
            )
        if to_folder:
            first = min(target.rglob("*.safetensors"))
            inside = Path(os.path.relpath(first.parent, os.path.realpath(self.output_dir)))
            shown = {"filename": first.name, "subfolder": inside.as_posix(), "type": "output"}
        for line in (str(report), *report.notes):
            self.progress.note(line)
        return Saved(str(target), "\n".join([str(report), *report.notes]), shown)

    def _source(self, name: str) -> Path:
        """The file or folder of a name as the node lists it. Raises ValueError for every other one."""
        folder = self.folders.model_folders().get(name)
        return folder if folder is not None else self._file(name)
