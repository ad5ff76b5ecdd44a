"""The deep-compression autoencoder beside diffusers' AutoencoderDC 0.42.1."""

import json

import dit_checks
import pytest
import torch
from comfyui_files import publishers_dc_ae
from support import find_shared, golden_cases, rel_err

from nativedit.autoencoders import find_autoencoder, get_autoencoder
from nativedit.autoencoders.dc_ae import AutoencoderDC
from nativedit.autoencoders.dc_kinds import dc_config
from nativedit.latent_formats import get_latent_format
from nativedit.ldm.layers.operations import CastOps

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("single_thread")

TARGETS = golden_cases("autoencoder_dc", role="target")
INVARIANCE = golden_cases("autoencoder_dc", role="invariance")
SHUFFLE = next(golden for golden in TARGETS if golden.folder.name == "shuffle_kind")

# config.json of mit-han-lab/dc-ae-f32c32-sana-1.0-diffusers and -1.1-diffusers
BLOCKS = ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3
SANA = {
    "in_channels": 3,
    "latent_channels": 32,
    "attention_head_dim": 32,
    "encoder_block_types": BLOCKS,
    "decoder_block_types": BLOCKS,
    "encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
    "decoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
    "encoder_layers_per_block": [2, 2, 2, 3, 3, 3],
    "decoder_layers_per_block": [3, 3, 3, 3, 3, 3],
    "encoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
    "decoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
    "upsample_block_type": "interpolate",
    "downsample_block_type": "Conv",
    "decoder_norm_types": "rms_norm",
    "scaling_factor": 0.41407,
}
# Two levels down, small enough to run in tiles at once.
TINY = {
    "latent_channels": 8,
    "attention_head_dim": 8,
    "encoder_block_types": ["ResBlock", "ResBlock", "EfficientViTBlock"],
    "decoder_block_types": ["ResBlock", "ResBlock", "EfficientViTBlock"],
    "encoder_block_out_channels": [8, 16, 16],
    "decoder_block_out_channels": [8, 16, 16],
    "encoder_layers_per_block": [1, 1, 1],
    "decoder_layers_per_block": [1, 1, 1],
    "encoder_qkv_multiscales": [[], [], [5]],
    "decoder_qkv_multiscales": [[], [], [5]],
    "upsample_block_type": "interpolate",
    "downsample_block_type": "Conv",
}


def build(config, weights, dtype=torch.float32, operations=torch.nn):
    module = AutoencoderDC(**config, device="meta", dtype=dtype, operations=operations)
    state = {key: value.to(dtype) if value.is_floating_point() else value for key, value in weights.items()}
    module.load_state_dict(state, strict=True, assign=True)
    return module.requires_grad_(False).eval()


def pair(config, seed=0):
    """Ours and the reference with the same random weights."""
    torch.manual_seed(seed)
    reference = diffusers.AutoencoderDC(**config).eval().requires_grad_(False)
    dit_checks.randomise(reference)
    for name, buffer in reference.named_buffers():
        if buffer.is_floating_point():  # of batch norms: a mean and a variance that do something
            buffer.copy_(torch.rand_like(buffer) + (0.5 if name.endswith("running_var") else -0.5))
    return build(config, {key: value.clone() for key, value in reference.state_dict().items()}), reference


def shapes_of(module):
    return {key: tuple(value.shape) for key, value in module.state_dict().items()}


@pytest.mark.parametrize("golden", TARGETS + INVARIANCE, ids=str)
def test_both_ways_equal_the_recording_and_the_reference(golden):
    ours = build(golden.config, golden.weights)
    reference = diffusers.AutoencoderDC(**golden.config).eval().requires_grad_(False)
    reference.load_state_dict(golden.weights)
    limit = dit_checks.bound(golden.meta.get("float32_vs_float64_rel_err"))
    image, latent = golden.io["inputs.image"], golden.io["inputs.latent"]
    encoded, decoded = ours.encode(image), ours.decode(latent)
    assert rel_err(encoded, golden.io["output_encoded"]) <= limit
    assert rel_err(decoded, golden.io["output"]) <= limit
    assert rel_err(encoded, reference.encode(image).latent) <= limit
    assert rel_err(decoded, reference.decode(latent).sample) <= limit


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_stages_equal_the_recording(golden):
    module, captured = build(golden.config, golden.weights), {}
    names = {"enc_conv_in": "encoder.conv_in", "enc_conv_out": "encoder.conv_out"}
    names |= {"dec_conv_in": "decoder.conv_in", "dec_norm_out": "decoder.norm_out", "dec_conv_out": "decoder.conv_out"}
    for level in range(len(golden.config["encoder_block_out_channels"])):
        names |= {f"enc_down_{level}": f"encoder.down_blocks.{level}", f"dec_up_{level}": f"decoder.up_blocks.{level}"}
    for stage, name in names.items():
        module.get_submodule(name).register_forward_hook(
            lambda _module, _args, out, stage=stage: captured.__setitem__(stage, out)
        )
    module.encode(golden.io["inputs.image"])
    module.decode(golden.io["inputs.latent"])
    captured["dec_norm_out"] = captured["dec_norm_out"].movedim(1, -1)
    assert captured.keys() == golden.group("stages").keys()
    for stage, value in captured.items():
        assert rel_err(value, golden.io["stages." + stage]) <= dit_checks.STAGE, stage


