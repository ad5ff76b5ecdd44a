"""Which layers to quantize, how, and why: card rules, shape constraints, the user's rules, an error budget."""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .formats import FORMATS, Recipe, parse_recipe
from .policy_values import check_values, strings

__all__ = ["CardPolicy", "Decision", "Policy", "Rule", "decide", "read_policy"]

Shapes = Mapping[str, tuple[int, ...]]

# Prefixes under which a diffusion model's own keys may sit in a file.
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "model.", "net.")
DEFAULT_MIN_WEIGHTS = 1_000_000
OTHER_COMPONENT = "another component of the file"
# Of ConvRot, for widths that 256 does not divide; comfy-kitchen has fast kernels for both.
NARROW_GROUP = 64


@dataclass(frozen=True)
class CardPolicy:
    """What an architecture's card says about quantizing it. Patterns are globs over layer names, which have neither
    the file's prefix nor the word weight."""

    # The layers to quantize, as `layers.*.attention.qkv`; empty: the generic rules choose.
    blocks: tuple[str, ...] = ()
    # (pattern, why) pairs, which win over `blocks`.
    never: tuple[tuple[str, str], ...] = ()
    # 3-D weights that are expert banks [E, out, in].
    banks: tuple[str, ...] = ()
    # Tables that are looked up.
    embeddings: tuple[str, ...] = ()
    # 1x1 convolutions [out, in, 1, 1] that the module computes as matrices, stored as such once quantized.
    pointwise: tuple[str, ...] = ()
    # (pattern, format, recipe): what a layer gets that `format` can't hold as it was asked for.
    alternatives: tuple[tuple[str, str, str], ...] = ()
    # The smallest weight worth it.
    min_weights: int | None = None
    # The recipe that published files of it use; "" unknown.
    layout: str = ""

    def matrix_shape(self, key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a weight as it is multiplied."""
        if len(shape) == 4 and shape[2:] == (1, 1) and _first_match(self.pointwise, key.removesuffix(".weight")):
            return shape[:2]
        return shape


@dataclass(frozen=True)
class Rule:
    """A user's rule: layers that match ``match`` get ``recipe``, or are kept when it is None."""

    match: str
    recipe: Recipe | None


@dataclass(frozen=True)
class Policy:
    """All that decides. ``keep_edges`` N keeps the first and last N blocks of every stack; ``max_error`` keeps layers
    whose relative root-mean-square error would be larger (measured on a sample of rows)."""

    recipe: Recipe
    rules: tuple[Rule, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    keep_edges: int = 0
    min_weights: int | None = None
    max_error: float | None = None
    card: CardPolicy | None = None
    name: str = "generic"


@dataclass(frozen=True)
class Decision:
    """``recipe`` None: kept, and ``why``. ``kind`` "linear", "embedding" or "bank"; bytes include side tensors."""

    layer: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    recipe: Recipe | None
    why: str
    bytes_before: int
    bytes_after: int
    kind: str = "linear"

    def kept(self, why: str) -> Decision:
        return replace(self, recipe=None, why=why, bytes_after=self.bytes_before)


def matches(pattern: str, name: str) -> bool:
    """Whether a glob names the layer, with or without the file's prefix."""
    if fnmatch.fnmatchcase(name, pattern):
        return True
    return any(name.startswith(prefix) and fnmatch.fnmatchcase(name[len(prefix) :], pattern) for prefix in PREFIXES)


def _first_match(patterns: Iterable[str], name: str) -> str | None:
    return next((pattern for pattern in patterns if matches(pattern, name)), None)


# ---- position: which weights sit inside a repeated block --------------------------------------------------------


def block_stacks(shapes: Shapes) -> dict[str, list[int]]:
    """Stacks of blocks: the numbers of the blocks by the name of their parent.

    A numbered child is a block when it holds at least two matrices; the steps of a ``Sequential`` hold one each.
    Blocks within blocks, such as a list of experts or of resnets, belong to the outermost stack.
    """
    matrices: dict[tuple[str, int], int] = {}
    for name, shape in shapes.items():
        if len(shape) < 2 or not name.endswith(".weight"):
            continue
        found = re.match(r"(.*?)\.(\d+)\..+\.weight$", f".{name}")
        if found is not None:
            block = (found[1][1:], int(found[2]))
            matrices[block] = matrices.get(block, 0) + 1
    stacks: dict[str, list[int]] = {}
    for (parent, number), count in matrices.items():
        if count >= 2:
            stacks.setdefault(parent, []).append(number)
    return {parent: sorted(numbers) for parent, numbers in stacks.items()}


def _block_of(layer: str, stacks: Mapping[str, list[int]]) -> tuple[str, int] | None:
    found = re.match(r"(.*?)\.(\d+)\.", f".{layer}.")
    if found is None:
        return None
    parent, number = found[1][1:], int(found[2])
    return (parent, number) if number in stacks.get(parent, ()) else None


# ---- names that mean trouble in every family ---------------------------------------------------------------------

_SENSITIVE = (
    (r"ada_?ln|ada_?layer_?norm|modulation|(^|[._])mod(ulate)?(_\d+)?($|[._])|norm\w*\.linear|film", "modulation"),
    (r"(^|[._])(t|time|timestep|y|x|c|cap|label|pos|patch|guidance|vector)_?embed", "an embedder"),
    (r"time(step)?_?(in|proj|mlp)|(^|[._])t_block", "timestep or guidance"),
    (r"guidance|distilled", "timestep or guidance"),
    (r"router|(^|[._])gate$", "a router or gate"),
    (r"norm(\d|_[qk])?$", "a norm"),
    (r"scale_shift|table|register|pos_emb|position", "a table"),
    (r"lm_head|(^|[._])head($|[._])", "an output head"),
)

# CLIP's towers, as Hugging Face and OpenCLIP name them. ComfyUI 0.33 looks for quantized layers in T5 and in language
# models, not in these.
_CLIP = r"(^|\.)(text|vision)_model\.encoder\.layers\.\d+\.|(^|\.)transformer\.resblocks\.\d+\."
# Tables that rows are looked up in, as text encoders call them.
_LOOKED_UP = r"(^|[._])(embed_tokens|word_embeddings|(token|position)_embedding|shared)$"


def _sensitive(layer: str) -> str | None:
    return next((why for pattern, why in _SENSITIVE if re.search(pattern, layer, re.IGNORECASE)), None)


# ---- the decision -------------------------------------------------------------------------------------------------


def _stored_bytes(shape: tuple[int, ...], recipe: Recipe) -> int:
    from ..files.dtypes import nbytes

    entries = FORMATS[recipe.format].entries(shape, recipe)
    marker = len(str(recipe.marker())) + 4
    return sum(nbytes(dtype, size) for dtype, size in entries.values()) + marker


def decide(
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]],
    policy: Policy,
    measure: Callable[[str, Recipe], float] | None = None,
) -> list[Decision]:
    """A decision for every weight of two or more dimensions, in the order given.

    ``tensors``: name -> (safetensors dtype, logical shape, stored bytes). ``measure(key, recipe)`` gives the relative
    error for ``policy.max_error``. Patterns in include, exclude and rules that match nothing raise ValueError.
    """
    shapes = {name: shape for name, (_, shape, _) in tensors.items()}
    stacks = block_stacks(shapes)
    component = next((prefix for prefix in PREFIXES[:1] if any(name.startswith(prefix) for name in shapes)), "")
    decisions = []
    for key, (dtype, shape, stored) in tensors.items():
        if not key.endswith(".weight") or len(shape) < 2:
            continue
        base = Decision(key.removesuffix(".weight"), key, shape, dtype, None, "", stored, stored)
        decision = _decide_one(base, policy, stacks, component)
        if decision.recipe is not None:
            decision = replace(decision, bytes_after=_stored_bytes(shape, decision.recipe))
            if policy.max_error is not None and measure is not None:
                error = measure(key, decision.recipe)
                if error > policy.max_error:
                    decision = decision.kept(f"its error would be {error:.3f}, the limit is {policy.max_error:.3f}")
        decisions.append(decision)
    _refuse_unused(policy, [decision.layer for decision in decisions])
    return decisions


