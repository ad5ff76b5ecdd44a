"""The KL autoencoder beside diffusers' AutoencoderKL 0.42.1, in the layouts its files come in."""

import pytest
import torch
from dit_checks import bound
from support import rel_err

from nativedit.autoencoders import autoencoders, find_autoencoder, fit_shape, get_autoencoder
from nativedit.autoencoders.kl import AutoencoderKL
from nativedit.ldm.layers.operations import CastOps

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("single_thread")

FLUX = {
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
COGVIEW4 = {
    "block_out_channels": [128, 512, 1024, 1024],
    "layers_per_block": 3,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "mid_block_add_attention": False,
}
# (published configuration, keys, parameters); parameters as the sheets count them.
PUBLISHED = {"kl_flux": (FLUX, 244, 83_819_683), "kl_cogview4": (COGVIEW4, 288, 406_100_643)}

RANDOM = (
    {"block_out_channels": [8, 16], "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 4},
    {
        "block_out_channels": [8, 16, 16],
        "layers_per_block": 2,
        "latent_channels": 16,
        "norm_num_groups": 8,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    },
    {
        "block_out_channels": [4, 12, 8, 8],
        "layers_per_block": 3,
        "latent_channels": 16,
        "norm_num_groups": 4,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "mid_block_add_attention": False,
    },
    {"block_out_channels": [32], "layers_per_block": 1, "latent_channels": 2, "in_channels": 1, "out_channels": 1},
)


def reference_class(config, **more):
    """In diffusers the kinds of the blocks are written out, one per level."""
    levels = len(config["block_out_channels"])
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * levels, "up_block_types": ("UpDecoderBlock2D",) * levels}
    return diffusers.AutoencoderKL(**{**config, **blocks, **more})


def pair(config, **more):
    """The reference with random weights that let every part act, and ours with the same."""
    torch.manual_seed(0)
    reference = reference_class(config, **more).eval().requires_grad_(False)
    for parameter in reference.parameters():
        fan_in = parameter[0].numel()
        parameter.normal_(0.0, fan_in**-0.5) if parameter.ndim > 1 else parameter.normal_(0.5, 0.5)
    ours = AutoencoderKL(
        **{"use_quant_conv": True, "use_post_quant_conv": True, **config, **more}, device="meta", dtype=torch.float32
    )
    ours.load_state_dict(reference.state_dict(), strict=True, assign=True)
    return reference, ours.eval().requires_grad_(False)


def picture(config, height=32, width=48, batch=2):
    return torch.rand(batch, config.get("in_channels", 3), height, width) * 2 - 1


@pytest.mark.parametrize("config", RANDOM, ids=str)
def test_encode_equals_the_references_mean(config):
    reference, ours = pair(config)
    x = picture(config)
    expected = reference.encode(x).latent_dist.mean
    noise = rel_err(expected, reference.double().encode(x.double()).latent_dist.mean)
    assert rel_err(ours.encode(x), expected) <= bound(noise), noise


@pytest.mark.parametrize("config", RANDOM, ids=str)
def test_decode_equals_the_reference(config):
    reference, ours = pair(config)
    z = torch.randn(2, config["latent_channels"], 6, 10)
    expected = reference.decode(z).sample
    noise = rel_err(expected, reference.double().decode(z.double()).sample)
    assert rel_err(ours.decode(z), expected) <= bound(noise), noise


@pytest.mark.parametrize("config", RANDOM[:3], ids=str)
@pytest.mark.parametrize("size", [(32, 32), (96, 64), (72, 40)])
def test_tiles_equal_the_references_tiles(config, size):
    reference, ours = pair(config, sample_size=32)
    reference.enable_tiling()
    x = picture(config, *size, batch=1)
    z = torch.randn(1, config["latent_channels"], size[0] // ours.compression, size[1] // ours.compression)
    assert rel_err(ours.tiled_encode(x), reference.encode(x).latent_dist.mean) <= 2e-6
    assert rel_err(ours.tiled_decode(z), reference.decode(z).sample) <= 2e-6


def test_one_tile_is_the_whole_picture():
    _, ours = pair(RANDOM[1])
    x, z = picture(RANDOM[1]), torch.randn(1, 16, 8, 8)
    assert rel_err(ours.tiled_encode(x, tile=256), ours.encode(x)) <= 1e-6
    assert rel_err(ours.tiled_decode(z, tile=256, overlap=0.5), ours.decode(z)) <= 1e-6


@pytest.mark.parametrize(("tile", "overlap", "what"), [(2, 0.25, "tile of 2 pixels"), (64, 0.75, "0.75")])
def test_tiles_that_can_not_work_are_refused(tile, overlap, what):
    _, ours = pair(RANDOM[1])
    with pytest.raises(ValueError, match=what):
        ours.tiled_decode(torch.zeros(1, 16, 8, 8), tile=tile, overlap=overlap)


def test_bfloat16_loses_no_more_than_the_references_twice():
    config = RANDOM[2]
    reference, ours = pair(config)
    x, z = picture(config), torch.randn(2, 16, 4, 6)
    exact = (reference.encode(x).latent_dist.mean, reference.decode(z).sample)
    half = reference.to(torch.bfloat16)
    x, z = x.bfloat16(), z.bfloat16()
    allowed = (half.encode(x).latent_dist.mean, half.decode(z).sample)
    ours = ours.to(torch.bfloat16)
    for mine, theirs, right in zip((ours.encode(x), ours.decode(z)), allowed, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert rel_err(mine, right) <= 2 * rel_err(theirs, right)


def test_a_half_precision_file_computes_in_the_inputs_precision():
    """Layers that cast on use (an engine's, ComfyUI's) take the place of torch's."""
    config = {**RANDOM[1]}
    reference, _ = pair(config)
    weights = {key: value.bfloat16() for key, value in reference.state_dict().items()}
    ours = AutoencoderKL(**config, device="meta", operations=CastOps)
    ours.load_state_dict(weights, strict=True, assign=True)
    ours.requires_grad_(False)
    reference.load_state_dict({key: value.float() for key, value in weights.items()})
    x, z = picture(config), torch.randn(1, 16, 4, 4)
    assert rel_err(ours.encode(x), reference.encode(x).latent_dist.mean) <= 2e-6
    assert rel_err(ours.decode(z), reference.decode(z).sample) <= 2e-6


def original(key, levels):
    """A published (diffusers) key as CompVis and FLUX's ae.safetensors name it."""
    parts = key.split(".")
    parts = ["norm_out" if part == "conv_norm_out" else part for part in parts]
    parts = ["nin_shortcut" if part == "conv_shortcut" else part for part in parts]
    key = ".".join(parts)
    for level in range(levels):
        for ours, theirs, number in (("down_blocks", "down", level), ("up_blocks", "up", levels - 1 - level)):
            key = key.replace(f"coder.{ours}.{level}.resnets.", f"coder.{theirs}.{number}.block.")
            key = key.replace(
                f"coder.{ours}.{level}.{ours[:-7]}samplers.0.", f"coder.{theirs}.{number}.{theirs}sample."
            )
    for ours, theirs in (
        ("mid_block.resnets.0", "mid.block_1"),
        ("mid_block.resnets.1", "mid.block_2"),
        ("mid_block.attentions.0.group_norm", "mid.attn_1.norm"),
        ("mid_block.attentions.0.to_out.0", "mid.attn_1.proj_out"),
        ("mid_block.attentions.0.to_", "mid.attn_1."),
    ):
        key = key.replace(ours, theirs)
    return key


def as_original(state, levels):
    """The whole file: the attention's projections are 1x1 convolutions there."""
    return {
        original(key, levels): value[..., None, None] if ".attentions.0.to_" in key and value.ndim == 2 else value
        for key, value in state.items()
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layout_loads_strictly_at_full_size(name):
    config, keys, parameters = PUBLISHED[name]
    with torch.device("meta"):
        state = reference_class(config).state_dict()
    assert len(state) == keys and sum(value.numel() for value in state.values()) == parameters
    match = find_autoencoder({key: tuple(value.shape) for key, value in state.items()})
    assert match.autoencoder.name == name
    assert {key: match.config.get(key) for key in config} == config
    ours = AutoencoderKL(**match.config, device="meta")
    result = ours.load_state_dict(state, strict=True, assign=True)
    assert not result.missing_keys and not result.unexpected_keys
    assert (ours.compression, ours.latent_channels) == (8, 16)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("prefix", ["", "vae.", "first_stage_model."])
def test_original_layout_is_recognised_at_full_size(name, prefix):
    config, keys, _ = PUBLISHED[name]
    state = AutoencoderKL(**config, device="meta").state_dict()
    theirs = {prefix + key: value for key, value in as_original(state, 4).items()}
    match = find_autoencoder({key: tuple(value.shape) for key, value in theirs.items()})
    assert (match.autoencoder.name, match.layout, len(theirs)) == (name, "original", keys)
    assert {key: match.config.get(key) for key in config} == config
    renamed = {name: value for key, value in theirs.items() for name in match.names(key)}
    assert renamed.keys() == state.keys()
    for key, value in state.items():
        assert fit_shape(renamed[key], tuple(value.shape)).shape == value.shape, key


@pytest.mark.parametrize("config", RANDOM[1:2], ids=str)
def test_original_layout_is_renamed_as_diffusers_converter_does(config):
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    reference, ours = pair(config)
    levels = len(config["block_out_channels"])
    theirs = as_original(reference.state_dict(), levels)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * levels, "up_block_types": ["UpDecoderBlock2D"] * levels}
    expected = convert_ldm_vae_checkpoint(dict(theirs), {**config, **blocks})
    match = find_autoencoder({key: tuple(value.shape) for key, value in theirs.items()})
    shapes = {key: tuple(value.shape) for key, value in ours.state_dict().items()}
    renamed = {name: value for key, value in theirs.items() for name in match.names(key)}
    assert renamed.keys() == expected.keys() == shapes.keys()
    for key, value in expected.items():
        assert torch.equal(fit_shape(renamed[key], shapes[key]), value.reshape(shapes[key])), key


def test_the_wrong_shape_is_not_made_to_fit():
    assert fit_shape(torch.zeros(4, 4, 3, 3), (4, 36)).shape == (4, 4, 3, 3)
    assert fit_shape(torch.zeros(4, 4), (4, 4, 1, 1)).shape == (4, 4, 1, 1)
    assert fit_shape(torch.zeros(4, 2), (2, 4, 1, 1)).shape == (4, 2)


@pytest.mark.parametrize(
    "config",
    [
        {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 4},
        {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 32},
    ],
    ids=["SD, SDXL", "32 channels"],
)
def test_relatives_that_are_not_ours_are_not_claimed(config):
    with torch.device("meta"):
        state = reference_class(config).state_dict()
    assert find_autoencoder({key: tuple(value.shape) for key, value in state.items()}) is None
    assert find_autoencoder({key: tuple(v.shape) for key, v in as_original(state, 4).items()}) is None


def test_a_strange_file_is_not_claimed_and_raises_nothing():
    keys = [key for key in AutoencoderKL(**FLUX, device="meta").state_dict()]
    assert find_autoencoder({}) is None
    assert find_autoencoder({key: () for key in keys}) is None
    assert find_autoencoder({key: (3,) for key in keys}) is None


def test_groups_that_do_not_divide_the_channels_are_refused():
    with pytest.raises(ValueError, match="norm_num_groups"):
        AutoencoderKL(block_out_channels=[8, 16], device="meta")


def test_kinds_know_their_latents():
    from nativedit.latent_formats import get_latent_format

    for kind in autoencoders():
        latent = get_latent_format(kind.latent_format)
        assert (latent.channels, latent.compression) == (kind.latent_channels, kind.compression), kind.name
    # force_upcast in the published configuration
    assert get_autoencoder("kl_cogview4").dtypes[0] == "float32"
    with pytest.raises(ValueError, match="kl_flux"):
        get_autoencoder("nothing")


def test_compiles_into_one_graph():
    _, ours = pair(RANDOM[1])
    z = torch.randn(1, 16, 4, 4)
    torch._dynamo.reset()
    compiled = torch.compile(ours.decode, fullgraph=True, backend="aot_eager")
    assert rel_err(compiled(z), ours.decode(z)) <= 1e-5
