"""SANA-Sprint's schedule and steps, written as a flow, beside diffusers' SCMScheduler and SanaSprintPipeline 0.42.1.

And which of the text encoder's outputs are used, beside SanaPipeline.
"""

import hashlib
import itertools
import math

import pytest
import torch
from support import golden_cases, rel_err

from nativedit.ldm.sana import sampling
from nativedit.ldm.sana.model import SanaTransformer2DModel
from nativedit.supported_models import get_architecture
from nativedit.supported_models._sana import INSTRUCTION
from nativedit.text_encoders.prompt import seen_positions

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("single_thread")

SPRINT = next(golden for golden in golden_cases("sana") if golden.folder.name == "sprint")


def scheduler(steps):
    reference = diffusers.SCMScheduler()
    reference.set_timesteps(steps, intermediate_timesteps=1.3 if steps == 2 else None)
    return reference


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_angles_are_the_schedulers(steps):
    ours = torch.tensor(sampling.sprint_angles(steps))
    torch.testing.assert_close(ours, scheduler(steps).timesteps, rtol=0, atol=2e-7)


def test_two_steps_are_the_published_flow_times():
    assert sampling.sprint_sigmas(2) == pytest.approx([1.0, 0.782708, 0.0], abs=1e-6)
    assert get_architecture("sana_sprint").sampling.sigmas_for(2) == sampling.sprint_sigmas(2)


def test_no_steps_are_refused():
    with pytest.raises(ValueError, match="0 steps"):
        sampling.sprint_sigmas(0)


@pytest.mark.parametrize("angle", [0.1, 0.9, 1.3, 1.55])
def test_flow_time_and_angle_are_inverse(angle):
    assert sampling.angle_of(sampling.flow_time(angle)) == pytest.approx(angle, abs=1e-12)


@pytest.mark.parametrize("angle", [0.3, 1.3, 1.5])
def test_a_clean_picture_from_the_velocity_is_the_trigflow_formulas(angle):
    """x0 = cos(t) x_t - sin(t) F, with F from the pipeline's conversion, equals x_s - s v."""
    x, velocity = torch.randn(2, 2, 4, 5, 5, dtype=torch.float64).unbind(0)
    time = sampling.flow_time(angle)
    output = sampling.trigflow_output(x, velocity, time)
    trigflow = math.cos(angle) * sampling.trigflow_sample(x, time) - math.sin(angle) * output
    assert rel_err(sampling.clean_from_velocity(x, velocity, time), trigflow) <= 1e-12


def test_a_step_equals_the_schedulers():
    reference = scheduler(2)
    x, velocity = torch.randn(2, 1, 4, 6, 6).unbind(0)
    times = [sampling.flow_time(angle) for angle in sampling.sprint_angles(2)]
    sigma_data = reference.config.sigma_data
    previous, clean = reference.step(
        sampling.trigflow_output(x, velocity, times[0]) * sigma_data,
        reference.timesteps[0],
        sampling.trigflow_sample(x, times[0]) * sigma_data,
        generator=torch.Generator().manual_seed(1),
        return_dict=False,
    )
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    ours = sampling.clean_from_velocity(x, velocity, times[0])
    assert rel_err(ours, clean / sigma_data) <= 2e-6
    after = sampling.noised(ours, noise, times[1])
    assert rel_err(sampling.trigflow_sample(after, times[1]), previous / sigma_data) <= 2e-6


def sprint_pipeline():
    transformer = diffusers.SanaTransformer2DModel(**SPRINT.config).eval()
    transformer.load_state_dict(SPRINT.weights)
    vae = diffusers.AutoencoderDC(
        latent_channels=32,
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), ()),
        decoder_qkv_multiscales=((), ()),
        encoder_out_shortcut=False,
        decoder_in_shortcut=False,
    )
    pipeline = diffusers.SanaSprintPipeline(None, None, vae, transformer, diffusers.SCMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_lcm_steps_on_the_flow_give_the_pipelines_latent(steps):
    inputs = SPRINT.group("inputs")
    start = torch.randn(2, 32, 32, 32, generator=torch.Generator().manual_seed(5))
    expected = (
        sprint_pipeline()(
            prompt=None,
            prompt_embeds=inputs["encoder_hidden_states"],
            prompt_attention_mask=inputs["encoder_attention_mask"],
            latents=start.clone(),
            height=64,
            width=64,
            num_inference_steps=steps,
            intermediate_timesteps=1.3 if steps == 2 else None,
            guidance_scale=4.5,
            generator=torch.Generator().manual_seed(6),
            use_resolution_binning=False,
            output_type="latent",
        )
    ).images

    model = SanaTransformer2DModel(**SPRINT.config)
    model.load_state_dict(SPRINT.weights)
    generator, x = torch.Generator().manual_seed(6), start
    sigmas = sampling.sprint_sigmas(steps)
    guidance = torch.full((2,), 4.5 * model.guidance_embeds_scale)
    with torch.inference_mode():
        for sigma, following in itertools.pairwise(sigmas):
            velocity = model(
                x,
                torch.full((2,), sigma),
                inputs["encoder_hidden_states"],
                inputs["encoder_attention_mask"],
                guidance=guidance,
            )
            clean = sampling.clean_from_velocity(x, velocity, sigma)
            x = sampling.noised(clean, torch.randn(x.shape, generator=generator), following)
    assert rel_err(clean, expected) <= 1e-4


def test_the_instruction_is_the_pipelines_word_for_word():
    """Hash of the default of SanaPipeline's ``complex_human_instruction``, its lines joined by newlines."""
    digest = "48290080bb4fd4a264bdc81d0647ac0221359a36506e2b3e954616d6cb48c3da"
    assert hashlib.sha256(INSTRUCTION.encode()).hexdigest() == digest


class Words:
    """A tokenizer of words, with a begin token, in the form the pipeline calls."""

    def encode(self, text):
        return [2] + [3 + len(word) for word in text.split()]

    def __call__(self, prompts, max_length, **_):
        ids = torch.zeros(len(prompts), max_length, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            tokens = self.encode(prompt)[:max_length]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        return type("Encoded", (), {"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize("words", [1, 5, 297, 298, 299, 400])
def test_positions_that_are_seen_are_the_pipelines(words):
    """The reference run with states that are their own positions; its padding is masked, ours is not there."""
    prompt = "a " * words
    tokenizer = Words()
    pipeline = diffusers.SanaPipeline(None, None, None, None, None)
    pipeline.tokenizer = tokenizer

    def text_encoder(ids, attention_mask):
        return (torch.arange(ids.shape[1]).float()[None, :, None].expand(ids.shape[0], -1, 1),)

    text_encoder.dtype = torch.float32
    pipeline.text_encoder = text_encoder
    states, mask, *_ = pipeline.encode_prompt(
        prompt, False, device=torch.device("cpu"), complex_human_instruction=INSTRUCTION.split("\n")
    )
    expected = states[0, :, 0][mask[0].bool()].long().tolist()
    instruction = tokenizer.encode(INSTRUCTION)
    ids = tokenizer.encode(INSTRUCTION + prompt)[: len(instruction) + 298]
    assert seen_positions(instruction, ids) == expected
