"""Codes from bits are torch's own codes: every bfloat16 number, and the float32 numbers at which rounding turns."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nativedit.quant.float8 import float8_codes

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
EVERY = torch.arange(65536).to(torch.int16).view(torch.bfloat16)
# A factor of a real file brings the largest weight to the largest code; the others round past it or stay far below.
PARTS = [1.0, 0.999, 1.003, 0.5, 2.0**-9]

pytestmark = pytest.mark.usefixtures("single_thread")


def plain(weight, factor, dtype):
    limit = torch.finfo(dtype).max
    return (weight * factor).clamp(-limit, limit).to(dtype).view(torch.uint8)


def codes(weight, factor, dtype):
    return float8_codes(weight, factor, weight.abs().amax(), dtype).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60, deadline=None)
@given(st.floats(-60, 40), st.sampled_from(PARTS))
def test_every_bfloat16_number_gets_torchs_code(dtype, exponent, part):
    peak = torch.tensor(2.0**exponent, dtype=torch.bfloat16)
    factor = (part / (peak / torch.finfo(dtype).max).float()).to(torch.bfloat16)
    weight = EVERY[EVERY.float().abs() <= peak.float()]
    assert torch.equal(codes(weight, factor, dtype), plain(weight, factor, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60, deadline=None)
@given(st.floats(-60, 40), st.sampled_from(PARTS))
def test_float32_numbers_around_every_turning_point_get_torchs_code(dtype, exponent, part):
    factor = torch.tensor(part * 2.0**exponent)
    numbers = torch.arange(256).to(torch.uint8).view(dtype).double()
    numbers = numbers[numbers.isfinite()].sort().values
    turning = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2)) / factor.double()
    bits = turning.float().view(torch.int32)
    weight = torch.stack([(bits + step).view(torch.float32) for step in range(-3, 4)]).nan_to_num(0, 0, 0)
    assert torch.equal(codes(weight, factor, dtype), plain(weight, factor, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 255, 256, 1000, 70_000])
def test_any_number_of_weights(dtype, stored, count):
    weight = torch.randn(count, generator=torch.Generator().manual_seed(count)).mul(0.02).to(stored)
    weight[::7], weight[::11] = 0.0, -0.0
    factor = (torch.finfo(dtype).max / weight.abs().amax().float().clamp(min=1e-3)).to(stored)
    assert torch.equal(codes(weight, factor, dtype), plain(weight, factor, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [0.0, 1e-30, 1.0, 1e30, 3e38, math.inf, math.nan])
@pytest.mark.parametrize("largest", [0.0, 1e-38, 1.0, 460.0, 470.0, 3e38, math.inf, math.nan])
def test_factors_and_weights_beyond_all_bounds(dtype, factor, largest):
    for stored in (torch.bfloat16, torch.float32):
        weight = (torch.linspace(-1, 1, 1001) * largest).to(stored)
        wanted = plain(weight, torch.tensor(factor, dtype=stored), dtype)
        assert torch.equal(codes(weight, torch.tensor(factor, dtype=stored), dtype), wanted)


def test_a_processor_that_flushes_subnormals_changes_nothing():
    factor = torch.tensor(448.0, dtype=torch.bfloat16)
    weight = EVERY[(EVERY.float().abs() <= 1) & (EVERY.float().abs() >= 1e-30)]
    wanted = plain(weight, factor, torch.float8_e4m3fn)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        assert torch.equal(codes(weight, factor, torch.float8_e4m3fn), wanted)
    finally:
        torch.set_flush_denormal(False)
