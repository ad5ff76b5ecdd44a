"""CogView4 beside diffusers' CogView4Transformer2DModel and CogView4Pipeline 0.42.1."""

import dit_checks
import numpy
import pytest
import torch
from dit_checks import Port
from safetensors.torch import save_file
from sat_layout import as_sat
from support import golden_cases, rel_err

import nativedit
from nativedit.ldm.cogview4 import sampling
from nativedit.ldm.cogview4.model import CogView4Transformer2DModel, stretched_grid_rope
from nativedit.supported_models import find_architecture, get_architecture

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("single_thread")

TARGETS = golden_cases("cogview4", role="target")
BY_NAME = {golden.folder.name: golden for golden in TARGETS}
TOKENS = 60  # image tokens of every recording


def run_ours(module, inputs, **options):
    sizes = {key: inputs[key] for key in ("original_size", "target_size", "crop_coords")}
    context, mask = inputs["encoder_hidden_states"], inputs.get("text_mask")
    return module(inputs["hidden_states"], inputs["timestep"], context, mask, **sizes, **options)


def run_reference(module, inputs):
    """The reference masks text in its training processor alone; see the recordings' notes."""
    from diffusers.models.transformers.transformer_cogview4 import CogView4TrainingAttnProcessor

    inputs = dict(inputs)
    mask = inputs.pop("text_mask", None)
    if mask is None:
        return module(**inputs).sample
    for block in module.transformer_blocks:
        block.attn1.processor = CogView4TrainingAttnProcessor()
    return module(**inputs, attention_kwargs={"text_attn_mask": mask.to(torch.int32)}).sample


PORT = Port(
    ours=CogView4Transformer2DModel,
    reference=diffusers.CogView4Transformer2DModel,
    run_ours=run_ours,
    run_reference=run_reference,
    stages={
        "patch_embed.0": "patch_embed.proj",
        "patch_embed.1": "patch_embed.text_proj",
        "time_embed": "time_condition_embed",
        "block_first_attn.0": "transformer_blocks.0.attn1",
        "block_first.0": "transformer_blocks.0",
        "block_last.0": "transformer_blocks.2",
        "norm_out": "norm_out",
    },
    reshape={
        "block_first_attn.0": lambda out: out[:, -TOKENS:],
        "block_first.0": lambda out: out["img"],
        "block_last.0": lambda out: out["img"],
    },
)

PUBLISHED = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 28,
    "attention_head_dim": 128,
    "num_attention_heads": 32,
    "text_embed_dim": 4096,
    "time_embed_dim": 512,
    "condition_dim": 256,
}


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_output_equals_the_recording_and_the_reference(golden):
    dit_checks.check_golden(PORT, golden)


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_stages_equal_the_recording(golden):
    dit_checks.check_stages(PORT, golden)


@pytest.mark.parametrize("golden", TARGETS, ids=str)
@pytest.mark.parametrize("block", ["first", "last"])
def test_text_stream_equals_the_recording_where_text_stands(golden, block):
    captured, module = [], PORT.build(golden.config, golden.weights)
    module.transformer_blocks[0 if block == "first" else -1].register_forward_hook(
        lambda *args: captured.append(args[2])
    )
    inputs = golden.group("inputs")
    run_ours(module, inputs)
    real = inputs.get("text_mask", torch.ones(inputs["encoder_hidden_states"].shape[:2])).bool()
    assert rel_err(captured[0]["txt"][real], golden.io[f"stages.block_{block}.1"][real]) <= dit_checks.STAGE


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_rotary_table_equals_the_recording(golden):
    half = golden.config["attention_head_dim"] // 2
    ours = stretched_grid_rope(6, 10, golden.config["attention_head_dim"], (256, 256), torch.device("cpu"))
    for index, name in enumerate(("rope.0", "rope.1")):
        recorded = golden.io[f"stages.{name}"]
        assert torch.equal(recorded[:, :half], recorded[:, half:]), "the reference turns channel i with i + D / 2"
        assert rel_err(ours[..., index], recorded[:, :half]) <= 2e-6


