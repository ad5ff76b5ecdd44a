"""Records ComfyUI's sigmas and sampled latents. Run by ComfyUI's own Python, in a process of its own:

python record_sampling.py COMFYUI_FOLDER OUT.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path

comfyui, out = Path(sys.argv[1]), Path(sys.argv[2])
sys.argv[1:] = ["--cpu"]
sys.path[:0] = [str(comfyui), str(Path(__file__).parent)]

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_sampling  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.samplers  # noqa: E402
import sampling_cases as toy  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402


class ModelSampling(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):
    pass


class Config:
    def __init__(self, flow: str):
        shift, multiplier, noise_scale = toy.FLOWS[flow]
        self.sampling_settings = {"shift": shift, "multiplier": multiplier, "noise_scale": noise_scale}


class InnerModel:
    def __init__(self, model_sampling):
        self.model_sampling = model_sampling

    def scale_latent_inpaint(self, sigma, noise, latent_image, **_):
        return self.model_sampling.noise_scaling(sigma.reshape(-1, 1, 1, 1), noise, latent_image)


class Wrap:
    """What a sampler sees of a model: itself as a function, and the objects it looks settings up in."""

    cfg = 1.0

    def __init__(self, flow: str):
        self.inner_model = self.model = InnerModel(ModelSampling(Config(flow)))
        self.model_patcher = self

    def get_model_object(self, name):
        return getattr(self.inner_model, name)

    def __call__(self, x, sigma, **_):
        return toy.toy_x0(x, sigma)


recorded = {}
for flow in toy.FLOWS:
    sampling = Wrap(flow).inner_model.model_sampling
    recorded[f"table/{flow}"] = sampling.sigmas
    for scheduler in toy.SCHEDULES:
        for steps in toy.STEPS:
            recorded[f"sigmas/{flow}/{scheduler}/{steps}"] = comfy.samplers.calculate_sigmas(sampling, scheduler, steps)

latent, mask = toy.start()
for case in toy.cases():
    wrap = Wrap(case.flow)
    wrap.model_options = {}
    ksampler = comfy.samplers.KSampler(
        wrap, case.steps, torch.device("cpu"), case.sampler, case.scheduler, case.denoise, {}
    )
    image = latent if case.masked else torch.zeros(toy.SHAPE)
    noise = comfy.sample.prepare_noise(image, toy.SEED)
    recorded["latent/" + case.name] = comfy.samplers.sampler_object(case.sampler).sample(
        wrap,
        ksampler.sigmas,
        {"model_options": {}, "seed": toy.SEED},
        None,
        noise,
        image,
        mask.expand(toy.SHAPE) if case.masked else None,
        True,
    )

save_file({key: value.float().contiguous().clone() for key, value in recorded.items()}, out)
