"""What auto means in a sampler: the card's settings, variants by the file's name, and the publisher's schedule."""

from __future__ import annotations

from itertools import pairwise

import pytest

from nativedit.supported_models import PUBLISHED, architectures, decide, get_architecture

OPEN = {"steps": 0, "cfg": -1.0, "sampler": "auto", "scheduler": "auto"}


def test_what_is_left_open_is_the_cards():
    card = get_architecture("prx")

    settings = decide(card, **OPEN, shift=3.0)

    own = card.defaults
    assert (settings.steps, settings.cfg, settings.sampler) == (own.steps, own.cfg, own.sampler)
    assert settings.scheduler == own.scheduler
    assert settings.text == f"{own.steps} steps, cfg {own.cfg:g}, {own.sampler}, {own.scheduler}, shift 3"


def test_what_is_set_stays():
    settings = decide(
        get_architecture("prx"), steps=3, cfg=0.0, sampler="heun", scheduler="karras", shift=2.0, denoise=0.5
    )

    assert settings.text == "3 steps, cfg 0, heun, karras, shift 2, denoise 0.5"


def test_a_distilled_file_has_its_own_settings():
    card = get_architecture("prx")

    settings = decide(card, **OPEN, file="/models/prx_512_distilled.safetensors")

    assert (settings.steps, settings.cfg) == (card.variants["distilled"].steps, card.variants["distilled"].cfg)


@pytest.mark.parametrize("name", ["cogview4", "f_lite", "sana_sprint"])
def test_a_model_with_its_own_schedule_takes_that(name: str):
    assert decide(get_architecture(name), **OPEN).scheduler == PUBLISHED
    assert decide(get_architecture(name), **{**OPEN, "scheduler": "simple"}).scheduler == "simple"


def test_a_model_that_no_card_knows_says_what_to_set():
    with pytest.raises(ValueError, match="no settings of this model; choose steps, sampler_name yourself"):
        decide(None, **{**OPEN, "cfg": 4.0, "scheduler": "simple"})

    assert decide(None, steps=2, cfg=1.0, sampler="euler", scheduler="simple").steps == 2


def test_f_lites_published_sigmas():
    """The numbers of the published pipeline at 1024 x 1024: alpha 4, evenly spaced before the shift."""
    sampling = get_architecture("f_lite").sampling

    assert sampling.shift_for(128, 128) == 4.0
    assert sampling.published_schedule(4, 4.0) == pytest.approx([1.0, 12 / 13, 0.8, 4 / 7, 0.0])


def test_cogview4s_published_sigmas():
    """50 steps at 1024 x 1024 as the published scheduler has them."""
    sigmas = get_architecture("cogview4").sampling.published_schedule(50, 3.25)

    assert len(sigmas) == 51
    assert sigmas[:4] == pytest.approx([1, 0.99344, 0.98702, 0.98007], abs=1e-5)
    assert sigmas[-4:] == pytest.approx([0.122, 0.06517, 0.00324, 0], abs=5e-4)


def test_every_published_schedule_falls_from_one_to_zero():
    for card in architectures():
        if card.module is None or card.sampling is None:
            continue
        for steps in (1, 2, 4, 20):
            sigmas = card.sampling.published_schedule(steps, card.sampling.shift)
            if sigmas is not None:
                assert len(sigmas) == steps + 1, card.name
                assert sigmas[0] == pytest.approx(1.0, abs=1e-5) and sigmas[-1] == 0, card.name
                assert all(a > b for a, b in pairwise(sigmas)), card.name
