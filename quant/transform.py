"""Changes how weights are stored on their way from any source into memory or into one file.

The same pieces in the same order as `convert.quantize`, so the bytes are those of a file quantized beforehand.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..files import SafetensorsWriter, Source
from ..files.dtypes import FLOAT_NAMES, name_of, parse_dtype
from ..files.memory import MemoryWriter
from ..files.writer import encode_header
from .budget import Budget
from .budgeted import decide_within, plan_as_policy, summary_format
from .canonical import entry_bytes
from .convert import assemble, budget_of, decide_layers, keep_detected, policy_of, rounded
from .craft import PLAIN, Craft
from .dequantize import add_dequantized
from .errors import QuantError
from .formats import FORMATS, Recipe
from .kitchen import layout_of
from .layer import Layer
from .limits import Limits
from .markers import HEADER_KEY, RECORD_KEY, Provenance, checksum
from .output import Assembly
from .policy import PREFIXES, CardPolicy, Decision, Policy, matches
from .reader import QuantizedFile, read_quantized, settle_conflicts
from .report import QuantizationReport
from .stream import Meter, Progress, Writing, run_tasks

__all__ = ["Plan", "Wish", "any_format", "plan_quantization", "plan_storage"]


@dataclass
class Plan:
    """What is to be done with a source, before a weight is read. ``report`` says what was decided, layer by layer;
    ``records`` is what is noted of every quantized layer, ``kept`` those of them that are copied, by their weight."""

    source: Source
    assembly: Assembly
    records: dict[str, dict[str, Any]]
    report: QuantizationReport
    record: Provenance = field(default_factory=Provenance)
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def changes_nothing(self) -> bool:
        """Whether the result would have the source's own tensors, byte for byte."""
        found = {name: (dtype, shape) for name, dtype, shape in self.assembly.entries}
        stored = {name: (info.dtype, info.shape) for name, info in self.source.tensors.items()}
        return len(self.records) == len(self.kept) and found == stored

    @property
    def file_size(self) -> int:
        """Bytes of the result as a file of its own, with the source's header and the record, as `convert` writes it."""
        identity = {"header_sha256": "0" * 64, **self.record.source}
        metadata = {key: value for key, value in self.source.metadata.items() if key not in (HEADER_KEY, RECORD_KEY)}
        metadata[RECORD_KEY] = replace(self.record, source=identity).encode()
        return len(encode_header(self.assembly.entries, metadata)[0]) + entry_bytes(self.assembly)

    def tensors(self, progress: Progress | None = None) -> dict[str, torch.Tensor]:
        """The result in memory. Besides it, some pieces of the source are held: a few hundred MB at most."""
        started = time.monotonic()
        memory = MemoryWriter(self.assembly.entries)
        with Summing(memory, self.kept) as writing:
            run_tasks(self.assembly.tasks(writing), Meter(self.assembly.read_bytes, progress))
        self._done(started)
        return memory.tensors

    def write(
        self, destination: str | os.PathLike, metadata: Mapping[str, str], progress: Progress | None = None
    ) -> None:
        """One safetensors file, complete or not at all; ``metadata`` and the record of quantized layers in its header.

        Raises OutputError."""
        started = time.monotonic()
        entries, sources = self.assembly.entries, [*self.source.paths, self.source.path]
        with SafetensorsWriter(destination, entries, self.header(metadata), sources=sources) as writer:
            with Summing(writer, self.kept) as writing:
                run_tasks(self.assembly.tasks(writing), Meter(self.assembly.read_bytes, progress))
            writer.replace_metadata(self.header(metadata))
        self.report.destination = os.fspath(destination)
        self._done(started)

    def header(self, metadata: Mapping[str, str]) -> dict[str, str]:
        """``metadata`` with the record; its checksums are right when everything was written."""
        if not self.records:
            return dict(metadata)
        return {**metadata, RECORD_KEY: self.record.encode()}

    def _done(self, started: float) -> None:
        self.report.written = True
        self.report.seconds = time.monotonic() - started


class Summing(Writing):
    """Notes the checksum of weights whose bytes pass by on the way from the source."""

    def __init__(self, writer: Any, records: Mapping[str, dict[str, Any]]):
        super().__init__(writer)
        self._records = records
        self._sums = dict.fromkeys(records, 0)

    def put(self, name: str, tensor: torch.Tensor, offset: int = 0, then: Any = None) -> None:
        if then is None and name in self._records:
            then = functools.partial(self._add, name)
        super().put(name, tensor, offset, then)

    def _add(self, name: str, data: memoryview) -> None:
        self._sums[name] = checksum(data, self._sums[name])
        self._records[name]["crc32"] = f"{self._sums[name]:08x}"