def _decide_one(base: Decision, policy: Policy, stacks: Mapping[str, list[int]], component: str) -> Decision:
    layer, shape = base.layer, base.shape
    card = policy.card or CardPolicy()
    excluded = _first_match(policy.exclude, layer)
    if excluded is not None:
        return base.kept(f"excluded by {excluded!r}")
    if component and not layer.startswith(component):
        return base.kept(OTHER_COMPONENT)
    if re.search(_CLIP, layer):
        return base.kept("ComfyUI reads no quantized CLIP: it would take the codes for weights")
    kind = "bank" if len(shape) == 3 else "linear"
    if _first_match(card.embeddings, layer) or re.search(_LOOKED_UP, layer):
        kind = "embedding"
    base = replace(base, kind=kind)
    rule = next((rule for rule in policy.rules if matches(rule.match, layer)), None)
    included = _first_match(policy.include, layer)
    if rule is not None and rule.recipe is None:
        return base.kept(f"kept by the rule {rule.match!r}")
    recipe = rule.recipe if rule is not None else policy.recipe
    why = f"rule {rule.match!r}" if rule is not None else f"included by {included!r}" if included else ""
    if not why:
        refusal, why = _by_card_or_position(layer, shape, kind, card, policy, stacks)
        if refusal is not None:
            return base.kept(refusal)
    if len(shape) > 3 or (
        len(shape) == 3 and not (_first_match(card.banks, layer) or why.startswith(("rule", "incl")))
    ):
        return base.kept("a convolution, or a 3-D weight that no card declares an expert bank")
    if base.dtype not in ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"):
        return base.kept(f"its dtype is {base.dtype}")
    problem = FORMATS[recipe.format].problem(shape, recipe, kind)
    if problem is not None:
        instead = _alternative(layer, shape, kind, recipe, card)
        if instead is None:
            return base.kept(problem)
        recipe, why = instead, f"{why}; as {instead}, because {problem}"
    return replace(base, recipe=recipe, why=why)


