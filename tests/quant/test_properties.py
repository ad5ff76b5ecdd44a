"""Any weight: errors bounded by what each format promises. Any split: exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quant_goldens import same_bytes
from safetensors.torch import save_file

from nativedit.files import FileError, open_source
from nativedit.quant.errors import QuantError
from nativedit.quant.evidence import Evidence, Unsettled, settle
from nativedit.quant.formats import FORMATS, parse_recipe
from nativedit.quant.kitchen import quantize_matrix, tensor_scale
from nativedit.quant.layer import dequantize_tensors
from nativedit.quant.markers import parse_marker
from nativedit.quant.measure import sqnr
from nativedit.quant.reader import read_quantized
from nativedit.quant.surgery import QuantizedWeight, fuse, split

pytestmark = pytest.mark.usefixtures("single_thread")
bounded = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

# (recipe, multiple of K)
RECIPES = {
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "nvfp4": 1,
    "mxfp8": 1,
    "int8_tensorwise:scale=tensor": 1,
    "int8_tensorwise": 1,
    "int8_tensorwise:convrot=16": 16,
    "int8_tensorwise:convrot=64": 64,
    "convrot_w4a4:convrot=64": 64,
    "asym_w4a8_int8:convrot=16": 16,
}


@st.composite
def weights(draw, multiple: int) -> torch.Tensor:
    rows = draw(st.integers(1, 40))
    columns = multiple * draw(st.integers(1, 1 + 200 // multiple))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    scale = draw(st.sampled_from([1e-30, 1e-4, 0.02, 1.0, 1e4]))
    weight = torch.randn(rows, columns, generator=generator) * scale
    for _ in range(draw(st.integers(0, 2))):
        row, column = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
        kind = draw(st.sampled_from(["outlier", "zero row", "denormal", "zero"]))
        if kind == "outlier":
            weight[row, column] = scale * 1000
        elif kind == "zero row":
            weight[row] = 0
        elif kind == "denormal":
            weight[row] = 1e-40
        else:
            weight.zero_()
    return weight.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


def stored(weight: torch.Tensor, recipe) -> dict[str, torch.Tensor]:
    return quantize_matrix(weight, recipe, scale=tensor_scale(recipe, weight.abs().amax()))


def allowed(weight: torch.Tensor, recipe, tensors) -> torch.Tensor:
    """The largest error of each weight that the format's own arithmetic explains, before rounding in bf16."""
    magnitude = weight.float().abs()
    peak, rows = magnitude.amax(), magnitude.amax(1, keepdim=True)
    name = recipe.format
    if name == "float8_e4m3fn":
        return torch.maximum(magnitude * 2**-4, peak / 448 * 2**-9)
    if name == "float8_e5m2":
        return torch.maximum(magnitude * 2**-3, peak / 57344 * 2**-17)
    if name == "mxfp8":
        blocks = torch.nn.functional.pad(magnitude, (0, -weight.shape[1] % 32)).unflatten(1, (-1, 32)).amax(2)
        blocks = blocks.repeat_interleave(32, 1)[:, : weight.shape[1]]
        return torch.maximum(magnitude * 2**-4, blocks / 224 * 2**-9)
    if name == "nvfp4":
        blocks = torch.nn.functional.pad(magnitude, (0, -weight.shape[1] % 16)).unflatten(1, (-1, 16)).amax(2)
        blocks = blocks.repeat_interleave(16, 1)[:, : weight.shape[1]]
        # One step of the coarsest pair (4, 6) is a third of the block's range; e4m3 block scales are 1/16 off at most,
        # and below 2^-9 of the tensor's scale they vanish together with their block.
        return blocks * (1 / 6 + 1 / 16) + peak / 2688 * 6 * 2**-9
    if name == "int8_tensorwise" and not recipe.convrot_groupsize:
        return (rows if recipe.row_scales else peak) / 127 * 0.5
    # Rotated: an error of half a step in each of the group's codes, spread by an orthogonal matrix.
    group = recipe.convrot_groupsize
    rotated_peak = rows * group**0.5
    step = {"int8_tensorwise": 1 / 254, "convrot_w4a4": 1 / 14, "asym_w4a8_int8": 1 / 7}[name]
    return rotated_peak * step * group**0.5


