"""Sigmas and latents of the engine beside ComfyUI's, recorded by record_sampling.py on an analytic model."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from comfyui_server import at_least
from safetensors.torch import load_file
from support import DATA, rel_err

sys.path.insert(0, str(Path(__file__).parent))
import sampling_cases as toy

RECORDED = DATA / "recorded" / "sampling_comfyui_0.33.0.safetensors"


@cache
def recorded() -> dict[str, torch.Tensor]:
    return load_file(RECORDED)


def flow_of(name: str):
    from nativedit.engine.flow import FlowSampling

    shift, multiplier, noise_scale = toy.FLOWS[name]
    return FlowSampling("velocity", shift, multiplier, noise_scale)


class ToyModel:
    """The part of a MODEL that ``sample`` asks for; its denoiser is the analytic one."""

    def __init__(self, flow: str):
        from nativedit.latent_formats import get_latent_format

        self.sampling = flow_of(flow)
        self.latent = get_latent_format("rgb")
        self.device = torch.device("cpu")
        self.file, self.module = "toy.safetensors", torch.nn.Identity()

    def denoised(self, x, sigma, condition):
        return toy.toy_x0(x, sigma)


def engine_latent(case: toy.Case) -> torch.Tensor:
    from nativedit.engine.sampling import Guider, noise_for, sample
    from nativedit.engine.schedules import sigmas_for

    model = ToyModel(case.flow)
    latent, mask = toy.start()
    if not case.masked:
        latent, mask = torch.zeros(toy.SHAPE), None
    sigmas = sigmas_for(model.sampling, case.scheduler, case.steps, sampler=case.sampler, denoise=case.denoise)
    guider = Guider(model, [(torch.zeros(1, 1, 1), {})])
    noise = noise_for(latent, toy.SEED)
    return sample(guider, noise, latent, case.sampler, sigmas, seed=toy.SEED, mask=mask)


@pytest.mark.parametrize("flow", toy.FLOWS)
def test_the_sigma_table_is_comfyuis(flow: str):
    assert torch.equal(flow_of(flow).sigmas, recorded()[f"table/{flow}"])


@pytest.mark.parametrize("steps", toy.STEPS)
@pytest.mark.parametrize("scheduler", toy.SCHEDULES)
@pytest.mark.parametrize("flow", toy.FLOWS)
def test_a_schedule_gives_comfyuis_sigmas(flow: str, scheduler: str, steps: int):
    from nativedit.engine.schedules import SCHEDULES

    sigmas = SCHEDULES[scheduler](flow_of(flow), steps)

    torch.testing.assert_close(sigmas, recorded()[f"sigmas/{flow}/{scheduler}/{steps}"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("steps", toy.STEPS)
@pytest.mark.parametrize("scheduler", toy.SCHEDULES)
@pytest.mark.parametrize("flow", toy.FLOWS)
def test_no_model_is_asked_at_sigma_zero(flow: str, scheduler: str, steps: int):
    from nativedit.engine.schedules import SCHEDULES

    sigmas = SCHEDULES[scheduler](flow_of(flow), steps)

    assert sigmas.isfinite().all()
    assert (sigmas[:-1] > 0).all() and sigmas[-1] == 0
    assert (sigmas.diff() < 0).all()


@pytest.mark.parametrize("case", toy.cases(), ids=lambda case: case.name)
def test_a_sampler_lands_where_comfyuis_does(case: toy.Case):
    if case.sampler == "dpmpp_sde":
        pytest.importorskip("torchsde", reason="dpmpp_sde draws its noise with torchsde")
    latent = engine_latent(case)

    assert latent.isfinite().all()
    assert rel_err(latent, recorded()["latent/" + case.name]) <= 1e-5


def test_every_offered_sampler_and_schedule_was_recorded():
    from nativedit.engine.samplers import SAMPLERS
    from nativedit.engine.schedules import SCHEDULES

    assert set(SAMPLERS) == set(toy.SAMPLERS)
    assert set(SCHEDULES) == {*toy.SCHEDULES, "published"}  # the last is ours: the card's own schedule


@pytest.mark.comfyui
def test_the_recording_is_what_comfyui_gives_today(comfyui_path: Path, comfyui_interpreter: Path, tmp_path: Path):
    """Fails when ComfyUI changed: record again with record_sampling.py, under the new version's name."""
    if not at_least(comfyui_path, "0.29"):
        pytest.skip("the engine samples as ComfyUI does since 0.29; this one adds noise of another scale")
    out = tmp_path / "now.safetensors"
    script = Path(__file__).with_name("record_sampling.py")
    command = [comfyui_interpreter, script, comfyui_path, out]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    now, before = load_file(out), recorded()

    assert now.keys() == before.keys()
    assert [key for key in now if now[key].shape != before[key].shape or rel_err(now[key], before[key]) > 1e-5] == []