def _alternative(layer: str, shape: tuple[int, ...], kind: str, recipe: Recipe, card: CardPolicy) -> Recipe | None:
    """What the card has for a layer that can't be stored as asked, as far as that fits; else a narrower rotation."""
    for pattern, asked, instead in card.alternatives:
        if asked == recipe.format and matches(pattern, layer):
            found = replace(parse_recipe(instead), full_precision=recipe.full_precision)
            if FORMATS[found.format].problem(shape, found, kind) is None:
                return found
    if (recipe.convrot_groupsize or 0) > NARROW_GROUP:
        narrower = replace(recipe, convrot_groupsize=NARROW_GROUP)
        if FORMATS[recipe.format].problem(shape, narrower, kind) is None:
            return narrower
    return None


def _by_card_or_position(
    layer: str, shape: tuple[int, ...], kind: str, card: CardPolicy, policy: Policy, stacks: Mapping[str, list[int]]
) -> tuple[str | None, str]:
    """(why it is kept, or None; why it is quantized)."""
    for pattern, why in card.never:
        if matches(pattern, layer):
            return why, ""
    block = _block_of(layer, stacks)
    if policy.keep_edges and block is not None:
        numbers = stacks[block[0]]
        edge = numbers[: policy.keep_edges] + numbers[-policy.keep_edges :]
        if block[1] in edge:
            return f"block {block[1]} is among the first or last {policy.keep_edges} of {block[0]!r}", ""
    smallest = policy.min_weights if policy.min_weights is not None else card.min_weights
    smallest = DEFAULT_MIN_WEIGHTS if smallest is None else smallest
    if card.blocks:
        pattern = _first_match((*card.blocks, *card.banks), layer)
        if pattern is None:
            return "not among the layers that the card quantizes", ""
        if policy.min_weights is not None and math.prod(shape) < smallest:
            return f"only {math.prod(shape):,} weights", ""
        return None, f"card: {pattern!r}"
    if kind == "embedding":
        return "an embedding table", ""
    if block is None:
        return "outside the repeated blocks (an input, output or conditioning layer)", ""
    sensitive = _sensitive(layer)
    if sensitive is not None:
        return sensitive, ""
    if math.prod(shape) < smallest:
        return f"only {math.prod(shape):,} weights", ""
    return None, f"in a repeated block of {block[0]!r}"


