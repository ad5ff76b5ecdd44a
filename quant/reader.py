"""Reads every dialect of a quantized checkpoint into one normal form, from headers and markers alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..files import Source
from .errors import Problem, QuantError
from .evidence import Evidence, Unsettled, settle
from .layer import Layer, canonical_tensors
from .markers import MARKER, Provenance, checksum, encode_marker, header_claims, read_marker, read_provenance

__all__ = ["QuantizedFile", "canonical_state_dict", "read_quantized"]

# The file's suffix -> the canonical one.
ROLES = {
    "weight": "weight",
    "weight_scale": "weight_scale",
    "scale_weight": "weight_scale",
    "weight_scale_2": "weight_scale_2",
    "input_scale": "input_scale",
    "scale_input": "input_scale",
    "pre_quant_scale": "pre_quant_scale",
    "weight_s_rel": "weight_s_rel",
    "weight_s_channel": "weight_s_channel",
    "weight_codebook": "weight_codebook",
    "weight_correction": "weight_correction",
    "weight_scale_inv": "weight_scale_inv",
}
LEGACY_MARKER = "scaled_fp8"


@dataclass
class QuantizedFile:
    """What a file says about its quantized layers.

    ``layers`` name -> normal form; ``problems`` of layers that can't be used as they stand; ``conflicts`` layers whose
    notes contradict each other, to be settled by the checksum of their bytes (`settle_conflicts`); ``notes_keys``
    tensors that only carry notes (markers); ``record`` what we wrote about the file, if we did.
    """

    path: str
    layers: dict[str, Layer] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    conflicts: dict[str, Problem] = field(default_factory=dict)
    notes_keys: set[str] = field(default_factory=set)
    evidence: dict[str, Evidence] = field(default_factory=dict, repr=False)
    record: Provenance | None = None

    @property
    def is_quantized(self) -> bool:
        return bool(self.layers or self.problems)

    def logical_shapes(self, source: Source) -> dict[str, tuple[int, ...]]:
        """Shapes as an unquantized file would have them, side tensors left out: what detection should look at."""
        hidden = set(self.notes_keys)
        shapes = {}
        for layer in self.layers.values():
            hidden.update(key for suffix, key in layer.keys.items() if suffix != "weight")
            shapes[layer.keys["weight"]] = layer.shape
        return {name: shapes.get(name, info.shape) for name, info in source.tensors.items() if name not in hidden}

    def refuse_problems(self) -> None:
        """Raises QuantError naming every layer that can't be read."""
        problems = self.problems + list(self.conflicts.values())
        if problems:
            raise QuantError.of(self.path, problems)


def _group(source: Source) -> tuple[dict[str, dict[str, str]], dict[str, str], dict[str, str]]:
    """(layer -> canonical suffix -> key), (layer -> marker key), (prefix -> legacy marker key)."""
    groups: dict[str, dict[str, str]] = {}
    markers: dict[str, str] = {}
    legacy: dict[str, str] = {}
    for key in source:
        name, _, suffix = key.rpartition(".")
        if suffix == MARKER:
            markers[name] = key
        elif suffix == LEGACY_MARKER:
            legacy[name] = key
        elif suffix in ROLES:
            groups.setdefault(name, {}).setdefault(ROLES[suffix], key)
    return groups, markers, legacy


def _legacy_of(name: str, legacy: dict[str, str]) -> str | None:
    for prefix, key in legacy.items():
        if not prefix or name == prefix or name.startswith(f"{prefix}."):
            return key
    return None


