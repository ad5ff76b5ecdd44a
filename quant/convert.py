"""quantize: from a float file to a quantized one, one piece in memory at a time."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..files import Source, open_source
from .canonical import add_canonical, entry_bytes, kept_metadata
from .errors import QuantError
from .formats import FORMATS, Recipe, parse_recipe
from .kitchen import layout_of
from .layer import Layer
from .markers import MARKER, Record, encode_marker
from .measure import sampled_error
from .output import Assembly, assemblies_for, write_output
from .policy import CardPolicy, Decision, Policy, decide, read_policy
from .quantizer import Quantizer, Rows, compute_dtype
from .reader import QuantizedFile, read_quantized, settle_conflicts
from .report import QuantizationReport
from .stream import Meter, Progress

__all__ = ["quantize", "source_identity"]


def source_identity(source: Source, full: bool = False) -> dict[str, Any]:
    """Tells the source apart from other files: hash of its headers and sizes; with ``full`` also of all its bytes."""
    digest = hashlib.sha256()
    size = 0
    for part in source.parts:
        with open(part.path, "rb") as file:
            digest.update(file.read(part.data_start))
        size += part.file_size
    identity: dict[str, Any] = {
        "name": os.path.basename(os.path.normpath(source.path)),
        "size": size,
        "header_sha256": digest.hexdigest(),
    }
    if full:
        whole = hashlib.sha256()
        for part in source.parts:
            with open(part.path, "rb") as file:
                while block := file.read(8 << 20):
                    whole.update(block)
        identity["sha256"] = whole.hexdigest()
    return identity


def quantize(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    format: str | Recipe | None = None,
    policy: str | os.PathLike | Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
    card_policy: CardPolicy | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    keep_edges: int = 0,
    requantize: bool = False,
    fast_matmul: bool = False,
    hash_source: bool = False,
    dry_run: bool = False,
    detect: Callable[[Mapping[str, tuple[int, ...]]], Any] | None = None,
) -> QuantizationReport:
    """Quantize the weights of a file or folder that the policy chooses; everything else is copied byte for byte.

    ``format`` a ComfyUI format name, the alias ``int8_convrot``, or either with switches (`parse_recipe`); may come
    from the policy file. ``card_policy`` the architecture's rules; ``include``/``exclude`` globs over layer names;
    ``keep_edges`` first and last blocks kept; ``requantize`` accepts a source that is quantized already;
    ``fast_matmul`` leaves out ``full_precision_matrix_mult`` of float8 layers; ``detect`` maps shapes to an identity
    that the result must share with the source. ``progress(done_bytes, total_bytes, layer)``.

    Raises QuantError (source already quantized or unreadable, NaN weights), FileError, OutputError, ValueError
    (unknown format, pattern without a match).
    """
    started = time.monotonic()
    target_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with open_source(source) as opened:
        found = read_quantized(opened)
        plan = policy_of(format, policy, card_policy, include, exclude, keep_edges, fast_matmul)
        layout_of(plan.recipe.format)
        layers = usable_layers(opened, found, requantize)
        decisions = decide_layers(opened, found, layers, plan, detect)
        report = QuantizationReport(
            opened.path,
            os.fspath(destination),
            str(plan.recipe),
            decisions,
            sum(info.nbytes for info in opened.tensors.values()),
        )
        if not report.quantized:
            report.warnings.append("the policy chose no layer; see the reasons with --dry-run")
        assemblies, records = assemble(opened, destination, found, layers, decisions, target_device)
        report.bytes_after = sum(entry_bytes(assembly) for assembly in assemblies)
        if dry_run:
            return report
        record = Record(str(plan.recipe), plan.name, source_identity(opened, hash_source), records)
        meter = Meter(sum(assembly.read_bytes for assembly in assemblies), progress)
        write_output(opened, destination, assemblies, lambda _: kept_metadata(opened, record), meter)
        report.written = True
        report.seconds = time.monotonic() - started
        return report


def policy_of(format, policy, card, include, exclude, keep_edges, fast_matmul) -> Policy:
    chosen = read_policy(policy)
    name = format or chosen.format or (card.layout if card else "")
    if not name:
        raise ValueError("name a format: " + ", ".join([*FORMATS, "int8_convrot"]))
    recipe = _with_safe_products(parse_recipe(name), fast_matmul)
    rules = tuple(
        replace(rule, recipe=_with_safe_products(rule.recipe, fast_matmul)) if rule.recipe else rule
        for rule in chosen.rules
    )
    return Policy(
        recipe,
        rules,
        (*include, *chosen.include),
        (*exclude, *chosen.exclude),
        keep_edges or chosen.keep_edges or 0,
        chosen.min_weights,
        chosen.max_error,
        card,
        chosen.name if policy is not None else "card" if card and card.blocks else "generic",
    )


def _with_safe_products(recipe: Recipe, fast_matmul: bool) -> Recipe:
    """float8 without a calibrated input scale: ComfyUI would cast activations at scale 1 and clip the large ones."""
    return replace(recipe, full_precision=recipe.format.startswith("float8") and not fast_matmul)


def usable_layers(source: Source, found: QuantizedFile, requantize: bool) -> dict[str, Layer]:
    """The layers that are quantized already, by weight key. Raises QuantError."""
    settle_conflicts(source, found)
    found.refuse_problems()
    layers = {layer.keys["weight"]: layer for layer in found.layers.values() if layer.dialect != "cast"}
    if layers and not requantize:
        first = next(iter(layers.values()))
        raise QuantError(
            source.path,
            f"is quantized already ({len(layers)} layers, {first.name!r} as {first.recipe}). Start from the original, "
            "or pass requantize (--requantize) and accept the loss",
        )
    return layers


def decide_layers(source, found: QuantizedFile, layers: dict[str, Layer], plan: Policy, detect) -> list[Decision]:
    side = set(found.notes_keys) | {
        key for layer in layers.values() for suffix, key in layer.keys.items() if suffix != "weight"
    }
    tensors = {}
    for key, info in source.tensors.items():
        if key in side:
            continue
        layer = layers.get(key)
        if layer is None:
            shape = plan.card.matrix_shape(key, info.shape) if plan.card else info.shape
            tensors[key] = (info.dtype, shape, info.nbytes)
        else:
            stored = sum(source.info(own).nbytes for own in layer.keys.values())
            tensors[key] = ("BF16", layer.shape, stored)
    measure = None
    if plan.max_error is not None:

        def measure(key: str, recipe: Recipe) -> float:
            dtype = compute_dtype("BF16" if key in layers else source.info(key).dtype)
            rows = Rows(source, key, tensors[key][1], dtype, layers.get(key))
            return sampled_error(rows.load, rows.shape, recipe, rows.dtype)

    decisions = decide(tensors, plan, measure)
    if detect is None:
        return decisions
    return _keep_detected(decisions, {key: shape for key, (_, shape, _) in tensors.items()}, detect, source.path)


def _keep_detected(decisions: list[Decision], shapes: dict[str, tuple[int, ...]], detect, path: str) -> list[Decision]:
    """Keeps the layers whose stored shape would change what the file is taken for."""
    identity = detect(shapes)

    def stored(chosen: Iterable[Decision]) -> dict[str, tuple[int, ...]]:
        changed = dict(shapes)
        for decision in chosen:
            if decision.recipe is not None:
                entries = FORMATS[decision.recipe.format].entries(decision.shape, decision.recipe)
                changed[decision.key] = entries["weight"][1]
        return changed

    if detect(stored(decisions)) == identity:
        return decisions

    def culprits(group: list[Decision]) -> list[Decision]:
        """Halving: a model has hundreds of layers, and one or two of them matter."""
        if not group or detect(stored(group)) == identity:
            return []
        if len(group) == 1:
            return group
        middle = len(group) // 2
        return culprits(group[:middle]) + culprits(group[middle:])

    changed = {
        decision.key for decision in culprits([decision for decision in decisions if decision.recipe is not None])
    }
    result = [
        decision.kept("model detection reads its width, which this format changes")
        if decision.key in changed
        else decision
        for decision in decisions
    ]
    if detect(stored(result)) != identity:
        raise QuantError(
            path, "would not be recognised as the same architecture after quantization; use another format"
        )
    return result


def assemble(source, destination, found: QuantizedFile, layers, decisions, device):
    assemblies, assembly_of = assemblies_for(source, destination)
    records: dict[str, dict[str, Any]] = {}
    consumed = set(found.notes_keys)
    by_key = {decision.key: decision for decision in decisions}
    for key, layer in layers.items():
        consumed.update(own for own in layer.keys.values() if own != key)
    for key in source:
        if key in consumed:
            continue
        assembly, decision, layer = assembly_of(key), by_key.get(key), layers.get(key)
        if decision is not None and decision.recipe is not None:
            _add_quantized(assembly, source, decision, layer, device, records)
        elif layer is not None:
            add_canonical(assembly, source, layer)
        elif source.info(key).dtype.startswith("F8_E") and (
            len(source.info(key).shape) < 2 or not key.endswith(".weight")
        ):
            # A plain float8 cast of a bias, a norm or a table meets float tensors in plain arithmetic and fails there.
            assembly.cast(key, torch.bfloat16)
        else:
            assembly.copy(key)
    return assemblies, records


def _add_quantized(assembly: Assembly, source: Source, decision: Decision, layer, device, records) -> None:
    stored = "BF16" if layer is not None else decision.dtype
    rows = Rows(source, decision.key, decision.shape, compute_dtype(stored), layer)
    experts = decision.shape[0] if len(decision.shape) == 3 else None
    marker = decision.recipe.marker(experts)
    record = {"marker": marker, "shape": list(decision.shape), "crc32": "0" * 8}
    records[decision.layer] = record
    quantizer = Quantizer(rows, decision.layer, decision.recipe, device, record)
    entries = [(f"{decision.layer}.{suffix}", dtype, shape) for suffix, (dtype, shape) in quantizer.entries.items()]
    count = rows.dtype.itemsize
    for size in decision.shape:
        count *= size
    assembly.computed(entries, quantizer.step, count)
    assembly.constant(f"{decision.layer}.{MARKER}", encode_marker(marker))
