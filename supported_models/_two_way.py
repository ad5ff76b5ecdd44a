"""Two key layouts of one model, described once and read in both directions: ComfyUI's ("ours") and diffusers'
("theirs").

A rule names a layer in both. Where one layout keeps several matrices in one (q, k and v; gate and up), the rule lists
them in their order along the first dimension. Everything a conversion does is then: a tensor of the result is rows of
tensors of the source, one after the other. Nothing here touches a tensor.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

Shapes = Mapping[str, tuple[int, ...]]

WEIGHT = ("weight",)
WEIGHT_BIAS = ("weight", "bias")
# A parameter that is no layer's: the two names are complete as they stand.
PARAMETER: tuple[str, ...] = ()


@dataclass(frozen=True)
class First:
    """Sizes of fused parts that are not equal: the first ``count`` have as many rows as our tensor ``key`` measures
    along ``dim``; the others share the rest equally."""

    count: int
    key: str
    dim: int


@dataclass(frozen=True)
class Rule:
    """One layer, or one parameter, in both layouts; in names a hash stands for a block's number."""

    # Names without `params`; theirs may be several, in the order in which ours holds them.
    ours: str
    theirs: str | tuple[str, ...]
    params: tuple[str, ...] = WEIGHT
    # How unequal parts divide, None = equal.
    first: First | None = None
    # The two halves along the first dimension are exchanged.
    swapped: bool = False
    # Theirs is [folded, n] where ours is [folded * n].
    folded: int = 0
    # The rule's keys may be missing together; a name that ends in `#` is decided block by block.
    group: str = ""
    # "", "last" (in the stack's last block only), "not last".
    block: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs


@dataclass(frozen=True)
class Run:
    """Rows ``start:stop`` of a tensor of the source; ``stop`` None: all of it, of whatever shape."""

    key: str
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Target:
    """A tensor of the result: the runs joined along the first dimension, then seen in ``shape``; ``transposed``: its
    one run has its last two dimensions the other way round."""

    name: str
    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    transposed: bool = False


@dataclass(frozen=True)
class _Place:
    """Where a name stands: its rule, which of its parameters, and (theirs only) which part."""

    rule: Rule
    param: str
    part: int = 0


@dataclass(frozen=True)
class Found:
    """A key of a file and its rule; ``number`` of the block it belongs to, None outside of blocks."""

    rule: Rule
    param: str
    part: int
    number: int | None