def read_quantized(source: Source) -> QuantizedFile:
    """Describe every quantized layer of ``source``. Reads headers and markers (a few dozen bytes each), no weights.

    Raises QuantError when a header's quantization entry can't be understood; what is wrong with single layers is
    collected in ``problems``.
    """
    found = QuantizedFile(source.path, record=read_provenance(source))
    groups, markers, legacy = _group(source)
    claims = header_claims(source)
    found.notes_keys.update(markers.values(), legacy.values())
    for name in sorted({*groups, *markers, *claims}, key=_natural):
        roles = groups.get(name, {})
        try:
            marker = read_marker(source, markers[name]) if name in markers else None
        except ValueError as error:
            found.problems.append(Problem(name, "damaged", str(error)))
            continue
        legacy_key = _legacy_of(name, legacy)
        evidence = Evidence(
            name=name,
            infos={role: source.info(key) for role, key in roles.items()},
            bias=source.tensors.get(f"{name}.bias"),
            has_marker=name in markers,
            marker=marker,
            header=claims.get(name),
            record=found.record.layers.get(name) if found.record else None,
            legacy_length=source.info(legacy_key).numel if legacy_key else None,
            spelled_legacy=any(key.endswith((".scale_weight", ".scale_input")) for key in roles.values()),
        )
        found.evidence[name] = evidence
        try:
            layer = settle(evidence)
        except Unsettled as error:
            problem = Problem(name, error.kind, str(error))
            if error.conflict:
                found.conflicts[name] = problem
            else:
                found.problems.append(problem)
            continue
        if layer is not None:
            found.layers[name] = layer
    return found


def _natural(name: str) -> list[Any]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def settle_conflicts(source: Source, found: QuantizedFile) -> None:
    """Layers whose marker contradicts our record: when the stored bytes are those we wrote, the record is right.

    Reads the weights concerned. What it can't settle stays in ``conflicts``.
    """
    groups, _, _ = _group(source)
    for name in list(found.conflicts):
        record = found.record.layers[name] if found.record else None
        key = groups.get(name, {}).get("weight")
        if record is None or key is None or weight_checksum(source, key) != record["crc32"]:
            continue
        evidence = replace(found.evidence[name], marker=record["marker"], header=None, overruled=True)
        try:
            layer = settle(evidence)
        except Unsettled:
            continue
        if layer is not None:
            found.layers[name] = layer
            del found.conflicts[name]


def weight_checksum(source: Source, key: str, chunk: int = 64 << 20) -> str:
    value = 0
    total = source.info(key).nbytes
    for start in range(0, total, chunk):
        value = checksum(memoryview(source.read_bytes(key, start, min(start + chunk, total)).numpy()), value)
    return f"{value:08x}"


def canonical_state_dict(source: Source, *, prefix: str = "") -> dict[str, torch.Tensor]:
    """Everything under a prefix, which is taken off, in memory; quantized layers in canonical form with their markers.

    This is what the layers of `ops` load, and load strictly. Raises QuantError for layers that can't be read rightly.
    """
    found = read_quantized(source)
    settle_conflicts(source, found)
    found.refuse_problems()
    used: set[str] = set(found.notes_keys)
    state: dict[str, torch.Tensor] = {}
    for layer in found.layers.values():
        used.update(layer.keys.values())
        own = dict(canonical_tensors(source, layer)) if f"{layer.name}.".startswith(prefix) else {}
        if own and layer.dialect != "cast":
            own[MARKER] = encode_marker(layer.marker())
        state.update({f"{layer.name}.{suffix}"[len(prefix) :]: tensor for suffix, tensor in own.items()})
    for key in source:
        if key not in used and key.startswith(prefix):
            tensor = source.read(key)
            if source.info(key).dtype in ("F8_E4M3", "F8_E5M2"):
                # Tables and biases of a float8 cast: they meet float tensors in plain arithmetic.
                tensor = tensor.to(torch.bfloat16)
            state[key[len(prefix) :]] = tensor
    return state


def summary(found: QuantizedFile) -> dict[str, int]:
    """How many layers are stored in each recipe."""
    counts: dict[str, int] = {}
    for layer in found.layers.values():
        label = "float8 cast" if layer.dialect == "cast" else str(layer.recipe)
        counts[label] = counts.get(label, 0) + 1
    return counts