def _refuse_unused(policy: Policy, layers: list[str]) -> None:
    patterns = [*policy.include, *policy.exclude, *(rule.match for rule in policy.rules)]
    unused = [pattern for pattern in patterns if not any(matches(pattern, layer) for layer in layers)]
    if unused:
        sample = ", ".join(layers[:3]) or "none"
        raise ValueError(f"the pattern {unused[0]!r} matches no layer of this file (its layers: {sample}, ...)")


# ---- a policy from a file -----------------------------------------------------------------------------------------

_KEYS = {"format", "layers", "keep_edges", "min_weights", "max_error", "include", "exclude"}
_KEYS |= {"target_size", "min_sqnr", "formats"}


@dataclass(frozen=True)
class PolicyFile:
    """What `read_policy` returns; None where the file says nothing."""

    format: str | None = None
    rules: tuple[Rule, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    keep_edges: int | None = None
    min_weights: int | None = None
    max_error: float | None = None
    name: str = field(default="generic")
    target_size: str | int | None = None
    min_sqnr: str | float | None = None
    formats: tuple[str, ...] = ()


def read_policy(policy: str | os.PathLike | Mapping[str, Any] | None) -> PolicyFile:
    """A policy from a file of rules, the same content as a dict, or the plan in the header of a file that was quantized
    within a budget. Raises ValueError.

    Each table of layers has a glob to match, or a list of them, and a format, which is a recipe or the word keep; the
    first table that matches a layer decides.
    """
    # TOML with [[layers]] tables of `match` and `format`. At the top stand format, include, exclude, keep_edges,
    # min_weights, max_error, and for budgets target_size, min_sqnr, formats.
    if policy is None:
        return PolicyFile()
    name = "given"
    if not isinstance(policy, Mapping):
        name = os.path.basename(os.fspath(policy))
        policy = _plan_in(policy) if name.endswith(".safetensors") else _load_toml(policy)
    unknown = set(policy) - _KEYS
    if unknown:
        raise ValueError(f"policy {name}: unknown key {sorted(unknown)[0]!r}; known: {', '.join(sorted(_KEYS))}")
    check_values(policy, name)
    rules = []
    for entry in policy.get("layers") or ():
        recipe = None if entry["format"] == "keep" else parse_recipe(entry["format"])
        rules.extend(Rule(pattern, recipe) for pattern in strings(entry["match"]) or ())
    return PolicyFile(
        policy.get("format"),
        tuple(rules),
        strings(policy.get("include")) or (),
        strings(policy.get("exclude")) or (),
        policy.get("keep_edges"),
        policy.get("min_weights"),
        policy.get("max_error"),
        name,
        policy.get("target_size"),
        policy.get("min_sqnr"),
        strings(policy.get("formats")) or (),
    )


def _plan_in(path: str | os.PathLike) -> dict[str, Any]:
    from ..files import open_source
    from .markers import read_provenance

    with open_source(path) as source:
        record = read_provenance(source)
    plan = record.plan.get("policy") if record is not None else None
    if not isinstance(plan, dict):
        raise ValueError(f"{os.fspath(path)} has no plan in its header: nativedit did not quantize it within a budget")
    return plan


def _toml_reader(path: str | os.PathLike) -> Any:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib
        except ImportError:
            raise ValueError(
                f"policy {os.fspath(path)}: this Python reads no TOML. Install tomli (pip install tomli), or use 3.11"
            ) from None
    return tomllib


def _load_toml(path: str | os.PathLike) -> dict[str, Any]:
    tomllib = _toml_reader(path)
    with open(path, "rb") as file:
        try:
            return tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"policy {os.fspath(path)} is not valid TOML: {error}") from None
