"""The demo model in demo/ draws what a prompt says, and the pixel check that judges it is itself right."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

MEGABYTE = 1_000_000


def script(root: Path, name: str):
    """scripts/ is no package and must not come onto sys.path for other tests."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, root / "scripts" / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="module")
def pictures(root: Path):
    return script(root, "demo_pictures")


@pytest.fixture(scope="module")
def training(root: Path, pictures):
    return script(root, "train_demo")


@pytest.fixture(scope="module")
def demo(root: Path, training):
    return training.load(root / "demo")


def test_at_least_nine_of_ten_held_out_prompts_come_out_fully_right(training, demo):
    right, wrong = training.score(demo, 60, seed=2)
    assert right >= 0.9, wrong


def test_every_held_out_prompt_names_a_combination_that_training_never_draws(pictures):
    rng = np.random.default_rng(0)
    trained = [pictures.random_scene(rng) for _ in range(3000)]
    combinations = {(thing, scene.ground) for scene in trained for thing in scene.things}
    for prompt in pictures.held_out_prompts(60, seed=2):
        scene = pictures.parse(prompt)
        assert not combinations.issuperset((thing, scene.ground) for thing in scene.things), prompt


def test_every_trained_word_of_the_test_prompts_is_in_the_vocabulary(training, pictures, demo):
    tokenizer = demo[2]
    unknown = tokenizer.token_to_id("<unk>")
    for prompt in pictures.held_out_prompts(60, seed=2):
        assert unknown not in tokenizer.encode(prompt).ids, prompt
    assert tokenizer.encode("a Photorealistic RED circle").tokens == ["a", "<unk>", "red", "circle"]
    assert tokenizer.encode("").ids == []


def test_the_pixel_check_accepts_every_drawn_scene(pictures):
    rng = np.random.default_rng(1)
    scenes = [pictures.random_scene(rng, held_out=bool(i % 2)) for i in range(200)]
    for scene, picture in zip(scenes, pictures.draw(scenes, rng), strict=True):
        prompts = pictures.describe(scene), pictures.describe(scene, rng)
        assert [pictures.check(picture, prompt) for prompt in prompts] == [[], []], prompts


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("a small red circle left of a large blue square on a white background", "large, not small"),
        ("a large green circle left of a large blue square on a white background", "red, not green"),
        ("a large red ring left of a large blue square on a white background", "circle, not ring"),
        ("a large red circle above a large blue square on a white background", "left of the other, not above"),
        ("a large red circle right of a large blue square on a white background", "left of the other, not right of"),
        ("a large red square left of a large blue circle on a white background", "circle, not square"),
        ("a large red circle left of a large blue square on a gray background", "the background is white, not gray"),
        ("a large red circle on a white background", "2 things, not 1"),
    ],
)
def test_the_pixel_check_names_what_differs_from_the_prompt(pictures, prompt: str, problem: str):
    scene = pictures.parse("a large red circle left of a large blue square on a white background")
    picture = pictures.draw([scene], np.random.default_rng(2))[0]
    assert any(problem in found for found in pictures.check(picture, prompt))


def test_the_pixel_check_refuses_noise_and_blurred_shapes(pictures):
    rng = np.random.default_rng(3)
    prompt = "a large red circle on a white background"
    assert pictures.check(rng.random((64, 64, 3)), prompt)
    picture = pictures.draw([pictures.parse(prompt)], rng)[0]
    smeared = sum(np.roll(picture, shift, axis=1) for shift in range(-12, 13)) / 25
    assert pictures.check(smeared, prompt)


def test_a_prompt_without_a_known_shape_is_an_error_that_lists_the_shapes(pictures):
    with pytest.raises(ValueError, match="names 0 shapes; expected one or two of circle, square, triangle, ring"):
        pictures.parse("a dog in the snow")


def test_the_two_files_stay_below_twelve_megabytes_and_say_what_they_are(root: Path, training):
    from safetensors import safe_open

    files = [root / "demo" / training.TRANSFORMER_FILE, root / "demo" / training.TEXT_ENCODER_FILE]
    assert sum(file.stat().st_size for file in files) <= 12 * MEGABYTE
    for file, part in zip(files, ("transformer", "text_encoder"), strict=True):
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        assert json.loads(metadata["config"]).keys() == {part}
        assert metadata["nativedit.architecture"] == "prx_pixel"
        assert metadata["modelspec.license"] == "GPL-3.0-or-later"
