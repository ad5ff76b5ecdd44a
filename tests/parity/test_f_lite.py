"""F-Lite against recordings of its reference (fal-ai/f-lite at 85f0471), and beside a plain reading of its maths."""

import dit_checks
import plain_f_lite
import pytest
import torch
from dit_checks import Port, bound
from safetensors.torch import save_file
from support import golden_cases, rel_err
from torch.nn.attention import SDPBackend, sdpa_kernel

import nativedit
from nativedit.ldm.f_lite import sampling
from nativedit.ldm.f_lite.model import REGISTERS, ROPE_BUFFERS, FLiteTransformer
from nativedit.supported_models import find_architecture, get_architecture

pytestmark = pytest.mark.usefixtures("single_thread")

TARGETS = golden_cases("flite", role="target")
BY_NAME = {golden.folder.name: golden for golden in TARGETS}


def run_ours(module, inputs, **options):
    return module(inputs["x"], inputs["timesteps"], inputs["context"], **options)


PORT = Port(
    ours=FLiteTransformer,
    reference=None,
    run_ours=run_ours,
    run_reference=None,
    stages={
        "patch_embed": "patch_embed",
        "time_embed": "time_embed",
        "block_first_self_attn.0": "blocks.0.self_attn",
        "block_first_cross_attn.0": "blocks.0.cross_attn",
        "block_first_mlp": "blocks.0.mlp",
        "block_first.0": "blocks.0",
        "block_first.1": "blocks.0",
        "final_norm": "final_norm",
        "final_proj": "final_proj",
    },
    reshape={
        "block_first_self_attn.0": lambda out: out[0],
        "block_first.0": lambda out: out["img"],
        "block_first.1": lambda out: out["first_v"].transpose(1, 2),
    },
)

