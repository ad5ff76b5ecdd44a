"""Which of ComfyUI's names ComfyUI's side of the pack uses, read from its source alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from import_walk import COMFYUI

WRAPPING = ("wrap_once", "remember_file")


def used_names(root: Path) -> list[str]:
    """Dotted names: what is read, called and subclassed, what is wrapped, and the methods that are overridden."""
    names, bases = set(), set()
    for file in sorted((root / "bridge").glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"), file.name)
        names |= set(_imported(tree)) | set(_attributes(tree)) | set(_wrapped(tree)) | set(_overridden(tree))
        bases |= set(_bases(tree))
    modules = {name for name in names if any(other.startswith(name + ".") for other in names)}
    return sorted((names - modules) | bases)


def _dotted(node: ast.AST) -> str | None:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id in COMFYUI:
        return ".".join([node.id, *reversed(parts)])
    return None


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] in COMFYUI:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _attributes(tree: ast.Module) -> Iterator[str]:
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner and (name := _dotted(node)):
            yield name


def _wrapped(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in WRAPPING:
            owner = _dotted(node.args[0])
            if owner:
                yield f"{owner}.{node.args[1].value}"


def _classes(tree: ast.Module) -> Iterator[tuple[str, ast.ClassDef]]:
    """(base class of ComfyUI's, class of ours)"""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from ((base, node) for base in map(_dotted, node.bases) if base)


def _bases(tree: ast.Module) -> Iterator[str]:
    return (base for base, _ in _classes(tree))


def _overridden(tree: ast.Module) -> Iterator[str]:
    for base, node in _classes(tree):
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
                yield f"{base}.{item.name}"
