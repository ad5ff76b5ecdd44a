"""A file's layers for people: what is stored how, how large, and what is wrong. From headers and markers alone."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..quant.describe import describe
from .info import CheckpointInfo, inspect_source
from .opened import Checkpoint

_LINES = 40


@dataclass(frozen=True)
class Entry:
    """One layer (a weight with its side tensors) or one lone tensor. ``format`` as in a recipe or a dtype's name."""

    name: str
    format: str
    nbytes: int
    problem: str = ""

    @property
    def block(self) -> str:
        """ "blocks.3" of "blocks.3.mlp.up", "" outside of repeated blocks."""
        found = re.search(r"(?:^|\.)((?:\w+\.)?\w+\.\d+)\.", f"{self.name}.")
        return found[1] if found else ""


@dataclass(frozen=True)
class Inspection:
    info: CheckpointInfo
    entries: tuple[Entry, ...]

    @property
    def problems(self) -> list[str]:
        return [f"{entry.name}: {entry.problem}" for entry in self.entries if entry.problem]

    def sizes(self) -> dict[str, int]:
        """Format -> bytes, the largest first."""
        sizes: dict[str, int] = {}
        for entry in self.entries:
            sizes[entry.format] = sizes.get(entry.format, 0) + entry.nbytes
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    def text(self) -> str:
        info = self.info
        lines = [
            f"{info.path}",
            f"{info.title}"
            + (f", {info.architecture}" if info.architecture else "")
            + (f" in the {info.layout} layout" if info.layout else ""),
            f"{info.parameters / 1e9:.3f} billion parameters, {info.nbytes / 1e9:.3f} GB, {info.tensors} tensors",
        ]
        if info.quantization.comfyui:
            lines.append(f"needs ComfyUI {info.quantization.comfyui} or newer")
        lines += ["", *(f"{name:<44} {size / 1e9:>9.3f} GB" for name, size in self.sizes().items())]
        problems = self.problems
        if problems:
            title = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
            lines += ["", f"{title}:", *(f"  {problem}" for problem in problems[:_LINES])]
        else:
            lines += ["", "no problems"]
        return "\n".join(lines)


def inspect_layers(checkpoint: Checkpoint) -> Inspection:
    """Raises QuantError when a header's quantization entry can't be understood."""
    source = checkpoint.source
    found = describe(source)
    problems = {problem.layer: f"[{problem.kind}] {problem.message}" for problem in found.problems}
    layers = {layer.name: layer for layer in found.layers}
    entries: dict[str, Entry] = {}
    for key, tensor in source.tensors.items():
        name = key.rpartition(".")[0]
        if name in layers:
            label, note = layers[name].recipe, ""
        elif name in problems:
            label, note = "unreadable", problems[name]
        else:
            name, label, note = key.removesuffix(".weight"), tensor.dtype, ""
            if tensor.dtype.startswith("F8_E") and len(tensor.shape) < 2:
                note = "float8 of one dimension: it fails in plain sums; Repair Checkpoint makes it bfloat16"
        before = entries.get(name)
        size = tensor.nbytes + (before.nbytes if before else 0)
        entries[name] = Entry(name, before.format if before else label, size, note)
    return Inspection(inspect_source(checkpoint), tuple(entries.values()))