@pytest.mark.parametrize("golden", INVARIANCE, ids=str)
def test_rows_of_a_batch_do_not_touch_each_other(golden):
    parent = next(case for case in TARGETS if case.folder.name == golden.meta["invariance"]["of"].split("/")[-1])
    module = build(parent.config, parent.weights)
    assert rel_err(module.decode(golden.io["inputs.latent"])[0], parent.io["output"][0]) <= 1e-5
    assert rel_err(module.encode(golden.io["inputs.image"])[0], parent.io["output_encoded"][0]) <= 1e-5


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_bfloat16_loses_no_more_than_the_references_twice(golden):
    decoded = build(golden.config, golden.weights, torch.bfloat16).decode(golden.io["inputs.latent"].bfloat16())
    assert decoded.dtype == torch.bfloat16
    assert rel_err(decoded, golden.io["output"]) <= 2 * golden.meta["bfloat16_vs_float32_rel_err"]


def test_weights_stored_in_bfloat16_compute_in_the_dtype_of_the_picture():
    golden = SHUFFLE
    stored = build(golden.config, golden.weights, torch.bfloat16, CastOps)
    widened = {key: value.bfloat16().float() for key, value in golden.weights.items()}
    decoded = stored.decode(golden.io["inputs.latent"])
    assert decoded.dtype == torch.float32
    assert rel_err(decoded, build(golden.config, widened).decode(golden.io["inputs.latent"])) <= 1e-6


CONFIGURATIONS = {
    "tiny": TINY,
    # of the other published models: a first level without blocks, shuffles, batch norm and relu in the decoder
    "first level only resamples": {
        **TINY,
        "encoder_layers_per_block": [0, 2, 1],
        "decoder_layers_per_block": [0, 1, 2],
        "upsample_block_type": "pixel_shuffle",
        "downsample_block_type": "pixel_unshuffle",
        "decoder_norm_types": ["batch_norm", "batch_norm", "rms_norm"],
        "decoder_act_fns": ["relu", "relu", "silu"],
    },
    "two filters, wider decoder, no outer shortcuts": {
        **TINY,
        "latent_channels": 6,
        "decoder_block_out_channels": [16, 32, 32],
        "decoder_qkv_multiscales": [[], [], [3, 5]],
        "encoder_out_shortcut": False,
        "decoder_in_shortcut": False,
        "decoder_conv_act_fn": "silu",
    },
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("size", [(8, 8), (40, 24)])
def test_random_configurations_equal_the_reference(name, size):
    """8 x 8 gives 2 x 2 latents, fewer pixels than channels per head: there the reference takes its other order of
    products."""
    ours, reference = pair(CONFIGURATIONS[name], seed=3)
    image = torch.randn(2, 3, *size)
    encoded = reference.encode(image).latent
    decoded = reference.decode(encoded).sample
    mine = ours.encode(image), ours.decode(encoded)
    reference.double()
    exact = reference.encode(image.double()).latent, reference.decode(encoded.double()).sample
    for value, expected, truth in zip(mine, (encoded, decoded), exact, strict=True):
        assert rel_err(value, expected) <= dit_checks.bound(rel_err(expected, truth))


@pytest.mark.parametrize("size", [(64, 64), (88, 56)])
def test_tiles_equal_the_references_tiles(size):
    ours, reference = pair(TINY)
    image = torch.randn(1, 3, *size)
    reference.enable_tiling(32, 32, 24, 24)
    encoded = reference.tiled_encode(image).latent
    assert rel_err(ours.tiled_encode(image, tile=32, overlap=0.25), encoded) <= 2e-6
    decoded = reference.tiled_decode(encoded).sample
    assert rel_err(ours.tiled_decode(encoded, tile=32, overlap=0.25), decoded) <= 2e-6


def test_one_tile_is_the_whole_picture():
    ours, _ = pair(TINY)
    image = torch.randn(1, 3, 32, 32)
    assert torch.equal(ours.tiled_encode(image, tile=64, overlap=0.0), ours.encode(image))
    latent = torch.randn(1, 8, 8, 8)
    assert torch.equal(ours.tiled_decode(latent, tile=64, overlap=0.0), ours.decode(latent))


def test_a_picture_that_is_no_whole_number_of_latent_pixels_is_refused():
    ours, _ = pair(TINY)
    for encode in (ours.encode, ours.tiled_encode):
        with pytest.raises(ValueError, match=r"30x32 pixels.*multiples of 4"):
            encode(torch.zeros(1, 3, 32, 30))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_block_out_channels": [8, 16]}, "3 levels down"),
        ({"encoder_block_types": "Transformer"}, "block type 'Transformer'"),
        ({"decoder_norm_types": "layer_norm"}, "norm 'layer_norm'"),
        ({"decoder_act_fns": "tanh"}, "activation 'tanh'"),
        ({"decoder_conv_act_fn": "tanh"}, "activation 'tanh'"),
    ],
)
def test_configuration_that_it_does_not_know_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        AutoencoderDC(**{**TINY, **change}, device="meta")