def plan_quantization(
    source: Source,
    *,
    format: str | Recipe | None,
    policy: str | os.PathLike | Mapping[str, Any] | None = None,
    card_policy: CardPolicy | None = None,
    exclude: Iterable[str] = (),
    requantize: Mapping[str, Recipe] | None = None,
    device: str | torch.device | None = None,
    detect: Any = None,
    budget: Wish | None = None,
    progress: Progress | None = None,
    craft: Craft = PLAIN,
) -> Plan:
    """Quantize what the policy chooses; options as of `convert.quantize`. With a ``budget`` every layer is measured at
    once (``progress``), without one nothing is read yet.

    Layers that are quantized in the same way already stay as they are, to the bit. ``requantize`` layer -> recipe, for
    float weights that come from a quantized layer and become one again where the policy has no other wish. Raises
    QuantError when a layer is quantized in another way, ValueError for an unknown format or a pattern without a match.
    """
    found = _settled(source)
    layers = {layer.keys["weight"]: layer for layer in found.layers.values() if layer.dialect != "cast"}
    wish = budget or Wish()
    within = budget_of(wish.target_size, wish.min_sqnr, (), format, policy, wish.limits, False)
    if within is not None:
        if layers or requantize:
            name = next(iter(requantize or ())) if requantize else next(iter(layers.values())).name
            raise QuantError(
                source.path,
                f"is quantized already (layer {name!r}); a budget chooses the format of every layer. Start from "
                "the unquantized model",
            )
        rules = (policy, card_policy, tuple(exclude))
        return _plan_within(source, found, within, wish, *rules, device, detect, progress, craft)
    wanted = policy_of(format, policy, card_policy, (), tuple(exclude), 0, False)
    for recipe in [wanted.recipe, *(rule.recipe for rule in wanted.rules if rule.recipe)]:
        layout_of(recipe.format)
    _refuse_other_formats(source, layers, wanted)
    decisions = decide_layers(source, found, layers, wanted, detect)
    decisions = [
        decision.kept(f"is {layers[decision.key].recipe} already") if decision.key in layers else decision
        for decision in decisions
    ]
    again = requantize or {}
    decisions = [
        _exact_decision(source, decision.layer, again[decision.layer])
        if decision.recipe is None and decision.layer in again
        else decision
        for decision in decisions
    ]
    return _plan(source, found, layers, decisions, str(wanted.recipe), wanted.name, device, craft)


@dataclass(frozen=True)
class Wish:
    """What is asked of a budget: see `convert.quantize`. Both None: none, unless the policy file has one."""

    target_size: str | int | None = None
    min_sqnr: str | float | None = None
    limits: Limits | None = None

    @property
    def given(self) -> bool:
        return self.target_size is not None or self.min_sqnr is not None

    @classmethod
    def of(cls, gigabytes: float, decibels: float, limits: Limits | None = None) -> Wish:
        """As nodes ask: 0 = none."""
        return cls(round(gigabytes * 1e9) if gigabytes > 0 else None, decibels if decibels > 0 else None, limits)


def any_format(precision: str, wish: Wish) -> str | None:
    """The nodes' "auto": None, any format that a budget finds best. Raises ValueError without a budget."""
    if precision != "auto":
        return precision
    if not wish.given:
        raise ValueError(
            "the format auto needs a budget that decides: give target_size or min_sqnr, or choose a format"
        )
    return None


def _plan_within(
    source, found, budget: Budget, wish, policy, card, exclude, device, detect, progress, craft: Craft
) -> Plan:
    for recipe in budget.recipes:
        layout_of(recipe.format)
    wanted = policy_of(None, policy, card, (), exclude, 0, False, budget)
    note = {"budget": budget.note()}

    def made(decisions: list[Decision], sqnr: float | None = 100.0) -> Plan:
        plan = _plan(source, found, {}, decisions, summary_format(decisions), wanted.name, device, craft)
        plan.record.plan = {**note, "sqnr": rounded(sqnr), "policy": plan_as_policy(decisions)}
        return plan

    def size_of(decisions: list[Decision]) -> int:
        return made(decisions).file_size

    allocation, _ = decide_within(
        source,
        wanted,
        budget,
        decide=lambda policy: decide_layers(source, found, {}, policy, None),
        settle=lambda decisions: keep_detected(source, found, {}, decisions, wanted, detect),
        size_of=size_of,
        layers={},
        device=torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")),
        progress=progress,
        input_power=craft.powers(source),
    )
    plan = made(allocation.decisions, allocation.sqnr)
    report = plan.report
    report.measured, report.budget, report.plan = allocation, budget.note(), plan_as_policy(allocation.decisions)
    report.file_size = plan.file_size
    return plan


