"""Sampling, as ComfyUI's nodes of the same names."""

from __future__ import annotations

from typing import Any

import torch

from .declare import engine_host, io
from .host import check_size
from .samplers import SAMPLERS
from .sampling import Guider, fit_empty_latent, noise_for, sample
from .schedules import SCHEDULES, sigmas_for

LARGEST_SEED = 0xFFFFFFFFFFFFFFFF


def run_sampler(guider: Guider, latent: dict[str, Any], sampler: str, sigmas: torch.Tensor, *, seed: int, noise=None):
    """(latent dict with the samples, x0 of the last step or None). noise: a function of the samples, None = by seed."""
    samples = fit_empty_latent(guider.model, latent)
    compression = guider.model.latent.compression
    check_size(guider.model, samples.shape[-1] * compression, samples.shape[-2] * compression)
    drawn = noise_for(samples, seed, latent.get("batch_index")) if noise is None else noise(samples)
    last: list[torch.Tensor] = []
    with engine_host().progress.bar(len(sigmas) - 1, sampler) as bar:

        def on_step(step: int, denoised: torch.Tensor) -> None:
            last[:] = [denoised]
            bar.to(step + 1)

        done = sample(
            guider, drawn, samples, sampler, sigmas, seed=seed, mask=latent.get("noise_mask"), on_step=on_step
        )
    kept = {key: value for key, value in latent.items() if not key.startswith("downscale_ratio_")}
    x0 = guider.model.latent.from_model(last[0].float()).cpu() if last else None
    return {**kept, "samples": done}, x0


def _sampler_inputs(seed: str):
    return [
        io.Int.Input(seed, default=0, min=0, max=LARGEST_SEED, control_after_generate=True),
        io.Int.Input("steps", default=20, min=1, max=10000),
        io.Float.Input("cfg", default=8.0, min=0.0, max=100.0, step=0.1, round=0.01),
        io.Combo.Input("sampler_name", options=list(SAMPLERS)),
        io.Combo.Input("scheduler", options=list(SCHEDULES)),
        io.Conditioning.Input("positive"),
        io.Conditioning.Input("negative"),
        io.Latent.Input("latent_image"),
    ]


class KSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="KSampler",
            inputs=[
                io.Model.Input("model"),
                *_sampler_inputs("seed"),
                io.Float.Input("denoise", default=1.0, min=0.0, max=1.0, step=0.01),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(
        cls, model, seed, steps, cfg, sampler_name, scheduler, positive, negative, latent_image, denoise=1.0
    ):
        sigmas = sigmas_for(model.sampling, scheduler, steps, sampler=sampler_name, denoise=denoise)
        guider = Guider(model, positive, negative, cfg)
        return io.NodeOutput(run_sampler(guider, latent_image, sampler_name, sigmas, seed=seed)[0])


NODES = [KSampler]