@pytest.mark.parametrize("name", RECIPES)
@bounded
@given(data=st.data())
def test_errors_stay_within_the_formats_theory(name, data):
    weight = data.draw(weights(RECIPES[name]))
    recipe = parse_recipe(name)
    tensors = stored(weight, recipe)
    restored = dequantize_tensors(tensors, recipe, tuple(weight.shape), torch.float32)
    assert restored.shape == weight.shape and bool(torch.isfinite(restored).all())
    arithmetic = 2**-7 if weight.dtype == torch.bfloat16 else 2**-20
    tiny = 2**-120 if recipe.format != "asym_w4a8_int8" else 1e-8 * 127
    tiny = max(tiny, 1e-30) if recipe.format == "int8_tensorwise" else tiny
    tiny = 1e-10 * recipe.convrot_groupsize if recipe.format == "convrot_w4a4" else tiny
    slack = weight.float().abs().amax() * arithmetic + tiny
    error = (restored - weight.float()).abs()
    assert bool((error <= allowed(weight, recipe, tensors) * (1 + 2**-6) + slack).all()), float(error.max())


@pytest.mark.parametrize("name", RECIPES)
@bounded
@given(data=st.data())
def test_tensors_are_those_that_the_format_announces(name, data):
    weight = data.draw(weights(RECIPES[name]))
    recipe = parse_recipe(name)
    from nativedit.files.dtypes import name_of

    tensors = stored(weight, recipe)
    announced = FORMATS[recipe.format].entries(tuple(weight.shape), recipe)
    assert {suffix: (name_of(t.dtype), tuple(t.shape)) for suffix, t in tensors.items()} == announced


@pytest.mark.parametrize("name", RECIPES)
def test_gaussian_weights_keep_the_usual_signal_to_noise_ratio(name):
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    recipe = parse_recipe(name)
    restored = dequantize_tensors(stored(weight, recipe), recipe, (256, 256), torch.float32)
    # Relative errors measured on ComfyUI's own files: fp8 0.027 and 0.053, nvfp4 0.095, mxfp8 0.027, int8 per tensor
    # 0.04 and per row 0.008, w4a4 0.13, w4a8 0.073.
    floor = {"float8_e4m3fn": 31, "float8_e5m2": 25, "nvfp4": 20, "mxfp8": 31, "convrot_w4a4:convrot=64": 16}
    assert sqnr(weight, restored) > floor.get(name, 22 if name.startswith("asym") else 27 if "tensor" in name else 40)


def same_rows(value: torch.Tensor, expected: torch.Tensor, recipe) -> bool:
    """Equal bits; a rotation is undone by a product whose sums run in another order for another number of rows."""
    if not recipe.convrot_groupsize:
        return torch.equal(value, expected)
    rows = expected.float().abs().amax(1, keepdim=True)
    limit = expected.float().abs() * 2**-7 + rows * (2**-7 if recipe.format.startswith("asym") else 2**-18)
    return bool(((value.float() - expected.float()).abs() <= limit).all())


def pieces_of(draw, total: int) -> list[int]:
    sizes = []
    while total:
        sizes.append(draw(st.integers(1, total)))
        total -= sizes[-1]
    return sizes


@pytest.mark.parametrize("name", RECIPES)
@bounded
@given(data=st.data())
def test_splitting_is_exact_and_fusing_undoes_it(name, data):
    weight = data.draw(weights(RECIPES[name]))
    recipe = parse_recipe(name)
    whole = QuantizedWeight(stored(weight, recipe), recipe, tuple(weight.shape))
    expected = dequantize_tensors(whole.tensors, recipe, whole.shape, torch.bfloat16)
    sizes = pieces_of(data.draw, weight.shape[0])
    pieces = split(whole, sizes)
    start = 0
    for piece, size in zip(pieces, sizes, strict=True):
        announced = FORMATS[recipe.format].entries(piece.shape, piece.recipe)
        assert {suffix: tuple(tensor.shape) for suffix, tensor in piece.tensors.items()} == {
            suffix: shape for suffix, (_, shape) in announced.items()
        }
        rows = dequantize_tensors(piece.tensors, piece.recipe, piece.shape, torch.bfloat16)
        assert same_rows(rows, expected[start : start + size], recipe)
        start += size
    joined = fuse(pieces)
    assert joined.shape == whole.shape
    assert all(same_bytes(joined.tensors[suffix], whole.tensors[suffix]) for suffix in whole.tensors)