PUBLISHED = {
    "in_channels": 16,
    "patch_size": 2,
    "hidden_size": 3072,
    "num_heads": 12,
    "mlp_ratio": 4.0,
    "cross_attn_input_size": 4096,
    "residual_v": True,
    "train_bias_and_rms": False,
}
# depth -> keys in a published file, rotary tables included, and numbers in its weights
SIZES = {40: (493, 9_785_401_448), 28: (349, 6_878_232_668)}


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_output_equals_the_recording(golden):
    """Two numbers: from the start, where the sinusoid of 1000 t carries the last bit of the recording processor's exp()
    (one frequency of 24 differs), the fixtures' own 1e-5; from the recorded time embedding on, the strict bound."""
    module, inputs = PORT.build(golden.config, golden.weights), golden.group("inputs")
    assert rel_err(run_ours(module, inputs), golden.io["output"]) <= 1e-5
    module.time_embed.register_forward_hook(lambda *_: golden.io["stages.time_embed"])
    ours = run_ours(module, inputs)
    assert ours.shape == golden.io["output"].shape and ours.dtype == torch.float32
    assert rel_err(ours, golden.io["output"]) <= bound(golden.meta["float32_vs_float64_rel_err"])


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_stages_equal_the_recording(golden):
    dit_checks.check_stages(PORT, golden)


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_rotary_table_equals_the_recording_and_turns_backwards(golden):
    module = PORT.build(golden.config, golden.weights)
    height, width = golden.io["inputs.x"].shape[-2:]
    ours = module._rope(height // 2, width // 2, torch.device("cpu"))
    assert rel_err(ours[..., 0], golden.io["stages.rope.0"]) <= 1e-6
    assert rel_err(-ours[..., 1], golden.io["stages.rope.1"]) <= 1e-6


@pytest.mark.parametrize("golden", TARGETS, ids=str)
@pytest.mark.parametrize("row", [0, 1])
def test_a_sample_alone_equals_its_row_of_the_batch(golden, row):
    inputs = golden.group("inputs")
    alone = {key: value[row : row + 1] for key, value in inputs.items()}
    ours = run_ours(PORT.build(golden.config, golden.weights), alone)
    assert rel_err(ours[0], golden.io["output"][row]) <= 1e-5


@pytest.mark.parametrize("golden", golden_cases("flite", role="invariance"), ids=str)
def test_recorded_single_sample_equals_its_row_of_the_batch(golden):
    dit_checks.check_invariance(PORT, golden, BY_NAME[golden.meta["invariance"]["of"].split("/")[-1]])


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_bfloat16_loses_no_more_than_the_references_twice(golden):
    inputs = golden.group("inputs")
    inputs = {key: value if key == "timesteps" else value.bfloat16() for key, value in inputs.items()}
    ours = run_ours(PORT.build(golden.config, golden.weights, torch.bfloat16), inputs)
    assert ours.dtype == torch.bfloat16
    assert rel_err(ours, golden.io["output"]) <= 2 * golden.meta["bfloat16_vs_float32_rel_err"]


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_the_plain_reading_equals_the_recording(golden):
    out = plain_f_lite.forward(golden.weights, golden.config, **golden.group("inputs"))
    assert rel_err(out, golden.io["output"]) <= 1e-5


@pytest.mark.parametrize("seed", range(4))
def test_random_configurations_equal_the_plain_reading(seed):
    torch.manual_seed(seed)
    heads, head_dim = (2, 3, 1, 4)[seed], (16, 8, 64, 12)[seed]
    config = {
        "in_channels": (16, 4, 8, 3)[seed],
        "patch_size": (2, 1, 4, 2)[seed],
        "hidden_size": heads * head_dim,
        "depth": (3, 2, 1, 4)[seed],
        "num_heads": heads,
        "mlp_ratio": (4.0, 2.0, 3.0, 1.5)[seed],
        "cross_attn_input_size": 20 + seed,
        "residual_v": seed != 1,
        "train_bias_and_rms": seed % 2 == 1,
        "rope_base": (10000, 100, 500, 10000)[seed],
    }
    module = FLiteTransformer(**config).requires_grad_(False)
    dit_checks.randomise(module)
    weights = module.state_dict()
    inputs = {
        "x": torch.randn(2, config["in_channels"], 8, 20),
        "timesteps": torch.tensor([0.731, 0.02]),
        "context": torch.randn(2, 5, config["cross_attn_input_size"]),
    }
    expected = plain_f_lite.forward(weights, config, **inputs)
    exact = plain_f_lite.forward({key: value.double() for key, value in weights.items()}, config, **inputs)
    assert rel_err(run_ours(module, inputs), exact) <= bound(rel_err(expected, exact))


def published(depth, tables=True):
    """Keys and shapes of a published file."""
    state = FLiteTransformer(**PUBLISHED, depth=depth, device="meta").state_dict()
    if tables:
        state |= {name: torch.empty(512, 512, 128, device="meta") for name in ROPE_BUFFERS}
    return state


@pytest.mark.parametrize("depth", SIZES)
def test_published_layout_loads_strictly_at_full_size(depth):
    state, (keys, parameters) = published(depth), SIZES[depth]
    assert len(state) == keys
    assert sum(value.numel() for key, value in state.items() if key not in ROPE_BUFFERS) == parameters
    module = FLiteTransformer(**PUBLISHED, depth=depth, device="meta")
    result = module.load_state_dict(state, strict=True, assign=True)
    assert not result.missing_keys and not result.unexpected_keys
    assert not set(ROPE_BUFFERS) & module.state_dict().keys(), "the tables are not stored again"


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "module.", "_orig_mod."])
@pytest.mark.parametrize("depth", SIZES)
@pytest.mark.parametrize("tables", [True, False])
def test_published_configuration_is_read_from_shapes(depth, prefix, tables):
    state = {prefix + key: tuple(value.shape) for key, value in published(depth, tables).items()}
    match = find_architecture(state)
    assert (match.architecture.name, match.config) == ("f_lite", PUBLISHED | {"depth": depth})
    names = {part.name for key in state for part in match.parts(key)}
    assert names == published(depth, tables=False).keys()


