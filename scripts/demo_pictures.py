"""What the demo model knows: scenes of coloured shapes, their words, how they are drawn and how a picture is checked.

Nothing here is learned. `check` reads pixels (background, connected blobs, colour, size, outline, centroids) and says
what differs from the prompt, so that "the picture is right" is a measured statement.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SIDE = 64  # pixels; pictures are square

# RGB, 0..255. Kept apart enough that an anti-aliased edge never looks like a blob of another colour.
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "orange": (245, 140, 30),
    "yellow": (250, 220, 50),
    "green": (50, 170, 70),
    "blue": (40, 80, 220),
    "purple": (140, 60, 190),
    "white": (255, 255, 255),
    "black": (0, 0, 0),
    "gray": (128, 128, 128),
    "pink": (255, 160, 190),
}
OBJECT_COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "white", "black")
GROUND_COLOURS = ("white", "black", "gray", "pink")
SHAPES = ("circle", "square", "triangle", "ring")
RADII = {"small": (6.8, 7.6), "large": (12.0, 12.8)}  # half of a circle's width in pixels
# Overlap (intersection over union) with the ideal shape below which a blob is no clear shape.
LEAST_LIKENESS = 0.65
# A blob of fewer pixels is a speck of the background (which must be plain), and no thing: the smallest has 130.
LEAST_PIXELS = 20
RELATIONS = ("left of", "right of", "above", "below")

# Wordings; the first of each is the plain one, used for test prompts.
SIZE_WORDS = {"small": ("small", "little", "tiny"), "large": ("large", "big")}
RELATION_WORDS = {
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
GROUND_WORDS = ("on a {} background", "on a plain {} background", "on {}", "against a {} background", ", {} background")
OPENINGS = ("", "a picture of ", "a drawing of ")
SYNONYMS = {"grey": "gray", "disc": "circle", "disk": "circle", "box": "square", "donut": "ring"}
UNKNOWN_WORDS = ("foo", "nice", "photo", "detailed", "masterpiece")  # all become the token <unk>
WORDS = sorted(
    {
        *COLOURS,
        *SHAPES,
        *SYNONYMS,
        *(word for words in SIZE_WORDS.values() for word in words),
        *(word for phrases in RELATION_WORDS.values() for phrase in phrases for word in phrase.split()),
        *(word for phrase in GROUND_WORDS for word in phrase.replace("{}", " ").split()),
        *(word for phrase in OPENINGS for word in phrase.split()),
        *["a", "the", "and", "with", ".", ","],
    }
)


@dataclass(frozen=True)
class Thing:
    """One shape. In a scene read from a prompt, None stands for what the prompt leaves open."""

    size: str | None
    colour: str | None
    shape: str


@dataclass(frozen=True)
class Scene:
    """One or two things on a plain ground; `relation` is where the first lies, seen from the second."""

    things: tuple[Thing, ...]
    relation: str | None
    ground: str | None


def is_held_out(thing: Thing, ground: str) -> bool:
    """True for the eighth of all (size, colour, shape, ground) combinations that no training picture contains.

    For every size, shape and ground one colour is held out, so each word and each pair of words is still trained.
    """
    colour, shape = OBJECT_COLOURS.index(thing.colour), SHAPES.index(thing.shape)
    size, ground_index = list(RADII).index(thing.size), GROUND_COLOURS.index(ground)
    return (colour + 3 * shape + 4 * size + 5 * ground_index) % len(OBJECT_COLOURS) == 0


def random_scene(rng: np.random.Generator, *, held_out: bool = False, two_things: float = 0.65) -> Scene:
    """A scene with a thing that is held out, or (for training) without any; two_things: how often it has a second."""
    while True:
        ground = _pick(rng, GROUND_COLOURS)
        count = 2 if rng.random() < two_things else 1
        things = tuple(
            Thing(_pick(rng, tuple(RADII)), _pick(rng, OBJECT_COLOURS), _pick(rng, SHAPES)) for _ in range(count)
        )
        visible = all(thing.colour != ground for thing in things)
        if visible and held_out == any(is_held_out(thing, ground) for thing in things):
            return Scene(things, _pick(rng, RELATIONS) if count == 2 else None, ground)


def describe(scene: Scene, rng: np.random.Generator | None = None) -> str:
    """The scene as a prompt: in plain full words, or (with rng) in a random wording that may leave something out."""
    if rng is None:
        middle = f" {scene.relation} " if scene.relation else ""
        return f"{middle.join(f'a {t.size} {t.colour} {t.shape}' for t in scene.things)} on a {scene.ground} background"
    with_size, with_ground = rng.random() > 0.05, rng.random() > 0.05
    parts = []
    for thing in scene.things:
        size = f"{_pick(rng, SIZE_WORDS[thing.size])} " if with_size else ""
        shapes = [thing.shape, thing.shape, thing.shape] + [w for w, meant in SYNONYMS.items() if meant == thing.shape]
        parts.append(f"{_pick(rng, ('a', 'a', 'the'))} {size}{thing.colour} {_pick(rng, shapes)}")
    if len(parts) == 2:
        relation = "and" if rng.random() < 0.04 else _pick(rng, RELATION_WORDS[scene.relation])
        parts.insert(1, relation)
    prompt = _pick(rng, OPENINGS) + " ".join(parts) if rng.random() < 0.3 else " ".join(parts)
    if with_ground:
        ground = "grey" if scene.ground == "gray" and rng.random() < 0.3 else scene.ground
        prompt += " " + (_pick(rng, GROUND_WORDS) if rng.random() < 0.5 else GROUND_WORDS[0]).format(ground)
    if rng.random() < 0.05:
        words = prompt.split()
        words.insert(rng.integers(len(words) + 1), _pick(rng, UNKNOWN_WORDS))
        prompt = " ".join(words)
    return (prompt + ".") if rng.random() < 0.1 else prompt


def parse(prompt: str) -> Scene:
    """The scene a prompt names; unknown words are passed over. Raises ValueError if it names no shape or more than two.

    A size and a colour belong to the next shape; a colour that no shape follows is the ground.
    """
    meanings = {word: size for size, words in SIZE_WORDS.items() for word in words}
    relations = {"left": "left of", "right": "right of", "above": "above", "over": "above"}
    relations |= {"below": "below", "under": "below"}
    things: list[Thing] = []
    size = colour = relation = None
    for word in re.findall(r"\w+", prompt.lower()):
        word = SYNONYMS.get(word, word)
        if word in meanings:
            size = meanings[word]
        elif word in COLOURS:
            colour = word
        elif word in SHAPES:
            things.append(Thing(size, colour, word))
            size = colour = None
        elif word in relations:
            relation = relations[word]
    if len(things) not in (1, 2):
        known = ", ".join(SHAPES)
        raise ValueError(f"the prompt {prompt!r} names {len(things)} shapes; expected one or two of {known}")
    return Scene(tuple(things), relation, colour)


def held_out_prompts(count: int, seed: int) -> list[str]:
    """Distinct prompts in plain words that training never had: each names a combination it never saw. Half name two
    things."""
    rng = np.random.default_rng(seed)
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        prompts[describe(random_scene(rng, held_out=True, two_things=float(len(prompts) % 2)))] = None
    return list(prompts)


def draw(scenes: Sequence[Scene], rng: np.random.Generator, side: int = SIDE) -> np.ndarray:
    """Pictures [N, side, side, 3], float32 in 0..1, anti-aliased, things where the relation says."""
    canvas = np.array([COLOURS[scene.ground] for scene in scenes], np.float32)[:, None, None] / 255
    canvas = np.repeat(np.repeat(canvas, side, 1), side, 2)
    placed = [_place(scene, rng, side) for scene in scenes]
    for place in range(2):
        rows = [i for i, scene in enumerate(scenes) if len(scene.things) > place]
        if not rows:
            continue
        x, y, radius = np.array([placed[i][place] for i in rows], np.float32).T
        shapes = np.array([SHAPES.index(scenes[i].things[place].shape) for i in rows])
        colours = np.array([COLOURS[scenes[i].things[place].colour] for i in rows], np.float32)[:, None, None] / 255
        alpha = coverage(shapes, x, y, radius, side)[..., None]
        canvas[rows] += alpha * (colours - canvas[rows])
    return canvas


def coverage(shapes: np.ndarray, x: np.ndarray, y: np.ndarray, radius: np.ndarray, side: int = SIDE) -> np.ndarray:
    """Share of each pixel inside a shape, [N, side, side], from signed distances. x, y: centre; indices into SHAPES."""
    grid = np.arange(side, dtype=np.float32) + 0.5
    dx = np.abs(grid[None, None, :] - x[:, None, None])
    dy = grid[None, :, None] - y[:, None, None]
    r = radius[:, None, None]
    distance = np.empty((len(shapes), side, side), np.float32)
    for index, shape in enumerate(SHAPES):
        own = np.flatnonzero(shapes == index)
        a, b, c = dx[own], dy[own], r[own]
        if shape == "circle":
            distance[own] = np.sqrt(a * a + b * b) - c
        elif shape == "ring":
            distance[own] = np.abs(np.sqrt(a * a + b * b) - 0.75 * c) - 0.25 * c
        elif shape == "square":
            distance[own] = np.maximum(a, np.abs(b)) - 0.88 * c
        else:  # a triangle pointing up, 2 r wide and 1.8 r high
            distance[own] = np.maximum(b - 0.9 * c, (1.8 * a - (b + 0.9 * c)) / np.hypot(1.8, 1))
    return np.clip(0.5 - distance, 0, 1)


def check(picture: np.ndarray, prompt: str) -> list[str]:
    """What is wrong in a picture, measured against its prompt; an empty list if all is right.

    picture: [H, W, 3], float in 0..1 or uint8. Raises ValueError for a prompt outside the grammar (see `parse`).
    """
    wanted = parse(prompt)
    rgb = np.asarray(picture, np.float32) / (255 if np.asarray(picture).dtype == np.uint8 else 1)
    border = np.concatenate([rgb[0], rgb[-1], rgb[:, 0], rgb[:, -1]])
    ground_rgb = np.median(border, axis=0)
    ground, off = _nearest_colour(ground_rgb, GROUND_COLOURS)
    wrong = []
    if off > 0.15:
        wrong.append(f"the background {np.round(ground_rgb * 255)} is none of {', '.join(GROUND_COLOURS)}")
    elif wanted.ground not in (None, ground):
        wrong.append(f"the background is {ground}, not {wanted.ground}")

    difference = np.linalg.norm(rgb - ground_rgb, axis=-1)
    blobs = [blob for blob in _blobs(difference > 0.2) if blob.sum() >= LEAST_PIXELS]
    if len(blobs) != len(wanted.things):
        return [*wrong, f"{len(blobs)} things, not {len(wanted.things)}"]
    clear = ~_grown(np.any(blobs, axis=0), 2)
    deviation = difference[clear].mean() if clear.any() else float("inf")
    if deviation > 0.05:
        wrong.append(f"the background is not plain: mean deviation {deviation:.3f}")

    found = [_measure(rgb, blob, ground_rgb) for blob in blobs]
    orders = [found, found[::-1]] if len(found) == 2 else [found]
    return min(([*wrong, *_differences(wanted, order)] for order in orders), key=len)


@dataclass(frozen=True)
class _Found:
    thing: Thing
    likeness: float  # overlap of the outline with the ideal shape, 0..1
    colour_error: float
    x: float
    y: float


def _measure(rgb: np.ndarray, blob: np.ndarray, ground: np.ndarray) -> _Found:
    difference = np.linalg.norm(rgb - ground, axis=-1) * blob
    colour_rgb = np.median(rgb[difference > 0.75 * difference.max()], axis=0)
    colour, colour_error = _nearest_colour(colour_rgb, OBJECT_COLOURS)
    direction = colour_rgb - ground
    alpha = np.clip((rgb - ground) @ direction / (direction @ direction), 0, 1) * _grown(blob, 1)
    weight = alpha / alpha.sum()
    rows, columns = np.indices(alpha.shape) + 0.5
    x, y = float((weight * columns).sum()), float((weight * rows).sum())
    # For each shape, the ideal one of the same area and centroid.
    areas = np.array([np.pi, 1.76**2, 1.8, 0.75 * np.pi])  # over the squared radius, in SHAPES' order
    radii = np.sqrt(alpha.sum() / areas)
    centre_y = y - np.array([0, 0, 0.3, 0]) * radii  # a triangle's centroid lies below the middle of its height
    ideal = coverage(np.arange(len(SHAPES)), np.full(len(SHAPES), x), centre_y, radii, rgb.shape[0])
    overlap = np.minimum(ideal, alpha).sum((1, 2)) / np.maximum(ideal, alpha).sum((1, 2))
    best = int(overlap.argmax())
    size = "small" if radii[best] < 10 else "large"
    return _Found(Thing(size, colour, SHAPES[best]), float(overlap[best]), colour_error, x, y)


def _differences(wanted: Scene, found: Sequence[_Found]) -> list[str]:
    wrong = []
    for want, got in zip(wanted.things, found, strict=True):
        if got.likeness < LEAST_LIKENESS:
            nearest = f"{got.thing.shape} {got.likeness:.2f}"
            wrong.append(f"no clear shape where a {want.shape} should be (nearest: {nearest})")
        if got.colour_error > 0.2:
            wrong.append(f"no clear colour where {want.colour} should be (nearest: {got.thing.colour})")
        for name in ("size", "colour", "shape"):
            value, expected = getattr(got.thing, name), getattr(want, name)
            if expected not in (None, value):
                wrong.append(f"{value}, not {expected}")
    if wanted.relation and len(found) == 2:
        dx, dy = found[0].x - found[1].x, found[0].y - found[1].y
        relation = ("left of" if dx < 0 else "right of") if abs(dx) > abs(dy) else ("above" if dy < 0 else "below")
        if relation != wanted.relation:
            wrong.append(f"the {wanted.things[0].shape} lies {relation} the other, not {wanted.relation} it")
    return wrong


def _nearest_colour(rgb: np.ndarray, names: Sequence[str]) -> tuple[str, float]:
    distances = np.linalg.norm(np.array([COLOURS[name] for name in names]) / 255 - rgb, axis=-1)
    return names[int(distances.argmin())], float(distances.min())


def _blobs(mask: np.ndarray) -> list[np.ndarray]:
    """Connected regions (diagonal neighbours count) of a boolean mask, as masks."""
    rest = mask.copy()
    blobs = []
    while rest.any():
        blob = np.zeros_like(rest)
        todo = [tuple(np.argwhere(rest)[0])]
        while todo:
            y, x = todo.pop()
            if not rest[y, x]:
                continue
            rest[y, x] = False
            blob[y, x] = True
            todo += [
                (j, i)
                for j in range(max(y - 1, 0), min(y + 2, mask.shape[0]))
                for i in range(max(x - 1, 0), min(x + 2, mask.shape[1]))
            ]
        blobs.append(blob)
    return blobs


def _grown(mask: np.ndarray, pixels: int) -> np.ndarray:
    padded = np.pad(mask, pixels)
    span = range(2 * pixels + 1)
    height, width = mask.shape
    return np.any([padded[j : j + height, i : i + width] for j in span for i in span], axis=0)


def _place(scene: Scene, rng: np.random.Generator, side: int) -> list[tuple[float, float, float]]:
    """(x, y, radius) of each thing: in the middle, or on either side of it, and at most a pixel off.

    The place follows from the words: a model of this size learns that in minutes, and free places in hours.
    """
    radii = [rng.uniform(*RADII[thing.size]) for thing in scene.things]
    jitter = rng.uniform(-1, 1, (len(radii), 2))
    middle, off = side / 2, 15 * side / 64
    x, y = {
        None: (0, 0), "left of": (-off, 0), "right of": (off, 0), "above": (0, -off), "below": (0, off)
    }[scene.relation]  # fmt: skip
    return [
        (middle + sign * x + dx, middle + sign * y + dy, radius)
        for sign, (dx, dy), radius in zip((1, -1), jitter, radii, strict=False)
    ]


def _pick(rng: np.random.Generator, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]