@pytest.mark.parametrize("size", [(64, 64), (48, 85), (7, 300)])
def test_rotary_table_of_a_published_head_equals_the_reference(size):
    rope = diffusers.CogView4Transformer2DModel(num_layers=0, attention_head_dim=128, num_attention_heads=1).rope
    cos, sin = rope(torch.zeros(1, 16, 2 * size[0], 2 * size[1]))
    ours = stretched_grid_rope(*size, 128, (256, 256), torch.device("cpu"))
    assert rel_err(ours[..., 0], cos[:, :64]) <= 2e-6 and rel_err(ours[..., 1], sin[:, :64]) <= 2e-6


@pytest.mark.parametrize("golden", golden_cases("cogview4", role="invariance"), ids=str)
def test_recorded_single_sample_equals_its_row_of_the_batch(golden):
    dit_checks.check_invariance(PORT, golden, BY_NAME[golden.meta["invariance"]["of"].split("/")[-1]])


@pytest.mark.parametrize("row", [0, 1])
def test_padding_and_batching_do_not_leak(row):
    golden = BY_NAME["text_masked"]
    inputs = golden.group("inputs")
    alone = {key: value[row : row + 1] for key, value in inputs.items() if key != "text_mask"}
    alone["encoder_hidden_states"] = alone["encoder_hidden_states"][:, inputs["text_mask"][row].bool()]
    ours = run_ours(PORT.build(golden.config, golden.weights), alone)
    assert rel_err(ours[0], golden.io["output"][row]) <= 1e-5


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_bfloat16_loses_no_more_than_the_references_twice(golden):
    dit_checks.check_bfloat16(PORT, golden)


@pytest.mark.parametrize("seed", range(4))
def test_random_configurations_equal_the_reference(seed):
    config = {
        "patch_size": (2, 1, 2, 4)[seed],
        "in_channels": (16, 4, 32, 3)[seed],
        "out_channels": (16, 4, 16, 3)[seed],
        "num_layers": (1, 2, 3, 2)[seed],
        "attention_head_dim": (16, 32, 8, 64)[seed],
        "num_attention_heads": (3, 2, 4, 1)[seed],
        "text_embed_dim": 24 + seed,
        "time_embed_dim": (32, 20, 16, 48)[seed],
        "condition_dim": (16, 8, 32, 4)[seed],
        "rope_axes_dim": ((256, 256), (64, 256), (256, 32), (8, 8))[seed],
    }
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "hidden_states": torch.randn(2, config["in_channels"], 8, 20, generator=generator),
        "timestep": torch.tensor([731.0, 3.0]),
        "encoder_hidden_states": torch.randn(2, 6, config["text_embed_dim"], generator=generator),
        "original_size": torch.tensor([[512.0, 768.0], [1024.0, 1024.0]]),
        "target_size": torch.tensor([[64.0, 160.0], [64.0, 160.0]]),
        "crop_coords": torch.tensor([[0.0, 16.0], [32.0, 0.0]]),
    }
    if seed % 2:
        inputs["text_mask"] = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    dit_checks.check_random(PORT, config, inputs, seed)


def test_published_layout_loads_strictly_at_full_size():
    with torch.device("meta"):
        state = diffusers.CogView4Transformer2DModel(**PUBLISHED).state_dict()
    assert len(state) == 408 and sum(value.numel() for value in state.values()) == 6_369_118_272
    result = CogView4Transformer2DModel(device="meta").load_state_dict(state, strict=True, assign=True)
    assert not result.missing_keys and not result.unexpected_keys


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "transformer."])
def test_published_configuration_is_read_from_shapes(prefix):
    state = CogView4Transformer2DModel(**PUBLISHED, device="meta").state_dict()
    match = find_architecture({prefix + key: tuple(value.shape) for key, value in state.items()})
    assert (match.architecture.name, match.prefix, match.config) == ("cogview4", prefix, PUBLISHED)


@pytest.mark.parametrize("kind", ["CogView3PlusTransformer2DModel", "GlmImageTransformer2DModel"])
def test_relatives_with_the_same_keys_are_not_claimed(kind):
    with torch.device("meta"):
        state = getattr(diffusers, kind)().state_dict()
    assert get_architecture("cogview4").match({key: tuple(value.shape) for key, value in state.items()}) is None