@pytest.mark.parametrize("golden", TARGETS, ids=str)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_file_with_rotary_tables_loads_through_the_front_door(golden, prefix, tmp_path):
    """The tables tell the head size; what else shapes can't tell is given."""
    tables = {name: torch.zeros(1, 1, golden.meta["dropped_buffers"][name]["shape"][-1]) for name in ROPE_BUFFERS}
    file = tmp_path / "dit.safetensors"
    save_file({prefix + key: value for key, value in (golden.weights | tables).items()}, file)
    module = nativedit.load_diffusion_model(file, config={"rope_base": golden.config["rope_base"]})
    inputs = golden.group("inputs")
    with torch.no_grad():
        assert torch.equal(run_ours(module, inputs), run_ours(PORT.build(golden.config, golden.weights), inputs))


def test_no_known_layout_of_another_model_is_claimed(shared):
    import json

    card = get_architecture("f_lite")
    for path in sorted((shared / "reference" / "layouts").glob("*.json")):
        shapes = json.loads(path.read_text()).get("keys")
        if isinstance(shapes, dict):
            for prefix in ("", "model.diffusion_model."):
                assert card.match({prefix + key: tuple(shape) for key, shape in shapes.items()}, prefix) is None, path


def test_a_context_of_zeros_is_the_same_at_any_length():
    """What stands for no negative prompt: keys and values have no bias, so nothing comes from it."""
    golden = BY_NAME["residual_v"]
    module, inputs = PORT.build(golden.config, golden.weights), golden.group("inputs")
    one, many = (run_ours(module, inputs | {"context": torch.zeros(2, length, 40)}) for length in (1, 512))
    assert rel_err(one, many) <= 1e-6


def test_a_mask_hides_text():
    golden = BY_NAME["residual_v"]
    module, inputs = PORT.build(golden.config, golden.weights), golden.group("inputs")
    mask = (torch.arange(9) < 5).expand(2, 9)
    masked = run_ours(module, inputs, attention_mask=mask)
    assert rel_err(masked, run_ours(module, inputs | {"context": inputs["context"][:, :5]})) <= 1e-5
    assert rel_err(masked, run_ours(module, inputs)) > 1e-3


def test_the_temperature_is_undone_by_the_norm_of_the_keys():
    golden = BY_NAME["residual_v"]
    inputs = golden.group("inputs")
    plain = run_ours(PORT.build(golden.config, golden.weights), inputs)
    scaled = run_ours(PORT.build(golden.config | {"dynamic_softmax_temperature": True}, golden.weights), inputs)
    assert not torch.equal(scaled, plain) and rel_err(scaled, plain) <= 1e-5


@pytest.mark.parametrize("size", [(13, 21), (1, 1), (12, 7)])
def test_a_size_the_patches_do_not_divide_is_padded_and_cropped(size):
    golden = BY_NAME["residual_v"]
    module, inputs = PORT.build(golden.config, golden.weights), golden.group("inputs")
    x = torch.randn(2, 16, *size)
    padded = torch.nn.functional.pad(x, (0, size[1] % 2, 0, size[0] % 2), mode="replicate")
    out, whole = run_ours(module, inputs | {"x": x}), run_ours(module, inputs | {"x": padded})
    assert out.shape == x.shape and torch.equal(out, whole[..., : size[0], : size[1]])


def test_attention_of_published_heads_goes_through_the_fast_kernel():
    """With nothing else allowed, PyTorch raises where a call is not fit for it (a mask, a size, a layout)."""
    module = FLiteTransformer(hidden_size=512, num_heads=2, depth=2, cross_attn_input_size=32).requires_grad_(False)
    dit_checks.randomise(module)
    inputs = {"x": torch.randn(1, 16, 8, 12), "timesteps": torch.tensor([0.7]), "context": torch.randn(1, 7, 32)}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        fast = run_ours(module, inputs)
    with sdpa_kernel(SDPBackend.MATH):
        assert rel_err(fast, run_ours(module, inputs)) <= 1e-5