@pytest.mark.parametrize("name", RECIPES)
@bounded
@given(data=st.data())
def test_fusing_weights_that_were_quantized_apart_is_exact_or_refused(name, data):
    multiple = RECIPES[name]
    first = data.draw(weights(multiple))
    second = torch.randn(data.draw(st.integers(1, 20)), first.shape[1]).to(first.dtype)
    recipe = parse_recipe(name)
    pieces = [QuantizedWeight(stored(weight, recipe), recipe, tuple(weight.shape)) for weight in (first, second)]
    try:
        joined = fuse(pieces)
    except ValueError as error:
        assert "different weight_scale_2" in str(error) or "different weight_codebook" in str(error)
        return
    expected = torch.cat([dequantize_tensors(p.tensors, p.recipe, p.shape, torch.bfloat16) for p in pieces])
    assert same_rows(dequantize_tensors(joined.tensors, joined.recipe, joined.shape, torch.bfloat16), expected, recipe)
    for suffix in ("weight", "weight_s_rel", "weight_s_channel"):
        if suffix in joined.tensors and FORMATS[recipe.format].padding == 1:
            parts = [piece.tensors[suffix].view(torch.uint8) for piece in pieces]
            assert torch.equal(joined.tensors[suffix].view(torch.uint8), torch.cat(parts))


def test_what_can_not_be_joined_or_cut_says_why():
    weight = torch.randn(8, 64)
    int8, fp8 = (
        QuantizedWeight(stored(weight, r), r, (8, 64)) for r in map(parse_recipe, ["int8_tensorwise", "mxfp8"])
    )
    with pytest.raises(ValueError, match="one format and width"):
        fuse([int8, fp8])
    for sizes in ([4], [4, 5], [8, 0], []):
        with pytest.raises(ValueError, match="can't cut"):
            split(int8, sizes)


_dtypes = st.sampled_from(["U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F32", "BF16", "I64"])
_shapes = st.lists(st.sampled_from([0, 1, 2, 4, 16, 32, 64, 128, 256]), max_size=3).map(tuple)
_values = st.one_of(
    st.none(), st.booleans(), st.integers(-4, 300), st.sampled_from([*FORMATS, "x"]), st.lists(st.none())
)
_markers = st.one_of(
    st.none(),
    st.dictionaries(
        st.sampled_from(
            ["format", "convrot", "convrot_groupsize", "group_size", "linear_dtype", "params", "num_experts"]
        ),
        _values,
    ),
)


@settings(max_examples=400, deadline=None)
@given(
    infos=st.dictionaries(
        st.sampled_from(
            ["weight", "weight_scale", "weight_scale_2", "weight_s_rel", "weight_s_channel", "input_scale"]
        ),
        st.tuples(_dtypes, _shapes),
    ),
    marker=_markers,
    header=_markers,
    bias=st.one_of(st.none(), _shapes),
)
def test_any_evidence_is_settled_or_refused_with_a_kind_never_a_crash(infos, marker, header, bias):
    from nativedit.files import TensorInfo

    def info(name, dtype, shape):
        return TensorInfo(name, dtype, shape, 0, 0)

    evidence = Evidence(
        "layer",
        {role: info(role, *value) for role, value in infos.items()},
        bias=None if bias is None else info("bias", "F32", bias),
        has_marker=marker is not None,
        marker=marker,
        header=header,
    )
    try:
        layer = settle(evidence)
    except Unsettled as error:
        assert error.kind in ("undecidable", "damaged", "unsupported") and str(error)
        return
    if layer is not None and layer.dialect != "cast":
        assert layer.storage_shape() == infos["weight"][1]
        assert FORMATS[layer.recipe.format].constraint(layer.shape[-2:], layer.recipe) is None


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=60))
def test_any_marker_bytes_are_an_object_nothing_or_an_error(raw):
    try:
        assert parse_marker(raw) is None or isinstance(parse_marker(raw), dict)
    except ValueError as error:
        assert "marker" in str(error)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.text(max_size=40), st.sampled_from(["{}", "null", '{"layers": {}}', '{"layers": {"b": {}}}'])))
def test_any_header_entry_is_read_or_refused(tmp_path, text):
    path = tmp_path / "m.safetensors"
    save_file({"b.weight": torch.zeros(2, 2)}, path, {"_quantization_metadata": text, "nativedit.quantization": text})
    try:
        with open_source(path) as source:
            read_quantized(source)
    except (QuantError, FileError) as error:
        assert str(path) in str(error)
