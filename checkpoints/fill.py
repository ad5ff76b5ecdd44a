"""Loading a file's weights into a module built on meta: every key and shape is checked first, then assigned."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from ..autoencoders import fit_shape, fitted
from ..files.dtypes import parse_dtype
from ..files.errors import FileError
from ..quant.layer import Layer, canonical_tensors
from ..quant.markers import MARKER, encode_marker
from ..quant.reader import settle_conflicts
from ..quant.surgery import QuantizedWeight, split
from ..supported_models import Part
from .opened import Checkpoint

# The keys named in an error message; the rest is counted.
SHOWN = 5
_WEIGHT = ".weight"


def fill(
    module: torch.nn.Module,
    checkpoint: Checkpoint,
    names: Mapping[str, str | tuple[Part, ...]],
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    keep: Iterable[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Load ``names`` (key in the file -> key in the module, or the parts of it that are ours); nothing may be missing.

    Quantized layers stay quantized (the module's operations must know them) whatever ``dtype`` says; other floats
    become ``dtype``, except names that match ``keep`` (regular expressions), which become float32.
    """
    source, quantized = checkpoint.source, checkpoint.quantized
    places = {key: (Part(name),) if isinstance(name, str) else name for key, name in names.items()}
    expected = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    found = {
        part.name: fit(expected, part.name, part.shape(checkpoint.shapes[key]))
        for key, parts in places.items()
        for part in parts
    }
    settle_conflicts(source, quantized)
    quantized.refuse_problems()
    layers = {layer.keys["weight"]: layer for layer in quantized.layers.values() if layer.dialect != "cast"}
    padded = {part.name for key, layer in layers.items() if not layer.exact for part in places.get(key, ())}
    check_keys(checkpoint.path, {k: v for k, v in expected.items() if k not in padded},
               {k: v for k, v in found.items() if k not in padded})  # fmt: skip
    target = None if dtype is None else parse_dtype(dtype)
    total, done, state = sum(source.tensors[key].nbytes for key in places), 0, {}
    for key, parts in places.items():
        if key in layers:
            state.update({k: v.to(device) for k, v in _quantized(checkpoint, layers[key], parts)})
        else:
            whole = source.read(key)
            for part in parts:
                tensor = part.take(whole)
                if target is not None and tensor.is_floating_point():
                    kept = any(re.search(pattern, part.name) for pattern in keep)
                    tensor = tensor.to(torch.float32 if kept else target)
                elif tensor.ndim < 2 and tensor.dtype.itemsize == 1 and tensor.is_floating_point():
                    tensor = tensor.to(torch.bfloat16)  # a float8 norm or bias can't be used in arithmetic
                state[part.name] = fit_shape(tensor, expected[part.name]).to(device)
        done += source.tensors[key].nbytes
        if progress is not None:
            progress(done, total)
    try:
        module.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:  # what a quantized layer found wrong, by name
        raise FileError(checkpoint.path, str(error)) from error
    module.requires_grad_(False).train(False)


def _quantized(checkpoint: Checkpoint, layer: Layer, parts: tuple[Part, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """A quantized layer's tensors and marker under our names; a fused one is cut without requantizing."""
    if any(part.swapped for part in parts):
        raise FileError(
            checkpoint.path,
            f"layer {layer.name!r} is quantized and would have to be reordered; convert the unquantized file instead",
        )
    weight = QuantizedWeight(canonical_tensors(checkpoint.source, layer), layer.recipe, layer.shape)
    pieces = [weight] if len(parts) == 1 else split(weight, [layer.shape[0] // len(parts)] * len(parts))
    for part, piece in zip(parts, pieces, strict=True):
        name = part.name.removesuffix(_WEIGHT)
        for suffix, tensor in piece.tensors.items():
            yield f"{name}.{suffix}", tensor
        yield f"{name}.{MARKER}", encode_marker(piece.recipe.marker(layer.experts))


def fit(expected: Mapping[str, tuple[int, ...]], name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A weight's shape as the module has it, where only the ones of a 1x1 convolution are more or fewer."""
    return fitted(shape, expected[name]) if name in expected else tuple(shape)


def check_keys(path: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """One error that names the layers: missing, left over, or of another shape. Raises FileError."""
    missing = [key for key in expected if key not in found]
    unexpected = [key for key in found if key not in expected]
    wrong = [
        f"{key} is {list(found[key])}, expected {list(shape)}"
        for key, shape in expected.items()
        if key in found and tuple(found[key]) != tuple(shape)
    ]
    problems = []
    if missing:
        problems.append(f"{len(missing)} weights are missing: {some(missing)}")
    if unexpected:
        problems.append(f"{len(unexpected)} are unknown to this model: {some(unexpected)}")
    if wrong:
        problems.append(f"{len(wrong)} have the wrong shape: {some(wrong)}")
    if problems:
        raise FileError(path, "; ".join(problems) + ". Is the file complete, and for this model? Get it again.")


def some(items: Iterable[str]) -> str:
    items = list(items)
    return ", ".join(items[:SHOWN]) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")
