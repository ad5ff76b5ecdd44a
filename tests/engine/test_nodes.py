"""What single nodes do, where no comparison with ComfyUI's latents shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from comfyui_graphs import node, text_to_latent
from PIL import Image
from safetensors.torch import save_file
from support import rel_err


def picture(path: Path, size: tuple[int, int] = (20, 12), mode: str = "RGB") -> torch.Tensor:
    """Writes a picture of plain numbers; returns its colours [H, W, 3] from 0 to 1."""
    bands = len(mode)
    values = (torch.arange(size[0] * size[1] * bands) * 37 % 256).to(torch.uint8).reshape(size[1], size[0], bands)
    Image.fromarray(values.squeeze(-1).numpy(), mode).save(path)
    return values[..., :3].float() / 255.0


@pytest.fixture
def show(run, tmp_path: Path):
    """Runs a graph with its node `result` taken by a preview; returns the outputs of that node."""

    def shown(graph: dict, output: int = 0, **options):
        graph = {**graph, "shown": node("PreviewImage", images=["result", output])}
        return run(graph, input_dir=tmp_path, **options).outputs["result"]

    return shown


def test_a_picture_is_loaded_with_its_transparency_as_mask(show, tmp_path: Path):
    colours = picture(tmp_path / "a.png", mode="RGBA")
    image, mask = show({"result": node("LoadImage", image="a.png")})

    assert torch.equal(image[0], colours)
    alpha = torch.frombuffer(bytearray(Image.open(tmp_path / "a.png").getchannel("A").tobytes()), dtype=torch.uint8)
    torch.testing.assert_close(mask[0].flatten(), 1.0 - alpha / 255.0)


def test_a_picture_without_transparency_has_an_empty_mask(show, tmp_path: Path):
    picture(tmp_path / "a.png")
    _, mask = show({"result": node("LoadImage", image="a.png", upload="image")})

    assert mask.shape == (1, 64, 64) and not mask.any()


def test_a_changed_picture_is_loaded_again(run, tmp_path: Path):
    graph = {"load": node("LoadImage", image="a.png"), "shown": node("PreviewImage", images=["load", 0])}
    picture(tmp_path / "a.png", (8, 8))
    run(graph, input_dir=tmp_path)
    picture(tmp_path / "a.png", (9, 9))

    assert run(graph, input_dir=tmp_path).outputs["load"][0].shape == (1, 9, 9, 3)


@pytest.mark.parametrize("method", ["nearest-exact", "bilinear", "area", "bicubic", "lanczos"])
def test_a_picture_is_scaled(show, tmp_path: Path, method: str):
    picture(tmp_path / "a.png")
    settings = {"upscale_method": method, "width": 10, "height": 0, "crop": "disabled"}
    graph = {
        "load": node("LoadImage", image="a.png"),
        "result": node("ImageScale", image=["load", 0], **settings),
    }

    (scaled,) = show(graph)
    assert scaled.shape == (1, 6, 10, 3)
    assert 0.3 < scaled.mean() < 0.7


def test_a_centre_crop_keeps_proportions(show, tmp_path: Path):
    colours = picture(tmp_path / "a.png", (20, 12))
    settings = {"upscale_method": "nearest-exact", "width": 12, "height": 12, "crop": "center"}
    graph = {"load": node("LoadImage", image="a.png"), "result": node("ImageScale", image=["load", 0], **settings)}

    (scaled,) = show(graph)
    assert torch.equal(scaled[0], colours[:, 4:16])


def test_pixel_space_encodes_and_decodes_without_loss(run, tmp_path: Path):
    colours = picture(tmp_path / "a.png", (16, 8))
    graph = {
        "load": node("LoadImage", image="a.png"),
        "vae": node("VAELoader", vae_name="pixel_space"),
        "latent": node("VAEEncode", pixels=["load", 0], vae=["vae", 0]),
        "back": node("VAEDecode", samples=["latent", 0], vae=["vae", 0]),
        "shown": node("PreviewImage", images=["back", 0]),
    }
    outputs = run(graph, input_dir=tmp_path).outputs

    torch.testing.assert_close(outputs["latent"][0]["samples"][0].movedim(0, -1), colours * 2 - 1)
    torch.testing.assert_close(outputs["back"][0][0], colours)


def test_inpainting_hides_the_masked_part_and_grows_the_mask(run, tmp_path: Path):
    picture(tmp_path / "a.png", (16, 16))
    mask = torch.zeros(16, 16, dtype=torch.uint8)
    mask[4:8, 4:8] = 255
    alpha = Image.fromarray((255 - mask).numpy(), "L")
    transparent = Image.open(tmp_path / "a.png")
    transparent.putalpha(alpha)
    transparent.save(tmp_path / "b.png")
    graph = {
        "load": node("LoadImage", image="b.png"),
        "vae": node("VAELoader", vae_name="pixel_space"),
        "latent": node("VAEEncodeForInpaint", pixels=["load", 0], vae=["vae", 0], mask=["load", 1], grow_mask_by=3),
        "save": node("SaveLatent", samples=["latent", 0], filename_prefix="x"),
    }
    latent = run(graph, input_dir=tmp_path).outputs["latent"][0]

    assert latent["samples"][0, :, 4:8, 4:8].abs().max() == 0
    assert latent["noise_mask"][0, 0].sum() == 36
    assert latent["noise_mask"][0, 0, 3:9, 3:9].all()


def tiny_flux_autoencoder() -> torch.nn.Module:
    from nativedit.autoencoders.kl import AutoencoderKL

    torch.manual_seed(0)
    return AutoencoderKL(block_out_channels=(32, 32), layers_per_block=1, latent_channels=16, dtype=torch.bfloat16)


@pytest.mark.parametrize("tiled", [False, True])
def test_an_autoencoder_of_a_file_decodes_and_encodes(run, models: Path, tmp_path: Path, tiled: bool):
    module = tiny_flux_autoencoder()
    save_file(module.state_dict(), models / "vae" / "ae.safetensors")
    colours = picture(tmp_path / "a.png", (17, 33))
    tile = {"tile_size": 64, "overlap": 16} if tiled else {}
    graph = {
        "load": node("LoadImage", image="a.png"),
        "vae": node("VAELoader", vae_name="ae.safetensors"),
        "latent": node("VAEEncode", pixels=["load", 0], vae=["vae", 0]),
        "back": node("VAEDecodeTiled" if tiled else "VAEDecode", samples=["latent", 0], vae=["vae", 0], **tile),
        "shown": node("PreviewImage", images=["back", 0]),
    }
    outputs = run(graph, input_dir=tmp_path).outputs

    module = module.float()
    with torch.inference_mode():
        # Cropped around the middle to multiples of the compression, 2: from row 0 and column 0 here.
        latent = module.encode(colours[None, :32, :16].movedim(-1, 1) * 2 - 1)
        expected = ((module.decode(latent) + 1) / 2).clamp(0, 1).movedim(1, -1)
    assert rel_err(outputs["latent"][0]["samples"], latent) <= 1e-5
    assert rel_err(outputs["back"][0], expected) <= 1e-5


def test_a_file_that_is_no_autoencoder(run, models: Path):
    import shutil

    from nativedit.engine.errors import NodeError

    shutil.copy(models / "text_encoders" / "tiny_text.safetensors", models / "vae" / "text.safetensors")
    graph = {
        "vae": node("VAELoader", vae_name="text.safetensors"),
        "latent": node("EmptyLatentImage", width=64, height=64, batch_size=1),
        "back": node("VAEDecode", samples=["latent", 0], vae=["vae", 0]),
        "shown": node("PreviewImage", images=["back", 0]),
    }
    with pytest.raises(NodeError, match=r"node vae VAELoader: .*is a text encoder, not an autoencoder"):
        run(graph)


def test_a_latent_batch_is_repeated_with_noise_of_its_own(run):
    graph = text_to_latent(steps=1)
    graph["repeated"] = node("RepeatLatentBatch", samples=["latent", 0], amount=2)
    graph["sampler"]["inputs"]["latent_image"] = ["repeated", 0]
    samples = run(graph).outputs["sampler"][0]["samples"]

    assert samples.shape[0] == 2 and not torch.allclose(samples[0], samples[1])


def test_latents_are_scaled(run):
    graph = text_to_latent(steps=1)
    graph["larger"] = node("LatentUpscaleBy", samples=["sampler", 0], upscale_method="nearest-exact", scale_by=2.0)
    graph["fixed"] = node(
        "LatentUpscale", samples=["larger", 0], upscale_method="bilinear", width=640, height=0, crop="disabled"
    )
    graph["save"]["inputs"]["samples"] = ["fixed", 0]
    outputs = run(graph).outputs

    assert outputs["larger"][0]["samples"].shape == (1, 3, 96, 128)
    assert outputs["fixed"][0]["samples"].shape == (1, 3, 60, 80)


def test_values_travel_along_links(run):
    graph = text_to_latent(steps=4)
    graph["steps"] = node("PrimitiveInt", value=1)
    graph["cfg"] = node("PrimitiveFloat", value=2.0)
    graph["words"] = node("PrimitiveStringMultiline", value="a red circle")
    graph["number"] = node("SeedNode", seed=3)
    graph["sampler"]["inputs"] |= {"steps": ["steps", 0], "cfg": ["cfg", 0], "seed": ["number", 0]}
    graph["positive"]["inputs"]["text"] = ["words", 0]
    linked = run(graph).outputs["sampler"][0]["samples"]

    plain = run(text_to_latent(steps=1, cfg=2.0, seed=3, prompt="a red circle")).outputs["sampler"][0]["samples"]
    assert torch.equal(linked, plain)


def test_a_drawn_seed_reaches_a_seed_node(run):
    graph = text_to_latent(steps=1)
    graph["number"] = node("SeedNode", seed=-1)
    graph["sampler"]["inputs"]["seed"] = ["number", 0]

    assert run(graph).seeds["number"] >= 0


def test_a_sampler_tells_each_clean_latent_and_may_stop_before_the_end():
    from nativedit.engine.flow import FlowSampling
    from nativedit.engine.samplers import SAMPLERS, Run

    flow = FlowSampling("velocity")
    seen: list[torch.Tensor] = []
    x = torch.ones(1, 3, 2, 2)
    end = SAMPLERS["euler"](
        lambda x, sigma: x * 0.5, x, torch.tensor([0.9, 0.5]), Run(flow, 0, lambda step, x0: seen.append(x0))
    )
    torch.testing.assert_close(seen[0], x * 0.5)
    torch.testing.assert_close(end, x + (x - x * 0.5) / 0.9 * (0.5 - 0.9))


def test_a_latent_with_content_of_another_model_is_refused():
    from types import SimpleNamespace

    from nativedit.engine.sampling import fit_empty_latent
    from nativedit.latent_formats import get_latent_format

    card = SimpleNamespace(title="PRXPixel", autoencoder="pixel_space")
    model = SimpleNamespace(latent=get_latent_format("rgb"), architecture=card)
    with pytest.raises(ValueError, match="the latent has 16 channels, PRXPixel works on 3"):
        fit_empty_latent(model, {"samples": torch.ones(1, 16, 8, 8)})


@pytest.mark.parametrize(
    ("prediction", "output"),
    [("velocity", lambda x0, noise: noise - x0), ("-velocity", lambda x0, noise: x0 - noise), ("x0", lambda x0, _: x0)],
)
def test_every_prediction_leads_back_to_the_clean_latent(prediction: str, output):
    from nativedit.engine.flow import FlowSampling

    flow = FlowSampling(prediction, noise_scale=2.0)
    x0, noise = torch.randn(2, 2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.3, 0.8])
    x = flow.noisy(sigma, noise, x0)

    torch.testing.assert_close(flow.denoised(sigma, output(x0, 2.0 * noise), x), x0)


def test_below_its_floor_an_x0_model_stops_short_as_its_reference_does():
    """diffusers' PRXPixelPipeline: velocity (x - x0) / max(sigma, 0.05), then an Euler step to 0."""
    from nativedit.engine.flow import FlowSampling

    flow = FlowSampling("x0", x0_sigma_floor=0.05)
    x, x0, sigma = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.2]]]]), torch.tensor([0.01])

    torch.testing.assert_close(flow.denoised(sigma, x0, x), x - 0.01 * (x - x0) / 0.05)
    torch.testing.assert_close(flow.denoised(torch.tensor([0.06]), x0, x), x0)


@pytest.mark.parametrize("p", [1e-6, 0.01, 0.25, 0.5, 0.7, 0.999])
def test_the_beta_quantile_inverts_the_distribution(p: float):
    """Beta(1/2, 1/2) is the arcsine law: its quantile is sin^2(pi p / 2)."""
    import math

    from nativedit.engine.beta_quantile import beta_cdf, beta_quantile

    assert math.isclose(beta_quantile(p, 0.5, 0.5), math.sin(math.pi * p / 2) ** 2, rel_tol=1e-9, abs_tol=1e-15)
    assert math.isclose(beta_cdf(beta_quantile(p, 0.6, 0.6), 0.6, 0.6), p, rel_tol=1e-9)