def test_sanas_layout_loads_strictly_and_its_config_is_read_from_shapes():
    with torch.device("meta"):
        state = diffusers.AutoencoderDC(**SANA).state_dict()
    assert len(state) == 375 and sum(value.numel() for value in state.values()) == 312_250_275
    ours = AutoencoderDC(**SANA, device="meta")
    ours.load_state_dict(state, strict=True, assign=True)
    match = find_autoencoder({"vae." + key: shape for key, shape in shapes_of(ours).items()})
    assert match.autoencoder.name == "dc_ae_f32c32" and match.prefix == "vae."
    assert match.config == {**SANA, "decoder_norm_types": ["rms_norm"] * 6}


@pytest.mark.parametrize("name", ["tiny", "two filters, wider decoder, no outer shortcuts"])
def test_any_config_that_shapes_can_tell_is_read_from_them(name):
    config = CONFIGURATIONS[name]
    read = dc_config(shapes_of(AutoencoderDC(**config, device="meta")))
    known = {key: config.get(key, read[key]) for key in read}
    assert read == {**known, "decoder_norm_types": ["rms_norm"] * 3}


def test_the_golden_of_the_shuffling_kind_is_read_from_its_shapes():
    read = dc_config({key: tuple(value.shape) for key, value in SHUFFLE.weights.items()})
    assert (read["upsample_block_type"], read["downsample_block_type"]) == ("pixel_shuffle", "pixel_unshuffle")
    assert read["encoder_qkv_multiscales"] == SHUFFLE.config["encoder_qkv_multiscales"]
    assert read["attention_head_dim"] == SHUFFLE.config["attention_head_dim"]


def test_the_kind_agrees_with_its_latent_format():
    kind = get_autoencoder("dc_ae_f32c32")
    latent = get_latent_format(kind.latent_format)
    assert (latent.channels, latent.compression) == (kind.latent_channels, kind.compression) == (32, 32)
    assert latent.scale == SANA["scaling_factor"] and latent.shift == 0.0


@pytest.mark.skipif(find_shared() is None, reason="needs ../shared")
def test_no_diffusion_model_is_taken_for_it(shared):
    for file in sorted((shared / "reference" / "layouts").glob("*.*.json")):
        shapes = {key: tuple(shape) for key, shape in json.loads(file.read_text())["keys"].items()}
        assert get_autoencoder("dc_ae_f32c32").match(shapes) is None, file.name


def test_compiles_into_one_graph():
    ours, _ = pair(TINY)
    latent = torch.randn(1, 8, 6, 5)
    torch._dynamo.reset()
    compiled = torch.compile(ours.decode, fullgraph=True, backend="aot_eager")
    assert rel_err(compiled(latent), ours.decode(latent)) <= 1e-5


def test_the_publishers_layout_is_ours_by_the_references_converter():
    from diffusers.loaders.single_file_utils import convert_autoencoder_dc_checkpoint_to_diffusers as convert

    config = {**SANA, **{f"{half}_block_out_channels": [32, 32, 32, 64, 64, 64] for half in ("encoder", "decoder")}}
    ours, _ = pair({key: value for key, value in config.items() if key != "scaling_factor"})
    state = {key: value.clone() for key, value in ours.state_dict().items()}
    stored = publishers_dc_ae(state)
    expected = convert(dict(stored))
    assert expected.keys() == state.keys() and not stored.keys() & state.keys()

    match = find_autoencoder({key: tuple(value.shape) for key, value in stored.items()})
    shapes = shapes_of(ours)
    placed = {}
    for key, value in stored.items():
        placed.update(match.place(key, value, shapes))

    assert (match.autoencoder.name, match.layout) == ("dc_ae_f32c32", "original")
    assert placed.keys() == state.keys()
    assert all(torch.equal(placed[key], state[key]) and torch.equal(expected[key], state[key]) for key in state)
