"""Diffusion models from one layout into another: which tensor comes from where, and the configuration beside it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..files.errors import FileError
from ..supported_models import Match, Run, Target, TwoWayMap, import_dotted
from .fill import check_keys, fit, some
from .load import recognise
from .moves import Move
from .opened import Checkpoint
from .stored_config import is_config

# Header entry that holds a diffusers folder's config.json while the weights are in one file.
CONFIG_ENTRY = "nativedit.config"
# Arguments that count blocks: a config.json that counts differently belongs to other weights.
_COUNTS = ("num_layers", "num_single_layers", "n_layers", "num_refiner_layers", "n_refiner_layers")


def to_comfy(checkpoint: Checkpoint, architecture: str | None = None) -> tuple[Match, Move, dict[str, str]]:
    """(whose, what to write without a prefix, header entries). Raises FileError: missing or unknown keys, by name."""
    match = recognise(checkpoint, architecture=architecture)
    shapes = own_shapes(checkpoint, match)
    config = published_config(checkpoint)
    _check_counts(checkpoint, match, config)
    metadata: dict[str, str] = {}
    if config is not None:
        metadata[CONFIG_ENTRY] = json.dumps(config, sort_keys=True)
    two_way = match.architecture.two_way
    if two_way is None:
        targets = _native_targets(checkpoint, match, shapes)
        arguments = {k: v for k, v in _arguments(match, config).items() if k in _accepted(match)}
        metadata["config"] = json.dumps({"transformer": arguments}, sort_keys=True)
        return match, Move(checkpoint, targets), metadata
    constants: dict[str, torch.Tensor] = {}
    if match.layout is two_way:
        _refuse(checkpoint, match, *two_way.problems_theirs(shapes))
        targets = two_way.to_ours(shapes)
    else:
        _refuse(checkpoint, match, *two_way.problems_ours(shapes))
        targets = [
            Target(two_way.spelled(key), shape, (Run(key),))
            for key, shape in shapes.items()
            if not two_way.is_ignored(key)
        ]
    for key, function in two_way.computed.items():
        # A repackaged file may lack what can be worked out.
        if match.layout is two_way or key not in shapes:
            constants[key] = import_dotted(function)({**match.config, **(config or {})})
    for key, argument in two_way.flags.items():
        if key not in shapes and (config or {}).get(argument):
            constants[key] = torch.empty(0)
    return match, Move(checkpoint, _prefixed(targets, match.prefix), constants), metadata


def to_diffusers(checkpoint: Checkpoint, architecture: str | None = None) -> tuple[Match, Move, dict[str, Any]]:
    """(whose, what to write, config.json). Raises FileError as ``to_comfy``."""
    match = recognise(checkpoint, architecture=architecture)
    shapes = own_shapes(checkpoint, match)
    known = published_config(checkpoint)
    _check_counts(checkpoint, match, known)
    two_way = match.architecture.two_way
    if two_way is None:
        targets = _published(match, _native_targets(checkpoint, match, shapes))
    elif match.layout is two_way:
        _refuse(checkpoint, match, *two_way.problems_theirs(shapes))
        targets = _prefixed(_as_they_are(shapes, two_way), match.prefix)
    else:
        _refuse(checkpoint, match, *two_way.problems_ours(shapes))
        targets = _prefixed(two_way.to_theirs(shapes), match.prefix)
    config = {"_class_name": _class_name(match), **_arguments(match, known)}
    if known is not None:
        # As it was published; an argument that it left out stays out where there is nothing to say.
        config = {**{key: value for key, value in config.items() if value is not None}, **known}
    return match, Move(checkpoint, targets), config


def own_shapes(checkpoint: Checkpoint, match: Match) -> dict[str, tuple[int, ...]]:
    """The model's own keys, without the prefix. Raises FileError when the file holds other parts too."""
    others = [key for key in checkpoint.shapes if not key.startswith(match.prefix)]
    if others:
        raise FileError(
            checkpoint.path,
            f"holds more than the diffusion model under {match.prefix!r}: {len(others)} other keys ({some(others)}). "
            "Give a folder as destination to get one file per part",
        )
    return {key[len(match.prefix) :]: tuple(shape) for key, shape in checkpoint.shapes.items() if not is_config(key)}


def published_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """config.json beside the weights, or the copy of it in the header."""
    if checkpoint.source.config is not None:
        return dict(checkpoint.source.config)
    try:
        config = json.loads(checkpoint.source.metadata.get(CONFIG_ENTRY, "null"))
    except ValueError:
        return None
    return config if isinstance(config, dict) else None