def test_original_layout_is_recognised_at_full_size():
    state = CogView4Transformer2DModel(**PUBLISHED, device="meta").state_dict()
    sat = {key: tuple(value.shape) for key, value in as_sat(state, 28).items()}
    match = find_architecture(sat)
    assert len(sat) == 296
    assert (match.architecture.name, match.layout.name, match.config) == ("cogview4", "sat", PUBLISHED)
    shapes = {part.name: part.shape(shape) for key, shape in sat.items() for part in match.parts(key)}
    assert shapes == {key: tuple(value.shape) for key, value in state.items()}


def test_original_layout_loads_as_the_published_one(tmp_path):
    golden = BY_NAME["plain"]
    weights = {key: value.contiguous() for key, value in as_sat(golden.weights, 3).items()}
    save_file(weights, tmp_path / "mp_rank_00.safetensors")
    module = nativedit.load_diffusion_model(tmp_path / "mp_rank_00.safetensors", config=golden.config)
    for key, value in module.state_dict().items():
        assert torch.equal(value, golden.weights[key]), key


def test_a_recordings_weights_load_through_the_front_door():
    golden = BY_NAME["plain"]
    module = nativedit.load_diffusion_model(golden.folder / "weights.safetensors", config=golden.config)
    inputs = golden.group("inputs")
    with torch.no_grad():
        assert torch.equal(run_ours(module, inputs), run_ours(PORT.build(golden.config, golden.weights), inputs))


def test_no_known_layout_of_another_model_is_claimed(shared):
    import json

    card = get_architecture("cogview4")
    for path in sorted((shared / "reference" / "layouts").glob("*.json")):
        shapes = json.loads(path.read_text()).get("keys")
        if isinstance(shapes, dict):
            for prefix in ("", "model.diffusion_model."):
                assert card.match({prefix + key: tuple(shape) for key, shape in shapes.items()}, prefix) is None, path


def test_sizes_not_given_are_those_of_the_latent():
    golden = BY_NAME["plain"]
    module, inputs = PORT.build(golden.config, golden.weights), golden.group("inputs")
    own = torch.tensor([[96.0, 160.0]]).expand(2, 2)  # a latent of 12 x 20
    sizes = {"original_size": own, "target_size": own, "crop_coords": torch.zeros(2, 2)}
    call = (inputs["hidden_states"], inputs["timestep"], inputs["encoder_hidden_states"])
    assert rel_err(module(*call), module(*call, **sizes)) <= 1e-5
    assert rel_err(module(*call, crop_coords=torch.tensor([[64.0, 0.0]])), module(*call)) > 1e-3


def test_text_may_have_any_length_none_included():
    golden = BY_NAME["plain"]
    module, inputs = PORT.build(golden.config, golden.weights), golden.group("inputs")
    masked = run_ours(module, inputs | {"text_mask": torch.zeros(2, 8, dtype=torch.bool)})
    none = run_ours(module, inputs | {"encoder_hidden_states": inputs["encoder_hidden_states"][:, :0]})
    assert none.isfinite().all() and rel_err(none, masked) <= 1e-5


@pytest.mark.parametrize("size", [(13, 21), (1, 1), (12, 7)])
def test_a_size_the_patches_do_not_divide_is_padded_and_cropped(size):
    golden = BY_NAME["plain"]
    module, inputs = PORT.build(golden.config, golden.weights), golden.group("inputs")
    x = torch.randn(2, 16, *size)
    out = run_ours(module, inputs | {"hidden_states": x})
    padded = torch.nn.functional.pad(x, (0, size[1] % 2, 0, size[0] % 2), mode="replicate")
    whole = run_ours(module, inputs | {"hidden_states": padded})
    assert out.shape == x.shape and torch.equal(out, whole[..., : size[0], : size[1]])


def test_float16_overflows_where_bfloat16_does_not_so_it_is_not_offered():
    golden = BY_NAME["plain"]
    loud = golden.group("inputs") | {"encoder_hidden_states": golden.io["inputs.encoder_hidden_states"] * 40000.0}
    outputs = {}
    for dtype in (torch.float16, torch.bfloat16):
        module = PORT.build(golden.config, golden.weights, dtype)
        outputs[dtype] = run_ours(module, dit_checks.cast(loud | {"timestep": loud["timestep"]}, dtype))
    assert not outputs[torch.float16].isfinite().all()
    assert outputs[torch.bfloat16].isfinite().all()
    assert "float16" not in get_architecture("cogview4").dtypes


def test_compiles_into_one_graph():
    dit_checks.check_compiles(PORT, BY_NAME["text_masked"])