def plan_storage(
    source: Source,
    *,
    dtype: str | torch.dtype | None = None,
    keep_float32: Iterable[str] = (),
    requantize: Mapping[str, Recipe] | None = None,
    device: str | torch.device | None = None,
    craft: Craft = PLAIN,
) -> Plan:
    """As stored, in the form that ComfyUI's loader accepts; or every float and every quantized weight as ``dtype``.

    ``requantize`` layer -> recipe, for float weights that are to be quantized in exactly this way. ``keep_float32``
    regular expressions over tensor names (no prefix) that a cast leaves alone. Raises QuantError for layers that can't
    be read rightly.
    """
    found = _settled(source)
    layers = {layer.keys["weight"]: layer for layer in found.layers.values() if layer.dialect != "cast"}
    if dtype is not None:
        return _plan_cast(source, found, layers, parse_dtype(dtype), tuple(keep_float32))
    decisions = [_exact_decision(source, name, recipe) for name, recipe in (requantize or {}).items()]
    recipes = [str(recipe) for recipe in (requantize or {}).values()] + [str(layer.recipe) for layer in layers.values()]
    stored = max(recipes, key=recipes.count) if recipes else "as stored"
    return _plan(source, found, layers, decisions, stored, "as stored", device, craft)


def _settled(source: Source) -> QuantizedFile:
    found = read_quantized(source)
    settle_conflicts(source, found)
    found.refuse_problems()
    return found


def _refuse_other_formats(source: Source, layers: Mapping[str, Layer], policy: Policy) -> None:
    for layer in layers.values():
        rule = next((rule for rule in policy.rules if matches(rule.match, layer.name)), None)
        wanted = policy.recipe if rule is None else rule.recipe
        if wanted is not None and _storage(layer.recipe) != _storage(wanted):
            raise QuantError(
                source.path,
                f"is quantized already ({len(layers)} layers, {layer.name!r} as {layer.recipe}); making it {wanted} "
                "would lose quality twice. Start from the unquantized model, or choose as stored",
            )


def _storage(recipe: Recipe) -> tuple[Any, ...]:
    return recipe.format, recipe.convrot_groupsize, recipe.row_scales


def _exact_decision(source: Source, name: str, recipe: Recipe) -> Decision:
    info = source.info(f"{name}.weight")
    kind = "bank" if len(info.shape) == 3 else "linear"
    problem = FORMATS[recipe.format].problem(info.shape, recipe)
    if problem is not None:
        raise QuantError(source.path, f"layer {name!r} can't be stored as {recipe}: {problem}")
    return Decision(name, info.name, info.shape, info.dtype, recipe, "as it was", info.nbytes, info.nbytes, kind)


def _plan(source, found, layers, decisions, format: str, policy: str, device, craft: Craft) -> Plan:
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    assemblies, records = assemble(source, "one.safetensors", found, layers, decisions, target, craft)
    kept = {
        f"{layer.name}.weight": {"marker": layer.marker(), "shape": list(layer.shape), "crc32": "0" * 8}
        for layer in layers.values()
        if layer.exact and layer.name not in records
    }
    records.update({name.removesuffix(".weight"): entry for name, entry in kept.items()})
    before = sum(info.nbytes for info in source.tensors.values())
    report = QuantizationReport(source.path, "", format, decisions, before, entry_bytes(assemblies[0]))
    report.warnings.extend(craft.check(decisions))
    identity = {"name": os.path.basename(source.path), "size": before}
    return Plan(source, assemblies[0], records, report, Provenance(format, policy, identity, records), kept)


def _plan_cast(
    source: Source, found: QuantizedFile, layers: Mapping[str, Layer], dtype: torch.dtype, keep: tuple[str, ...]
) -> Plan:
    if name_of(dtype) not in FLOAT_NAMES:
        raise ValueError(f"{dtype} is no float type that weights are kept in; choose bfloat16, float16 or float32")
    assembly = Assembly(source)
    consumed = set(found.notes_keys)
    for layer in layers.values():
        consumed.update(key for suffix, key in layer.keys.items() if suffix != "weight")
    for key in source:
        if key in consumed:
            continue
        stored = source.info(key).dtype
        if key in layers:
            add_dequantized(assembly, source, layers[key], dtype)
        elif (
            stored == name_of(dtype)
            or not (stored in FLOAT_NAMES or stored.startswith("F8_E"))
            or (stored == "F32" and any(re.search(pattern, _bare(key)) for pattern in keep))
        ):
            assembly.copy(key)
        else:
            assembly.cast(key, dtype)
    before = sum(info.nbytes for info in source.tensors.values())
    report = QuantizationReport(source.path, "", name_of(dtype), [], before, entry_bytes(assembly))
    return Plan(source, assembly, {}, report)


def _bare(key: str) -> str:
    return next((key[len(prefix) :] for prefix in PREFIXES[:1] if key.startswith(prefix)), key)