def test_compiles_into_one_graph():
    dit_checks.check_compiles(PORT, BY_NAME["residual_v"])


@pytest.mark.parametrize("name", ["residual_v", "bias_rms"])
def test_gradient_checkpointing_recomputes_blocks_and_keeps_gradients(name):
    dit_checks.check_checkpointing(PORT, BY_NAME[name])


def test_block_patches_see_every_block_and_can_replace_it():
    golden = BY_NAME["residual_v"]
    module, inputs = PORT.build(golden.config, golden.weights), golden.group("inputs")
    expected, seen = run_ours(module, inputs), []

    def replace(args, extra):
        options = args["transformer_options"]
        seen.append((options["block_type"], options["block_index"], options["total_blocks"]))
        return extra["original_block"](args)

    def options(patch):
        return {"patches_replace": {"dit": {("double_block", i): patch for i in range(3)}}}

    assert torch.equal(run_ours(module, inputs, transformer_options=options(replace)), expected)
    assert seen == [("double", i, 3) for i in range(3)]
    skipped = run_ours(module, inputs, transformer_options=options(lambda args, extra: {"img": args["img"]}))
    assert rel_err(skipped, expected) > 0.1


@pytest.mark.parametrize(
    ("arguments", "what"), [({"use_rope": False}, "use_rope"), ({"hidden_size": 50, "num_heads": 5}, "divide by 4")]
)
def test_configuration_that_can_not_run_is_refused(arguments, what):
    with pytest.raises(ValueError, match=what):
        FLiteTransformer(**arguments, depth=1, device="meta")


def test_schedule_has_the_published_numbers():
    assert sampling.shift_of_latent(128, 128) == 4.0
    assert sampling.shift_of_latent(112, 168) == pytest.approx(4.287, abs=5e-4)
    sigmas = sampling.sigmas(4, 4.0)
    assert sigmas == pytest.approx([1.0, 12 / 13, 0.8, 4 / 7, 0.0])
    card = get_architecture("f_lite").sampling
    assert card.prediction == "-velocity" and card.multiplier == 1.0
    assert card.shift_for(112, 168) == pytest.approx(card.shift, abs=5e-4)


def test_projected_guidance_adds_nothing_along_the_conditional_velocity():
    torch.manual_seed(0)
    cond, uncond = torch.randn(2, 16, 8, 8), torch.randn(2, 16, 8, 8)
    added = sampling.adaptive_projected_guidance(cond, uncond, 6.0) - cond
    assert float((added * cond).sum()) == pytest.approx(0.0, abs=1e-2)
    assert float(added.std()) == pytest.approx(5 * 0.03, rel=1e-4)
    near = cond + 0.001 * torch.randn_like(cond)
    assert float((sampling.adaptive_projected_guidance(cond, near, 6.0) - cond).std()) < 5 * 0.0011
    assert torch.equal(sampling.adaptive_projected_guidance(cond, uncond, 1.0), cond)


def test_quantization_keeps_what_every_token_depends_on():
    from nativedit.quant.policy import matches

    card = get_architecture("f_lite").quantization
    layers = [key.removesuffix(".weight") for key, value in published(28, False).items() if value.ndim > 1]
    kept = {layer for layer in layers if any(matches(pattern, layer) for pattern, _ in card.never)}
    chosen = {layer for layer in layers if any(matches(pattern, layer) for pattern in card.blocks)}
    assert kept | chosen == set(layers) and not kept & chosen and len(chosen) == 7 * 28


def test_registers_are_part_of_the_layout():
    state = {key: tuple(value.shape) for key, value in published(28, False).items()}
    assert state["register_tokens"] == (1, REGISTERS, 3072)
    assert get_architecture("f_lite").match(state | {"register_tokens": (1, 8, 3072)}) is None