def test_gradient_checkpointing_recomputes_blocks_and_keeps_gradients():
    dit_checks.check_checkpointing(PORT, BY_NAME["plain"])


def test_block_patches_see_every_block_and_can_replace_it():
    golden = BY_NAME["plain"]
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
    skipped = options(lambda args, extra: {"img": args["img"], "txt": args["txt"]})
    assert rel_err(run_ours(module, inputs, transformer_options=skipped), expected) > 0.1


def test_control_residuals_are_added_to_image_tokens():
    golden = BY_NAME["plain"]
    module, inputs = PORT.build(golden.config, golden.weights), golden.group("inputs")
    expected, zero = run_ours(module, inputs), torch.zeros(2, TOKENS, 48)
    assert torch.equal(run_ours(module, inputs, control={"input": [zero, None]}), expected)
    assert rel_err(run_ours(module, inputs, control={"input": [torch.randn_like(zero)]}), expected) > 0.01


def test_the_control_variant_is_called_what_it_is():
    golden = BY_NAME["plain"]
    shapes = {key: tuple(value.shape) for key, value in golden.weights.items()}
    shapes["patch_embed.proj.weight"] = (shapes["patch_embed.proj.bias"][0], 2 * 64)
    config = get_architecture("cogview4").detect(shapes)
    assert (config["in_channels"], config["out_channels"]) == (32, 16)
    module = CogView4Transformer2DModel(**config, device="meta")
    with pytest.raises(ValueError, match=r"takes 32 latent channels and was given 16.*CogView4-Control.*not supported"):
        module(torch.zeros(1, 16, 4, 4), torch.zeros(1), torch.zeros(1, 2, config["text_embed_dim"]))


def test_heads_that_can_not_be_turned_are_refused():
    with pytest.raises(ValueError, match="attention_head_dim"):
        CogView4Transformer2DModel(attention_head_dim=6, num_attention_heads=2, device="meta")


def pipeline_schedule(steps, height, width):
    """Timesteps and sigmas as CogView4Pipeline makes them with the published scheduler configuration."""
    from diffusers.pipelines.cogview4.pipeline_cogview4 import calculate_shift, retrieve_timesteps

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
    )
    times = numpy.linspace(1000, 1.0, steps).astype(numpy.int64).astype(numpy.float32)
    mu = calculate_shift((height // 8) * (width // 8) // 4, 256, 0.25, 0.75)
    timesteps, _ = retrieve_timesteps(scheduler, steps, "cpu", times, times / 1000, mu=mu)
    return timesteps, scheduler.sigmas, mu


@pytest.mark.parametrize(("height", "width"), [(1024, 1024), (512, 2048), (768, 1344), (2048, 1024)])
@pytest.mark.parametrize("steps", [1, 2, 20, 50, 333])
def test_schedule_equals_the_pipelines(height, width, steps):
    timesteps, expected, mu = pipeline_schedule(steps, height, width)
    shift = sampling.shift_of_latent(height // 8, width // 8)
    ours = torch.tensor(sampling.sigmas(steps, shift))
    assert shift == pytest.approx(mu, rel=1e-12)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(sampling.timestep(ours[:-1], shift), timesteps, rtol=1e-5, atol=1e-3)


def test_card_says_how_it_is_sampled():
    card = get_architecture("cogview4")
    assert card.sampling.shift_for(128, 128) == card.sampling.shift == 3.25
    assert card.sampling.shift_for(64, 64) == 1.75
    assert card.sampling.timestep_before_shift and card.sampling.multiplier == 1000.0
    assert (card.latent_format, card.autoencoder, card.text_encoders) == ("cogview4", "kl_cogview4", ("glm4",))


def test_quantization_keeps_what_every_token_depends_on():
    from nativedit.quant.policy import matches

    card = get_architecture("cogview4").quantization
    state = CogView4Transformer2DModel(**PUBLISHED, device="meta").state_dict()
    layers = [key.removesuffix(".weight") for key in state if key.endswith(".weight")]
    kept = {layer for layer in layers if any(matches(pattern, layer) for pattern, _ in card.never)}
    chosen = {layer for layer in layers if any(matches(pattern, layer) for pattern in card.blocks)}
    assert kept | chosen == set(layers) and not kept & chosen and len(chosen) == 6 * 28