def _native_targets(checkpoint: Checkpoint, match: Match, shapes: Mapping[str, tuple[int, ...]]) -> list[Target]:
    """Under the names of our module, checked against it key by key and shape by shape."""
    config = published_config(checkpoint) or {}
    known = {k: v for k, v in config.items() if k in _accepted(match)}
    module = match.architecture.module_class()(**{**match.config, **known}, device="meta", operations=torch.nn)
    expected = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    quantized = {layer.keys["weight"] for layer in checkpoint.quantized.layers.values()}
    targets = []
    for key, shape in shapes.items():
        for part in match.parts(match.prefix + key):
            stored = part.shape(shape)
            # A quantized 1x1 convolution stays the matrix that it is.
            own = stored if match.prefix + key in quantized else fit(expected, part.name, stored)
            targets.append(Target(part.name, own, _runs(match.prefix + key, part, shape), part.transposed))
    inexact = {layer.keys["weight"] for layer in checkpoint.quantized.layers.values() if not layer.exact}
    padded = {target.name for target in targets if any(run.key in inexact for run in target.runs)}
    found = {target.name: fit(expected, target.name, target.shape) for target in targets if target.name not in padded}
    check_keys(checkpoint.path, {k: v for k, v in expected.items() if k not in padded}, found)
    return targets


def _published(match: Match, targets: list[Target]) -> list[Target]:
    """Under the names of diffusers, where a card says that they are not ours: a bank of experts is a bare tensor there,
    turned the other way."""
    layout = next((layout for layout in match.architecture.layouts if layout.name == "diffusers"), None)
    if layout is None:
        return targets
    renamed = []
    for target in targets:
        bare = target.name.removesuffix(".weight")
        parts = layout.parts(bare)
        if bare != target.name and [part.name for part in parts] == [target.name]:
            turned = target.transposed != parts[0].transposed
            shape = parts[0].shape(target.shape)
            target = Target(bare, shape, target.runs, turned)
        renamed.append(target)
    return renamed


def _runs(key: str, part: Any, shape: tuple[int, ...]) -> tuple[Run, ...]:
    if part.count == 1 and not part.swapped:
        return (Run(key),)
    rows = shape[0] // part.count
    start = part.index * rows
    if not part.swapped:
        return (Run(key, start, start + rows),)
    half = rows // 2
    return (Run(key, start + half, start + rows), Run(key, start, start + half))


def _as_they_are(shapes: Mapping[str, tuple[int, ...]], two_way: TwoWayMap) -> list[Target]:
    return [Target(key, shape, (Run(key),)) for key, shape in shapes.items() if not two_way.is_ignored(key)]


def _prefixed(targets: Iterable[Target], prefix: str) -> list[Target]:
    """Runs name the keys of the file, which have its prefix."""
    return [
        Target(target.name, target.shape, tuple(Run(prefix + run.key, run.start, run.stop) for run in target.runs))
        for target in targets
    ]


def _class_name(match: Match) -> str:
    card = match.architecture
    return card.diffusers_class or (card.module or "").rpartition(":")[2]


def _arguments(match: Match, published: Mapping[str, Any] | None) -> dict[str, Any]:
    """Constructor arguments: what shapes tell, and what the publisher says beyond."""
    said = {key: value for key, value in (published or {}).items() if not key.startswith("_")}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in {**match.config, **said}.items()}


def _accepted(match: Match) -> Mapping[str, Any]:
    """What our module can be told. Publishers' files say more: a dropout, how their own code multiplies experts."""
    return inspect.signature(match.architecture.module_class().__init__).parameters


def _refuse(checkpoint: Checkpoint, match: Match, missing: list[str], unexpected: list[str]) -> None:
    problems = []
    if missing:
        problems.append(f"{len(missing)} weights of {match.architecture.title} are missing: {some(missing)}")
    if unexpected:
        problems.append(f"{len(unexpected)} keys are none of its: {some(unexpected)}")
    if problems:
        raise FileError(checkpoint.path, "; ".join(problems) + ". Is the file complete, and of this model?")


def _check_counts(checkpoint: Checkpoint, match: Match, config: Mapping[str, Any] | None) -> None:
    for name in _COUNTS:
        said, found = (config or {}).get(name), match.config.get(name)
        if said is not None and found is not None and said != found:
            lost = isinstance(said, int) and said > found
            problem = "a part is missing" if lost else "it is the config.json of another model"
            raise FileError(
                checkpoint.path, f"its config.json says {name} = {said}, the weights have {found}: {problem}"
            )
