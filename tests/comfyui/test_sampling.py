"""Our models in ComfyUI's graphs give the numbers that a plain loop gives, whatever nodes stand in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import comfyui_files as files
import pytest
import torch
from comfyui_graphs import PROMPT, from_checkpoint, node, text_to_latent, with_model_node, with_picture
from comfyui_server import Server, at_least
from PIL import Image
from support import rel_err

pytestmark = pytest.mark.comfyui

Run = Callable[[dict], torch.Tensor]


def plain_loop(config: dict, size: tuple[int, int], *, seed=7, steps=4, cfg=4.0, shift=3.0) -> torch.Tensor:
    """Euler on the "simple" schedule for a model that predicts x0, noise scale 2, written out with nothing shared but
    the modules themselves."""
    from nativedit.ldm.prx.model import PRXTransformer2DModel
    from nativedit.text_encoders.language_model import LanguageModel

    dit = PRXTransformer2DModel(**config)
    dit.load_state_dict(files.dit_state(config))
    text = LanguageModel(**files.TEXT)
    text.load_state_dict(files.text_state())
    ids = [2 + files.WORDS.index(word) for word in PROMPT.split()]
    with torch.inference_mode():
        context = text(torch.tensor([ids]))
        table = torch.arange(1, 1001) / 1000
        table = shift * table / (1 + (shift - 1) * table)
        sigmas = [float(table[-(1 + i * 1000 // steps)]) for i in range(steps)] + [0.0]
        noise = torch.randn(1, 3, size[1], size[0], generator=torch.manual_seed(seed))
        x = 2.0 * noise * sigmas[0]
        for sigma, following in pairwise(sigmas):
            t = torch.tensor([sigma])
            conditional, unconditional = dit(x, t, context), dit(x, t, context[:, :0])
            x0 = unconditional + cfg * (conditional - unconditional)
            x = x + (x - x0) / sigma * (following - sigma)
    return x


def test_the_latent_is_that_of_a_plain_loop(latent: Run):
    assert rel_err(latent(text_to_latent()), plain_loop(files.DIT, (64, 48))) <= 1e-4


def test_a_configuration_that_only_the_header_knows_is_used(latent: Run):
    graph = text_to_latent(model="odd.safetensors")

    assert rel_err(latent(graph), plain_loop(files.ODD, (64, 48))) <= 1e-4


def test_every_loader_gives_the_same_latent(latent: Run):
    graphs = [
        text_to_latent(),
        text_to_latent(loader="NativeDiTLoadDiffusionModel"),
        text_to_latent(own_clip_loader=False),
        text_to_latent(model="tiny_prefixed.safetensors"),
        from_checkpoint("tiny_all.safetensors"),
    ]

    first, *others = [latent(graph) for graph in graphs]

    assert first.std() > 0.1
    for other in others:
        assert torch.equal(first, other)


def test_an_all_in_one_file_brings_the_pixel_autoencoder(server: Server):
    graph = from_checkpoint("tiny_all.safetensors")
    graph["decode"] = node("VAEDecode", samples=["sampler", 0], vae=["checkpoint", 2])
    graph["picture"] = node("SaveImage", images=["decode", 0], filename_prefix="all")

    assert server.run(graph)["picture"]["images"]


def test_a_picture_comes_out(server: Server):
    from PIL import Image

    outputs = server.run(with_picture(text_to_latent()))

    with Image.open(server.file_of(outputs["picture"]["images"][0])) as picture:
        assert picture.size == (64, 48)
        assert "prompt" in picture.info


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        ("ModelSamplingSD3", {"shift": 3.0}),
        ("ModelSamplingAuraFlow", {"shift": 3.0}),
        ("ModelNoiseScale", {"noise_scale": 2.0}),
    ],
)
def test_sampling_nodes_of_comfyui_keep_the_prediction(server: Server, latent: Run, kind: str, inputs: dict):
    if kind == "ModelNoiseScale" and not at_least(server.comfyui, "0.29"):
        pytest.skip("this ComfyUI has no ModelNoiseScale")
    graph = with_model_node(text_to_latent(), "patch", kind, **inputs)

    assert rel_err(latent(graph), latent(text_to_latent())) <= 1e-6


def test_a_shift_set_by_a_node_is_used(latent: Run):
    graph = with_model_node(text_to_latent(), "patch", "ModelSamplingSD3", shift=6.0)

    assert rel_err(latent(graph), plain_loop(files.DIT, (64, 48), shift=6.0)) <= 1e-4


def test_bf16_stays_close_to_float32(latent: Run):
    stored = text_to_latent(model="tiny_bf16.safetensors", clip="tiny_text_bf16.safetensors")

    assert rel_err(latent(stored), latent(text_to_latent())) <= 0.03


@pytest.mark.parametrize(
    ("sampler", "scheduler"),
    [("dpmpp_2m", "karras"), ("uni_pc", "simple"), ("lcm", "sgm_uniform"), ("euler_ancestral", "beta")],
)
def test_samplers_and_schedules_of_every_kind_give_finite_pictures(latent: Run, sampler: str, scheduler: str):
    result = latent(text_to_latent(sampler=sampler, scheduler=scheduler))

    assert result.isfinite().all()
    assert 0.05 < result.std() < 3


def test_a_batch_is_the_same_pictures_at_once(latent: Run):
    batch = latent(text_to_latent(batch=2))

    assert batch.shape == (2, 3, 48, 64)
    assert rel_err(batch[:1], latent(text_to_latent())) <= 1e-4


def test_an_empty_latent_of_comfyui_for_pixel_models_fits_too(latent: Run):
    graph = text_to_latent()
    graph["latent"] = node("EmptyChromaRadianceLatentImage", width=64, height=48, batch_size=1)

    assert torch.equal(latent(graph), latent(text_to_latent()))


def test_image_to_image_keeps_what_the_mask_protects(server: Server, latent: Run):
    graph = text_to_latent(denoise=0.6)
    graph["start"] = node("EmptyImage", width=64, height=48, batch_size=1, color=0x804020)
    graph["vae"] = node("VAELoader", vae_name="pixel_space")
    graph["encoded"] = node("VAEEncode", pixels=["start", 0], vae=["vae", 0])
    graph["mask"] = node("SolidMask", value=0.0, width=64, height=48)
    graph["hole"] = node("SolidMask", value=1.0, width=32, height=48)
    graph["joined"] = node("MaskComposite", destination=["mask", 0], source=["hole", 0], x=32, y=0, operation="add")
    graph["latent"] = node("SetLatentNoiseMask", samples=["encoded", 0], mask=["joined", 0])

    result = latent(graph)

    start = torch.tensor([0x80, 0x40, 0x20]).view(3, 1, 1) / 255 * 2 - 1
    assert (result[0, :, :, :32] - start).abs().max() < 1e-3
    assert (result[0, :, :, 32:] - start).abs().max() > 0.1


# Drawn at random, and none of them recorded: sampler, scheduler, steps, cfg, denoise, batch, seed, mask.
DRAWN = [
    ("dpmpp_sde", "beta", 3, 1.0, 0.5, 1, 0, True),
    ("heun", "exponential", 7, 1.0, 0.85, 1, 2**63 + 1, False),
    ("euler_ancestral", "sgm_uniform", 3, 4.0, 0.2, 2, 0, True),
    ("uni_pc", "karras", 5, 1.5, 1.0, 3, 2**32 + 5, False),
    ("lcm", "ddim_uniform", 2, 4.0, 0.85, 2, 7, True),
]


def test_the_engine_gives_comfyuis_latents_for_settings_that_nobody_recorded(server: Server, latent: Run, tmp_path):
    import nativedit

    if not at_least(server.comfyui, "0.29"):
        pytest.skip("the engine has the samplers of ComfyUI 0.29 and newer; older ones give other numbers")
    alpha = torch.randint(0, 256, (48, 64), generator=torch.manual_seed(3), dtype=torch.uint8)
    alpha[:, :20] = 255  # of the alpha channel ComfyUI's mask is what it lacks
    for folder in (server.base / "input", tmp_path):
        Image.new("RGB", (64, 48)).save(folder / "drawn.png")
        with Image.open(folder / "drawn.png") as picture:
            picture.putalpha(Image.fromarray(alpha.numpy()))
            picture.save(folder / "drawn.png")
    for sampler, scheduler, steps, cfg, denoise, batch, seed, masked in DRAWN:
        settings = {"steps": steps, "cfg": cfg, "sampler": sampler, "scheduler": scheduler, "denoise": denoise}
        graph = text_to_latent(steps=2, batch=batch, negative="a green square")
        graph["second"] = text_to_latent(**settings, seed=seed)["sampler"]
        graph["second"]["inputs"]["latent_image"] = ["masked" if masked else "sampler", 0]
        graph["save"]["inputs"]["samples"] = ["second", 0]
        if masked:
            graph["alpha"] = node("LoadImage", image="drawn.png")
            graph["masked"] = node("SetLatentNoiseMask", samples=["sampler", 0], mask=["alpha", 1])
        places = {"models_dir": server.base / "models", "output_dir": tmp_path, "input_dir": tmp_path}
        here = nativedit.run(graph, **places, progress=False).outputs["second"][0]["samples"]
        assert rel_err(here, latent(graph)) <= 1e-4, (sampler, scheduler)


def test_hooks_of_other_packs_are_called_at_every_step_and_change_nothing(server: Server, latent: Run):
    graph = with_model_node(text_to_latent(cfg=1.0), "probe", "ProbePatchModel")
    graph["counts"] = node("ProbeCounts", after=["sampler", 0])

    outputs = server.run(graph)

    counts = outputs["counts"]["counts"][0]
    steps, blocks = 4, files.DIT["depth"]
    assert counts["block replace"] == counts["wrapper"] == steps
    assert counts["block patch"] == counts["attention override"] == steps * blocks
    assert counts["blocks seen"] == counts["total blocks"] == blocks
    patched = files.tensors(server.file_of(outputs["save"]["latents"][0]))["latent_tensor"]
    assert torch.equal(patched, latent(text_to_latent(cfg=1.0)))


def test_easycache_skips_steps(server: Server, latent: Run):
    graph = with_model_node(
        text_to_latent(steps=12),
        "cache",
        "EasyCache",
        reuse_threshold=3.0,
        start_percent=0.1,
        end_percent=0.95,
        verbose=True,
    )

    result, log = server.log_during(lambda: latent(graph))

    assert result.isfinite().all()
    assert int(log.rsplit("skipped ", 1)[1].split("/")[0]) > 0


def test_a_weighted_word_changes_the_picture_a_weight_of_one_does_not(latent: Run):
    plain = latent(text_to_latent(prompt="a red circle"))

    assert torch.equal(latent(text_to_latent(prompt="a (red:1.0) circle")), plain)
    assert rel_err(latent(text_to_latent(prompt="a (red:1.6) circle")), plain) > 1e-3


def test_joined_and_averaged_prompts_run(latent: Run):
    graph = text_to_latent()
    graph["joined"] = node("ConditioningConcat", conditioning_to=["positive", 0], conditioning_from=["negative", 0])
    graph["mixed"] = node(
        "ConditioningAverage",
        conditioning_to=["joined", 0],
        conditioning_from=["positive", 0],
        conditioning_to_strength=0.5,
    )
    graph["sampler"]["inputs"]["positive"] = ["mixed", 0]

    assert latent(graph).isfinite().all()


def test_the_settings_are_in_every_picture_also_where_the_sampler_is_cached(server: Server):
    graph = with_picture(text_to_latent())
    inputs = {name: [name, 0] for name in ("model", "positive", "negative")}
    graph["sampler"] = node(
        "NativeDiTSample", seed=3, steps=2, cfg=-1.0, sampler_name="auto", scheduler="auto", **inputs
    )
    graph["sampler"]["inputs"] |= {"latent_image": ["latent", 0], "shift": 0.0, "denoise": 1.0}
    kept = []
    for prefix in ("first", "second"):
        graph["picture"]["inputs"]["filename_prefix"] = prefix
        outputs = server.run(graph)
        with Image.open(server.file_of(outputs["picture"]["images"][0])) as picture:
            kept.append(json.loads(picture.info["prompt"])["sampler"])

    assert kept[0]["_meta"]["nativedit"]["steps"] == 2 and kept[0]["_meta"]["nativedit"]["sampler"] != "auto"
    assert kept[0] == kept[1]

    graph["sampler"]["inputs"]["steps"] = 1
    with Image.open(server.file_of(server.run(graph)["picture"]["images"][0])) as picture:
        assert json.loads(picture.info["prompt"])["sampler"]["_meta"]["nativedit"]["steps"] == 1
