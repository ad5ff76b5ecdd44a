"""Sampling, as ComfyUI's nodes of the same names."""

from __future__ import annotations

from typing import Any

import torch

from .declare import engine_host, io
from .samplers import SAMPLERS
from .sampling import Guider, fit_empty_latent, noise_for, sample
from .schedules import SCHEDULES, sigmas_for

LARGEST_SEED = 0xFFFFFFFFFFFFFFFF


def run_sampler(
    guider: Guider,
    latent: dict[str, Any],
    sampler: str,
    sigmas: torch.Tensor,
    *,
    seed: int,
    add_noise: bool = True,
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """(latent with the samples, x0 of the last step; None without a step). seed: of the noise, also what steps add."""
    samples = fit_empty_latent(guider.model, latent)
    noise = noise_for(samples, seed, latent.get("batch_index")) if add_noise else torch.zeros_like(samples)
    last: list[torch.Tensor] = []
    with engine_host().progress.bar(max(0, len(sigmas) - 1), sampler) as bar:

        def on_step(step: int, denoised: torch.Tensor) -> None:
            last[:] = [denoised]
            bar.to(step + 1)

        mask = latent.get("noise_mask")
        done = sample(guider, noise, samples, sampler, sigmas, seed=seed, mask=mask, on_step=on_step)
    kept = {key: value for key, value in latent.items() if not key.startswith("downscale_ratio_")}
    x0 = guider.model.latent.from_model(last[0].float()).cpu() if last else None
    return {**kept, "samples": done}, x0


def _seed(name: str):
    return io.Int.Input(name, default=0, min=0, max=LARGEST_SEED, control_after_generate=True)


def _steps():
    return io.Int.Input("steps", default=20, min=1, max=10000)


def _cfg_input():
    return io.Float.Input("cfg", default=8.0, min=0.0, max=100.0, step=0.1, round=0.01)


def _denoise():
    return io.Float.Input("denoise", default=1.0, min=0.0, max=1.0, step=0.01)


def _scheduler():
    return io.Combo.Input("scheduler", options=list(SCHEDULES))


def _sampler():
    return io.Combo.Input("sampler_name", options=list(SAMPLERS))


def _conditions():
    return [io.Conditioning.Input("positive"), io.Conditioning.Input("negative")]


class KSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="KSampler",
            inputs=[
                io.Model.Input("model"),
                _seed("seed"),
                _steps(),
                _cfg_input(),
                _sampler(),
                _scheduler(),
                *_conditions(),
                io.Latent.Input("latent_image"),
                _denoise(),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, model, seed, steps, cfg, sampler_name, scheduler, positive, negative, latent_image, denoise=1.0):
        model = model.for_latent(fit_empty_latent(model, latent_image))
        sigmas = sigmas_for(model.sampling, scheduler, steps, sampler=sampler_name, denoise=denoise)
        guider = Guider(model, positive, negative, cfg)
        return io.NodeOutput(run_sampler(guider, latent_image, sampler_name, sigmas, seed=seed)[0])


class KSamplerAdvanced(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="KSamplerAdvanced",
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input("add_noise", options=["enable", "disable"]),
                _seed("noise_seed"),
                _steps(),
                _cfg_input(),
                _sampler(),
                _scheduler(),
                *_conditions(),
                io.Latent.Input("latent_image"),
                io.Int.Input("start_at_step", default=0, min=0, max=10000),
                io.Int.Input("end_at_step", default=10000, min=0, max=10000),
                io.Combo.Input("return_with_leftover_noise", options=["disable", "enable"]),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(
        cls,
        model,
        add_noise,
        noise_seed,
        steps,
        cfg,
        sampler_name,
        scheduler,
        positive,
        negative,
        latent_image,
        start_at_step,
        end_at_step,
        return_with_leftover_noise,
    ):
        model = model.for_latent(fit_empty_latent(model, latent_image))
        sigmas = sigmas_for(model.sampling, scheduler, steps, sampler=sampler_name)
        if end_at_step < len(sigmas) - 1:
            sigmas = sigmas[: end_at_step + 1].clone()
            if return_with_leftover_noise == "disable":
                sigmas[-1] = 0.0
        if start_at_step >= len(sigmas) - 1:
            sigmas = sigmas[:0]  # nothing is left to do
        guider = Guider(model, positive, negative, cfg)
        latent, _ = run_sampler(
            guider,
            latent_image,
            sampler_name,
            sigmas[start_at_step:],
            seed=noise_seed,
            add_noise=add_noise == "enable",
        )
        return io.NodeOutput(latent)


class KSamplerSelect(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="KSamplerSelect", inputs=[_sampler()], outputs=[io.Sampler.Output()])

    @classmethod
    def execute(cls, sampler_name):
        return io.NodeOutput(sampler_name)


class BasicScheduler(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="BasicScheduler",
            inputs=[io.Model.Input("model"), _scheduler(), _steps(), _denoise()],
            outputs=[io.Sigmas.Output()],
        )

    @classmethod
    def execute(cls, model, scheduler, steps, denoise):
        if denoise <= 0:
            return io.NodeOutput(torch.zeros(0))
        planned = int(steps / denoise) if denoise < 1 else steps
        return io.NodeOutput(SCHEDULES[scheduler](model.sampling, planned)[-(steps + 1) :])


class RandomNoise(io.ComfyNode):
    """NOISE is a seed here, or None for no noise."""

    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="RandomNoise", inputs=[_seed("noise_seed")], outputs=[io.Noise.Output()])

    @classmethod
    def execute(cls, noise_seed):
        return io.NodeOutput(noise_seed)


class DisableNoise(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="DisableNoise", inputs=[], outputs=[io.Noise.Output()])

    @classmethod
    def execute(cls):
        return io.NodeOutput(None)


class BasicGuider(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="BasicGuider",
            inputs=[io.Model.Input("model"), io.Conditioning.Input("conditioning")],
            outputs=[io.Guider.Output()],
        )

    @classmethod
    def execute(cls, model, conditioning):
        return io.NodeOutput(Guider(model, conditioning))


class CFGGuider(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="CFGGuider",
            inputs=[io.Model.Input("model"), *_conditions(), _cfg_input()],
            outputs=[io.Guider.Output()],
        )

    @classmethod
    def execute(cls, model, positive, negative, cfg):
        return io.NodeOutput(Guider(model, positive, negative, cfg))


class SamplerCustomAdvanced(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SamplerCustomAdvanced",
            inputs=[
                io.Noise.Input("noise"),
                io.Guider.Input("guider"),
                io.Sampler.Input("sampler"),
                io.Sigmas.Input("sigmas"),
                io.Latent.Input("latent_image"),
            ],
            outputs=[io.Latent.Output(display_name="output"), io.Latent.Output(display_name="denoised_output")],
        )

    @classmethod
    def execute(cls, noise, guider, sampler, sigmas, latent_image):
        latent, x0 = run_sampler(guider, latent_image, sampler, sigmas, seed=noise or 0, add_noise=noise is not None)
        return io.NodeOutput(latent, latent if x0 is None else {**latent, "samples": x0})


class ModelSamplingSD3(io.ComfyNode):
    shift, multiplier = 3.0, 1000.0

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id=cls.__name__,
            inputs=[
                io.Model.Input("model"),
                io.Float.Input("shift", default=cls.shift, min=0.0, max=100.0, step=0.01),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, shift):
        return io.NodeOutput(model.with_sampling(shift=shift, multiplier=cls.multiplier))


class ModelSamplingAuraFlow(ModelSamplingSD3):
    shift, multiplier = 1.73, 1.0


class ModelNoiseScale(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ModelNoiseScale",
            inputs=[
                io.Model.Input("model"),
                io.Float.Input("noise_scale", default=1.0, min=0.0, max=64.0, step=0.01),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, noise_scale):
        return io.NodeOutput(model.with_sampling(noise_scale=noise_scale))


NODES = [
    KSampler,
    KSamplerAdvanced,
    KSamplerSelect,
    BasicScheduler,
    RandomNoise,
    DisableNoise,
    BasicGuider,
    CFGGuider,
    SamplerCustomAdvanced,
    ModelSamplingSD3,
    ModelSamplingAuraFlow,
    ModelNoiseScale,
]