@dataclass(frozen=True)
class TwoWayMap:
    """See the module. ``marker``: a key that only their layout has; ``prefixes`` theirs is published with.

    spellings: (regular expression, replacement) that turn other spellings of our keys into the one to write.
    ignored: regular expressions over keys, of either layout, that hold nothing (leftovers of training).
    computed: our key -> dotted path of f(config) -> tensor, for buffers that theirs works out anew.
    flags: our key -> an argument of theirs that its presence stands for; the tensor itself is empty.
    """

    name: str
    marker: str
    rules: tuple[Rule, ...]
    prefixes: tuple[str, ...] = ("",)
    spellings: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    computed: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)

    def __hash__(self) -> int:
        return id(self)

    # ---- single names ------------------------------------------------------------------------------------------

    @functools.cached_property
    def _ours(self) -> dict[str, list[_Place]]:
        places: dict[str, list[_Place]] = {}
        for rule in self.rules:
            for param in rule.params or ("",):
                places.setdefault(_joined(rule.ours, param), []).append(_Place(rule, param))
        return places

    @functools.cached_property
    def _theirs(self) -> dict[str, list[_Place]]:
        places: dict[str, list[_Place]] = {}
        for rule in self.rules:
            for param in rule.params or ("",):
                for part, name in enumerate(rule.parts):
                    places.setdefault(_joined(name, param), []).append(_Place(rule, param, part))
        return places

    def spelled(self, key: str) -> str:
        """One of our keys in the spelling that is written."""
        for pattern, replacement in self.spellings:
            key = re.sub(pattern, replacement, key)
        return key

    def is_ignored(self, key: str) -> bool:
        return any(re.search(pattern, key) for pattern in self.ignored)

    def find_ours(self, key: str, last: Mapping[str, int] | None = None) -> Found | None:
        """The rule of one of our keys; ``last``: stack -> its last block, for rules about the last one."""
        return _find(self._ours, self.spelled(key), last)

    def find_theirs(self, key: str, last: Mapping[str, int] | None = None) -> Found | None:
        return _find(self._theirs, key, last)

    def globs(self, *patterns: str) -> tuple[str, ...]:
        """Globs over our layers' names, and those that name the same layers in their layout."""
        found = list(patterns)
        for pattern in patterns:
            for rule in self.rules:
                if rule.params and fnmatch.fnmatchcase(rule.ours.replace("#", "0"), pattern):
                    found += [name.replace("#", "*") for name in rule.parts]
        return tuple(dict.fromkeys(found))

    def never(self, *pairs: tuple[str, str]) -> tuple[tuple[str, str], ...]:
        """(glob over our layers, why) with the same layers of their layout added."""
        return tuple((glob, why) for pattern, why in pairs for glob in self.globs(pattern))

    # ---- whole files -------------------------------------------------------------------------------------------

    def shapes(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Our keys and shapes of a file in their layout; what has no rule stays under its own name."""
        last = _last_blocks(shapes, self._theirs, str)
        others = {key: tuple(shape) for key, shape in shapes.items() if self.find_theirs(key, last) is None}
        return others | {target.name: target.shape for target in self.to_ours(shapes)}

    def to_theirs(self, shapes: Shapes) -> list[Target]:
        """How a file in our layout becomes theirs. Keys without a rule are left out; see ``problems``."""
        last = _last_blocks(shapes, self._ours, self.spelled)
        own = {self.spelled(key): tuple(shape) for key, shape in shapes.items()}
        targets = []
        for key, shape in shapes.items():
            found = self.find_ours(key, last)
            if found is None:
                continue
            rule, start = found.rule, 0
            sizes = self._sizes(rule, found.number, shape, own)
            for name, size in zip(rule.parts, sizes, strict=True):
                name = _joined(_numbered(name, found.number), found.param)
                targets.append(_target(name, rule, key, shape, start, size, len(sizes)))
                start += size
        return targets

    def to_ours(self, shapes: Shapes) -> list[Target]:
        """How a file in their layout becomes ours."""
        last = _last_blocks(shapes, self._theirs, str)
        gathered: dict[str, dict[int, str]] = {}
        rules: dict[str, Rule] = {}
        for key in shapes:
            found = self.find_theirs(key, last)
            if found is not None:
                name = _joined(_numbered(found.rule.ours, found.number), found.param)
                gathered.setdefault(name, {})[found.part] = key
                rules[name] = found.rule
        targets = []
        for name, keys in gathered.items():
            rule = rules[name]
            if len(keys) < len(rule.parts):
                continue
            if len(keys) == 1:
                shape = tuple(shapes[keys[0]])
                targets.append(_target(name, rule, keys[0], shape, 0, shape[0] if shape else 0, 1, back=True))
                continue
            joined = [tuple(shapes[keys[part]]) for part in range(len(keys))]
            rows = sum(shape[0] for shape in joined)
            targets.append(Target(name, (rows, *joined[0][1:]), tuple(Run(keys[part]) for part in range(len(keys)))))
        return targets

    def problems_ours(self, keys: Iterable[str]) -> tuple[list[str], list[str]]:
        """(keys that are missing, keys that have no rule) of a file in our layout."""
        known = {*self.computed, *self.flags}
        return self._problems([key for key in keys if key not in known], self._ours, self.spelled)

    def problems_theirs(self, keys: Iterable[str]) -> tuple[list[str], list[str]]:
        """The same of a file in their layout."""
        return self._problems(list(keys), self._theirs, str)

    def _problems(self, keys: list[str], places: dict[str, list[_Place]], spelled: Callable[[str], str]):
        last = _last_blocks(keys, places, spelled)
        names = {spelled(key): key for key in keys}
        unexpected = [
            key for name, key in names.items() if _find(places, name, last) is None and not self.is_ignored(key)
        ]
        groups = {_group_of(found) for name in names if (found := _find(places, name, last)) is not None}
        missing = []
        for template, found_here in places.items():
            stack, _, _ = template.partition("#")
            numbers = range(last.get(stack, -1) + 1) if "#" in template else (None,)
            for number in numbers:
                name = _numbered(template, number)
                for place in found_here:
                    group = _group_of(Found(place.rule, place.param, place.part, number))
                    wanted = not group or group in groups
                    if wanted and _applies(place.rule, number, last.get(stack)) and name not in names:
                        missing.append(name)
        return missing, unexpected

    @staticmethod
    def _sizes(rule: Rule, number: int | None, shape: tuple[int, ...], own: Shapes) -> list[int]:
        count, rows = len(rule.parts), shape[0] if shape else 0
        if rule.first is None:
            return [rows // count] * count
        measured = own[_numbered(rule.first.key, number)][rule.first.dim]
        rest = count - rule.first.count
        return [measured] * rule.first.count + [(rows - measured * rule.first.count) // rest] * rest


def _joined(name: str, param: str) -> str:
    return f"{name}.{param}" if param else name


def _numbered(name: str, number: int | None) -> str:
    return name if number is None else name.replace("#", str(number), 1)


def _group_of(found: Found) -> str:
    group = found.rule.group
    return f"{group}{found.number}" if group.endswith("#") else group


def _applies(rule: Rule, number: int | None, last: int | None) -> bool:
    if not rule.block or number is None or last is None:
        return True
    return (number == last) == (rule.block == "last")


def _find(places: dict[str, list[_Place]], key: str, last: Mapping[str, int] | None) -> Found | None:
    for template, number in _templates(key):
        for place in places.get(template, ()):
            if _applies(place.rule, number, (last or {}).get(template.partition("#")[0])):
                return Found(place.rule, place.param, place.part, number)
    return None


def _templates(key: str) -> list[tuple[str, int | None]]:
    """The key as it is, and with each of its numbers as ``#`` in turn."""
    words = key.split(".")
    found: list[tuple[str, int | None]] = [(key, None)]
    for index, word in enumerate(words):
        if word.isdecimal():
            found.append((".".join([*words[:index], "#", *words[index + 1 :]]), int(word)))
    return found


def _last_blocks(keys: Iterable[str], places: dict[str, list[_Place]], spelled: Callable[[str], str]) -> dict[str, int]:
    """Stack (the text before ``#``) -> number of its last block."""
    last: dict[str, int] = {}
    for key in keys:
        for template, number in _templates(spelled(key)):
            if number is not None and template in places:
                stack = template.partition("#")[0]
                last[stack] = max(last.get(stack, 0), number)
    return last


def _target(
    name: str, rule: Rule, key: str, shape: tuple[int, ...], start: int, size: int, count: int, back: bool = False
) -> Target:
    if count > 1:
        return Target(name, (size, *shape[1:]), (Run(key, start, start + size),))
    if rule.swapped:
        half = shape[0] // 2
        return Target(name, tuple(shape), (Run(key, half, shape[0]), Run(key, 0, half)))
    if rule.folded:
        shape = (shape[0] * shape[1], *shape[2:]) if back else (rule.folded, shape[0] // rule.folded, *shape[1:])
    return Target(name, tuple(shape), (Run(key),))


def depth(shapes: Shapes, stack: str) -> int:
    """How many blocks are called ``stack.0.``, ``stack.1.``, ...: one more than the largest number."""
    start = stack + "."
    numbers = (key[len(start) :].partition(".")[0] for key in shapes if key.startswith(start))
    return 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)
