"""Reads which module imports what from the source alone, and holds it against the arrows of docs/architecture.md."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# From the bottom up; a part imports its own layer and those before it.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"files"}),
    frozenset({"quant"}),
    frozenset({"ldm", "text_encoders", "autoencoders", "latent_formats"}),
    frozenset({"supported_models", "checkpoints"}),
    frozenset({"host", "api"}),
    frozenset({"nodes", "bridge", "engine", "parity"}),
    frozenset({"cli", "__init__", "__main__"}),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
# These never import each other: a node gets a Host, and each host is complete without the other.
SEPARATE = LAYERS[5]

COMFYUI = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "comfyui_version"}
COMFYUI |= {"folder_paths", "server", "nodes", "execution", "latent_preview"}
BASE = {"torch", "safetensors", "numpy", "comfy_kitchen"}
# Present in ComfyUI or named in an extra, but slow or optional: only inside the function that needs them.
LAZY = {
    "quant": {"tomli"},
    "text_encoders": {"tokenizers", "sentencepiece", "ftfy"},
    "checkpoints": {"huggingface_hub", "yaml"},
    "engine": {"diffusers", "transformers", "torchsde"},
}
THIRD_PARTY = {
    **{part: BASE for parts in LAYERS[:5] for part in parts},
    "quant": BASE | LAZY["quant"],
    "text_encoders": BASE | LAZY["text_encoders"],
    "checkpoints": BASE | LAZY["checkpoints"],
    "nodes": BASE,
    "bridge": BASE | COMFYUI | {"PIL"},
    "engine": BASE | LAZY["engine"] | {"PIL", "tqdm"},
    "parity": BASE,
    "cli": {"tqdm"},
    "__init__": set(),
    "__main__": set(),
}
# The one module that hands ComfyUI's schema classes to the nodes.
NODE_IO = "nodes/io.py"
DEVELOPERS_ONLY = {"tests", "benchmarks", "scripts"}


@dataclass(frozen=True)
class Import:
    """One imported name: `top` outside the pack, or a `part` inside it."""

    where: str
    top: str | None
    part: str | None
    at_import_time: bool


@dataclass(frozen=True)
class Module:
    root: Path
    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(self.root).as_posix()

    @property
    def part(self) -> str:
        """The folder (or, at the top, the file) that the layers speak of; `cli_quantize.py` is part of the cli."""
        return part_named(self.name.split("/")[0].removesuffix(".py"))

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), self.name)

    @property
    def imports(self) -> Iterator[Import]:
        yield from self._walk(self.tree, at_import_time=True)

    def _walk(self, node: ast.AST, at_import_time: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            yield from self._named_by(child, at_import_time)
            deferred = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or _for_types_only(child)
            yield from self._walk(child, at_import_time and not deferred)

    def _named_by(self, node: ast.AST, at_import_time: bool) -> Iterator[Import]:
        where = f"{self.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(where, alias.name.split(".")[0], None, at_import_time)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield Import(where, (node.module or "").split(".")[0], None, at_import_time)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield from self._relative(where, node.level, node.module, alias.name, at_import_time)
        elif isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"} and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                dotted = target.value.lstrip(".")
                if level := len(target.value) - len(dotted):
                    yield from self._relative(where, level, dotted, "*", at_import_time)
                else:
                    yield Import(where, dotted.split(".")[0], None, at_import_time)

    def _relative(self, where: str, level: int, module: str | None, name: str, now: bool) -> Iterator[Import]:
        package = list(self.path.relative_to(self.root).parts[:-1])
        if level > len(package) + 1:
            yield Import(where, "(above the package)", None, now)
            return
        target = package[: len(package) - level + 1] + (module.split(".") if module else [])
        if target:
            yield Import(where, None, part_named(target[0]), now)
        elif name != "__version__":
            yield Import(where, None, name if name in LEVEL else "__init__", now)


def part_named(name: str) -> str:
    """`cli_quantize` is part of the cli; every other name at the top is a part of its own."""
    return "cli" if name.startswith("cli_") else name


def _part(name: str) -> str:
    return "cli" if name.startswith("cli_") else name


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _for_types_only(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    return (test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")) == "TYPE_CHECKING"


def modules(root: Path) -> list[Module]:
    """The pack's own modules, without what only developers run."""
    skipped = DEVELOPERS_ONLY | {"build", "dist", "output", "node_modules", "docs"}
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if parts[0] not in skipped and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            found.append(Module(root, path))
    return found


def wrong_arrows(root: Path) -> list[str]:
    """Imports that point up, across, or to a package the part has no right to: a sentence each, with file and line."""
    problems = []
    for module in modules(root):
        part = module.part
        if part not in LEVEL:
            problems.append(f"{module.name}: {part} has no layer; docs/architecture.md and LAYERS say where it belongs")
            continue
        for found in module.imports:
            if found.part is not None:
                problems += _inside(part, found)
            elif found.top not in sys.stdlib_module_names:
                problems += _outside(module, part, found)
    return problems


def _inside(part: str, found: Import) -> list[str]:
    target = found.part
    if target not in LEVEL:
        return [f"{found.where}: {target} has no layer"]
    if LEVEL[target] > LEVEL[part]:
        return [f"{found.where}: {part} imports {target}, which lies above it"]
    if target != part and {part, target} <= SEPARATE:
        return [f"{found.where}: {part} imports {target}; these two stand side by side and never meet"]
    return []


def _outside(module: Module, part: str, found: Import) -> list[str]:
    if found.top == "comfy_api" and module.name == NODE_IO:
        return []
    if found.top == "nativedit":
        return [f"{found.where}: imports nativedit by name, which is not importable inside ComfyUI; import relatively"]
    if found.top not in THIRD_PARTY[part]:
        return [f"{found.where}: {part} imports {found.top}"]
    if found.at_import_time and found.top in LAZY.get(part, ()):
        return [f"{found.where}: {found.top} at import time; import it in the function that needs it"]
    if found.at_import_time and part == "supported_models":
        return [f"{found.where}: a card imports {found.top} at import time; cards are data"]
    return []
