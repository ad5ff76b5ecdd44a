"""quantize: from a float file to a quantized one, one piece in memory at a time."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..files import Source, open_source
from ..files.writer import encode_header
from .budget import Budget
from .budgeted import decide_within, measured_decisions, plan_as_policy, summary_format
from .canonical import add_canonical, entry_bytes, kept_metadata
from .craft import PLAIN, Craft
from .device import device_named
from .errors import QuantError
from .formats import FORMATS, Recipe, parse_recipe
from .kitchen import require
from .layer import Layer
from .limits import Limits
from .markers import MARKER, Provenance, encode_marker
from .measure import sampled_error
from .output import Assembly, assemblies_for, write_output
from .policy import CardPolicy, Decision, Policy, decide, read_policy
from .quantizer import Rows, compute_dtype
from .reader import QuantizedFile, read_quantized, settle_conflicts
from .report import QuantizationReport
from .stream import Meter, Progress

__all__ = ["budget_of", "quantize", "source_identity"]


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
    # A ComfyUI format name, the alias int8_convrot, or either with switches (`parse_recipe`); may come from the policy.
    format: str | Recipe | None = None,
    policy: str | os.PathLike | Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    progress: Progress | None = None,  # called with bytes done, bytes in all, and the layer
    card_policy: CardPolicy | None = None,  # the architecture's rules
    include: Iterable[str] = (),  # globs over layer names, as `exclude`
    exclude: Iterable[str] = (),
    keep_edges: int = 0,  # first and last blocks kept
    requantize: bool = False,  # accepts a source that is quantized already
    fast_matmul: bool = False,  # leaves out full_precision_matrix_mult of float8 layers
    hash_source: bool = False,
    dry_run: bool = False,
    # Shapes -> an identity that the result must share with the source.
    detect: Callable[[Mapping[str, tuple[int, ...]]], Any] | None = None,
    target_size: str | int | None = None,  # a budget: "6GB", of the finished file
    min_sqnr: str | float | None = None,  # a budget: "35dB", see `allocation`
    formats: Iterable[str] = (),  # to choose from within a budget; default: `format`, or all
    limits: Limits | None = None,  # the device and the ComfyUI that must hold the result
    measure: bool = False,  # notes every layer's error in the report without a budget too
    # Layer -> mean square of each input channel, by which errors are then weighted.
    input_power: Mapping[str, torch.Tensor] | None = None,
    groups: Callable[[], Iterable[Sequence[str]]] = tuple,  # layers that must get the same format within a budget
    craft: Craft = PLAIN,  # arithmetic, calibration and rounding of the layers that are quantized
) -> QuantizationReport:
    """Quantize the weights of a file or folder that the policy chooses; everything else is copied byte for byte.

    A budget chooses the format of each layer: one of size gives the best quality that fits, one of quality the smallest
    file that keeps it.

    Raises QuantError when the source is quantized already, is unreadable or holds weights that are not numbers;
    FileError; OutputError; and ValueError for an unknown format, a pattern without a match, or a budget that can't be
    kept.
    """
    started = time.monotonic()
    target_device = device_named(device)
    with open_source(source) as opened:
        found = read_quantized(opened)
        budget = budget_of(target_size, min_sqnr, formats, format, policy, limits, fast_matmul)
        plan = policy_of(format, policy, card_policy, include, exclude, keep_edges, fast_matmul, budget)
        refuse_beyond(limits, [] if budget else [plan.recipe, *(rule.recipe for rule in plan.rules if rule.recipe)])
        for recipe in [plan.recipe] if budget is None else budget.recipes:
            require(recipe.format)
        layers = usable_layers(opened, found, requantize)
        if input_power is None:
            input_power = craft.powers(opened)
        identity = source_identity(opened, hash_source)

        def record_of(records: dict[str, dict[str, Any]], decisions: list[Decision], sqnr: float | None) -> Provenance:
            if budget is None:
                return Provenance(str(plan.recipe), plan.name, identity, records)
            note = {"budget": budget.note(), "sqnr": rounded(sqnr), "policy": plan_as_policy(decisions)}
            return Provenance(summary_format(decisions), plan.name, identity, records, note)

        def size_of(decisions: list[Decision], sqnr: float | None = 100.0) -> int:
            assemblies, records = assemble(opened, destination, found, layers, decisions, target_device, craft)
            metadata = kept_metadata(opened, record_of(records, decisions, sqnr))
            return sum(len(encode_header(one.entries, metadata)[0]) + entry_bytes(one) for one in assemblies)

        allocation, phases = None, None
        if budget is not None:
            allocation, phases = decide_within(
                opened,
                plan,
                budget,
                decide=lambda policy: decide_layers(opened, found, layers, policy, None),
                settle=lambda decisions: keep_detected(opened, found, layers, decisions, plan, detect),
                size_of=size_of,
                layers=layers,
                device=target_device,
                progress=progress,
                input_power=input_power,
                groups=groups(),
            )
            decisions = allocation.decisions
        else:
            decisions = decide_layers(opened, found, layers, plan, detect)
            if measure:
                keywords = {"layers": layers, "device": target_device, "progress": progress, "input_power": input_power}
                allocation, phases = measured_decisions(opened, decisions, **keywords)
        report = QuantizationReport(
            opened.path,
            os.fspath(destination),
            summary_format(decisions),
            decisions,
            sum(info.nbytes for info in opened.tensors.values()),
            measured=allocation,
            budget={} if budget is None else budget.note(),
            plan=plan_as_policy(decisions),
        )
        if not report.quantized:
            report.warnings.append(
                "the policy chose no layer; see the reasons with --dry-run"
                if budget is None
                else f"{budget}: every layer stays as it is, nothing needs to be quantized"
            )
        report.warnings.extend(craft.check(decisions))
        assemblies, records = assemble(opened, destination, found, layers, decisions, target_device, craft)
        report.bytes_after = sum(entry_bytes(assembly) for assembly in assemblies)
        report.file_size = size_of(decisions, report.sqnr)
        if dry_run:
            return report
        record = record_of(records, decisions, report.sqnr)
        total = sum(assembly.read_bytes for assembly in assemblies)
        meter = Meter(total, progress) if phases is None else phases.write(total)
        write_output(opened, destination, assemblies, lambda assembly: kept_metadata(opened, record), meter)
        report.written = True
        report.seconds = time.monotonic() - started
        return report


def budget_of(target_size, min_sqnr, formats, format, policy, limits: Limits | None, fast_matmul) -> Budget | None:
    """The budget that the options or the policy file ask for, None without one. Raises ValueError."""
    chosen = read_policy(policy)
    if target_size is None and min_sqnr is None:
        target_size, min_sqnr = chosen.target_size, chosen.min_sqnr
    named = tuple(formats) or ((format,) if format else ()) or chosen.formats
    named = named or ((chosen.format,) if chosen.format else ())
    budget = Budget.parse(target_size, min_sqnr, named, limits)
    if budget is None:
        if tuple(formats):
            raise ValueError("several formats need a budget that decides between them: target_size or min_sqnr")
        return None
    return replace(budget, recipes=tuple(_with_safe_products(recipe, fast_matmul) for recipe in budget.recipes))


def refuse_beyond(limits: Limits | None, recipes: Iterable[Recipe]) -> None:
    for recipe in recipes:
        problem = None if limits is None else limits.problem(recipe)
        if problem is not None:
            raise ValueError(f"the format {recipe} is not possible: {problem}")


def rounded(sqnr: float | None) -> float | None:
    """For JSON, which has no infinity."""
    return round(sqnr, 2) if sqnr is not None and math.isfinite(sqnr) else None


def policy_of(format, policy, card, include, exclude, keep_edges, fast_matmul, budget: Budget | None = None) -> Policy:
    chosen = read_policy(policy)
    name = budget.recipes[0] if budget is not None else format or chosen.format or (card.layout if card else "")
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


def weights_of(source, found: QuantizedFile, layers: dict[str, Layer], card: CardPolicy | None):
    """Name -> (dtype, logical shape, stored bytes) of what `decide` decides on."""
    side = set(found.notes_keys) | {
        key for layer in layers.values() for suffix, key in layer.keys.items() if suffix != "weight"
    }
    tensors = {}
    for key, info in source.tensors.items():
        if key in side:
            continue
        layer = layers.get(key)
        if layer is None:
            shape = card.matrix_shape(key, info.shape) if card else info.shape
            tensors[key] = (info.dtype, shape, info.nbytes)
        else:
            stored = sum(source.info(own).nbytes for own in layer.keys.values())
            tensors[key] = ("BF16", layer.shape, stored)
    return tensors


def decide_layers(source, found: QuantizedFile, layers: dict[str, Layer], plan: Policy, detect) -> list[Decision]:
    tensors = weights_of(source, found, layers, plan.card)
    measure = None
    if plan.max_error is not None:

        def measure(key: str, recipe: Recipe) -> float:
            dtype = compute_dtype("BF16" if key in layers else source.info(key).dtype)
            rows = Rows(source, key, tensors[key][1], dtype, layers.get(key))
            return sampled_error(rows.load, rows.shape, recipe, rows.dtype)

    return keep_detected(source, found, layers, decide(tensors, plan, measure), plan, detect)


def keep_detected(source, found, layers, decisions: list[Decision], plan: Policy, detect) -> list[Decision]:
    if detect is None:
        return decisions
    tensors = weights_of(source, found, layers, plan.card)
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


def assemble(source, destination, found: QuantizedFile, layers, decisions, device, craft: Craft = PLAIN):
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
            _add_quantized(assembly, source, decision, layer, device, records, craft)
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


def _add_quantized(assembly: Assembly, source: Source, decision: Decision, layer, device, records, craft) -> None:
    stored = "BF16" if layer is not None else decision.dtype
    rows = Rows(source, decision.key, decision.shape, craft.dtype(stored), layer)
    experts = decision.shape[0] if len(decision.shape) == 3 else None
    marker = craft.recipe(decision).marker(experts)
    record = {"marker": marker, "shape": list(decision.shape), "crc32": "0" * 8}
    records[decision.layer] = record
    quantizer = craft.quantizer(rows, decision, device, record)
    entries = [(f"{decision.layer}.{suffix}", dtype, shape) for suffix, (dtype, shape) in quantizer.entries.items()]
    count = rows.dtype.itemsize
    for size in decision.shape:
        count *= size
    assembly.computed(entries, quantizer.step, count)
    assembly.constant(f"{decision.layer}.{MARKER}", encode_marker(marker))
