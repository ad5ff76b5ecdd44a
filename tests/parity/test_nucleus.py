"""Nucleus-Image beside diffusers' NucleusMoEImageTransformer2DModel and NucleusMoEImagePipeline 0.42.1."""

import json
from dataclasses import replace

import dit_checks
import pytest
import torch
from dit_checks import Port
from safetensors.torch import save_file
from support import golden_cases, rel_err

import nativedit
from nativedit.ldm.layers.embeddings import grid_rope
from nativedit.ldm.layers.patches import patchify, unpatchify
from nativedit.ldm.nucleus.experts import MoELayer
from nativedit.ldm.nucleus.model import NucleusMoEImageTransformer2DModel, joint_rope, moe_layers
from nativedit.supported_models import architectures, find_architecture, get_architecture

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("single_thread")

TARGETS = golden_cases("nucleus_moe_image", role="target")
BY_NAME = {golden.folder.name: golden for golden in TARGETS}
MOE = [golden for golden in TARGETS if any(key.endswith("moe_first_mlp") for key in golden.io)]
CARD = get_architecture("nucleus_image")

# The published transformer's configuration, and what its capacity factors are: 4 in the first two blocks with experts.
PUBLISHED = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 32,
    "attention_head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "joint_attention_dim": 4096,
    "axes_dims_rope": [16, 56, 56],
    "mlp_ratio": 4.0,
    "dense_moe_strategy": "leave_first_three_blocks_dense",
    "num_experts": 64,
    "moe_intermediate_dim": 1344,
    "capacity_factors": [0.0, 0.0, 0.0, 4.0, 4.0, *[2.0] * 27],
    "use_sigmoid": False,
    "route_scale": 2.5,
}


def run_ours(module, inputs, **options):
    context, mask = inputs["encoder_hidden_states"], inputs.get("encoder_hidden_states_mask")
    out = module(inputs["latent"], inputs["timestep"], context, mask, **options)
    return patchify(out, 2)


def run_reference(module, inputs):
    x = inputs["latent"]
    rows, columns = x.shape[-2] // 2, x.shape[-1] // 2
    return module(
        hidden_states=patchify(x, 2),
        img_shapes=[(1, rows, columns)] * x.shape[0],
        encoder_hidden_states=inputs["encoder_hidden_states"],
        encoder_hidden_states_mask=inputs.get("encoder_hidden_states_mask"),
        timestep=inputs["timestep"],
    ).sample


def port(first_moe):
    moe = f"transformer_blocks.{first_moe}.img_mlp"
    return Port(
        ours=NucleusMoEImageTransformer2DModel,
        reference=diffusers.NucleusMoEImageTransformer2DModel,
        run_ours=run_ours,
        run_reference=run_reference,
        stages={
            "patch_embed": "img_in",
            "text_norm": "txt_norm",
            "block_first_attn": "transformer_blocks.0.attn",
            "block_first_mlp": "transformer_blocks.0.img_mlp",
            "block_first": "transformer_blocks.0",
            "moe_first_router_logits": f"{moe}.gate",
            "moe_first_shared": f"{moe}.shared_expert",
            "moe_first_mlp": moe,
            "norm_out": "norm_out",
        },
        reshape={"block_first": lambda out: out["img"]},
    )


PORT = port(0)


def port_of(golden):
    layers = moe_layers(golden.config["dense_moe_strategy"], golden.config["num_layers"])
    return port(layers.index(True) if any(layers) else 0)


def build(golden, dtype=torch.float32):
    return PORT.build(golden.config, golden.weights, dtype)


class AtRecordedTime(NucleusMoEImageTransformer2DModel):
    """Ours from the recorded time embedding on. The recordings' processor has another exp(), and the sinusoid of 1000 t
    carries its last bit on; the live reference, held to the strict bound, has this one's."""

    recorded: torch.Tensor

    def _forward(self, x, timesteps, *args, **kwargs):
        hook = self.time_text_embed.register_forward_hook(lambda *_: self.recorded[: x.shape[0]])
        with hook:
            return super()._forward(x, timesteps, *args, **kwargs)


def at_recorded_time(golden):
    return replace(port_of(golden), ours=type("", (AtRecordedTime,), {"recorded": golden.io["stages.time_embed"]}))


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_output_equals_the_recording_and_the_reference(golden):
    dit_checks.check_golden(PORT, golden)


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_the_latent_is_packed_as_in_the_pipeline(golden):
    inputs = golden.group("inputs")
    assert torch.equal(patchify(inputs["latent"], 2), inputs["hidden_states"])
    assert torch.equal(unpatchify(golden.io["output"], 2, *inputs["latent"].shape[-2:]), golden.io["output_latent"])


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_stages_equal_the_recording(golden):
    dit_checks.check_stages(at_recorded_time(golden), golden)


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_time_embedding_equals_the_references(golden):
    reference, seen = PORT.build_reference(golden.config, golden.weights), []
    reference.time_text_embed.register_forward_hook(lambda *args: seen.append(args[2]))
    run_reference(reference, golden.group("inputs"))
    ours = build(golden).time_text_embed(golden.io["inputs.timestep"], torch.float32)
    assert rel_err(ours, seen[0]) <= dit_checks.FLOOR


@pytest.mark.parametrize("golden", MOE, ids=str)
def test_experts_take_the_recorded_tokens(golden):
    """The recording's rows are what each expert of each sample made of its tokens, in the order of their scores."""
    module, taken = build(golden), []
    layer = next(m for m in module.modules() if isinstance(m, MoELayer))
    layer.experts.register_forward_hook(lambda *args: taken.append(args[2]))
    run_ours(module, golden.group("inputs"))
    ours, recorded = taken[0].flatten(0, 1), golden.io["stages.moe_first_routed"]
    assert ours.shape == recorded.shape
    per_pick = layer.capacity(golden.io["inputs.hidden_states"].shape[1])
    for mine, theirs in zip(ours.split(per_pick), recorded.split(per_pick), strict=True):
        nearest = torch.cdist(mine, theirs).min(dim=1).values
        assert float(nearest.max()) <= 1e-4 * float(theirs.norm(dim=1).max())


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_rotary_tables_equal_the_recording(golden):
    rows, columns = (side // 2 for side in golden.io["inputs.latent"].shape[-2:])
    length = golden.io["inputs.encoder_hidden_states"].shape[1]
    ours = joint_rope(rows, columns, length, golden.config["axes_dims_rope"], torch.device("cpu"))
    assert rel_err(ours[: rows * columns], golden.io["stages.rope.0"]) <= 2e-6
    assert rel_err(ours[rows * columns :], golden.io["stages.rope.1"]) <= 2e-6


@pytest.mark.parametrize("size", [(64, 64), (37, 84), (5, 1), (1, 2)])
def test_rotary_tables_of_a_published_head_equal_the_reference(size):
    rope = diffusers.NucleusMoEImageTransformer2DModel(num_layers=0, num_attention_heads=1).pos_embed
    image, text = rope([(1, *size)], torch.device("cpu"), 300)
    ours = joint_rope(*size, 300, (16, 56, 56), torch.device("cpu"))
    expected = torch.view_as_real(torch.cat((image, text)))
    # Positions up to 342 radians times the last bit of a frequency.
    assert float((ours - expected).abs().max()) <= 6e-5 and rel_err(ours, expected) <= 1e-5


def test_an_odd_picture_starts_one_earlier_than_qwen_images():
    position = joint_rope(5, 3, 2, (2, 2, 2), torch.device("cpu"))
    rows = grid_rope((5,), (2,), 10000.0, torch.device("cpu"), offsets=(-3.0,))
    columns = grid_rope((3,), (2,), 10000.0, torch.device("cpu"), offsets=(-2.0,))
    assert torch.equal(position[:15:3, 1:2], rows) and torch.equal(position[:3, 2:3], columns)
    text = grid_rope((2,), (2,), 10000.0, torch.device("cpu"), offsets=(2.0,))
    assert torch.equal(position[15:], text.expand(2, 3, 2))


@pytest.mark.parametrize("golden", golden_cases("nucleus_moe_image", role="invariance"), ids=str)
def test_recorded_single_sample_equals_its_row_of_the_batch(golden):
    parent = BY_NAME[golden.meta["invariance"]["of"].split("/")[-1]]
    dit_checks.check_invariance(at_recorded_time(parent), golden, parent)


@pytest.mark.parametrize("row", [0, 1])
def test_padding_batching_and_routing_do_not_leak(row):
    golden = BY_NAME["moe_masked"]
    inputs = golden.group("inputs")
    mask = inputs.pop("encoder_hidden_states_mask")[row].bool()
    alone = {key: value[row : row + 1] for key, value in inputs.items()}
    alone["encoder_hidden_states"] = alone["encoder_hidden_states"][:, mask]
    module = build(golden)
    assert rel_err(run_ours(module, alone)[0], run_ours(module, golden.group("inputs"))[row]) <= 1e-5


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_bfloat16_loses_no_more_than_the_references_twice(golden):
    dit_checks.check_bfloat16(PORT, golden)


@pytest.mark.parametrize("seed", range(4))
def test_random_configurations_equal_the_reference(seed):
    """Expert-choice is discontinuous; the seeds are such that float32 and float64 choose alike."""
    config = {
        "in_channels": (64, 16, 32, 64)[seed],
        "out_channels": (16, 4, 8, 16)[seed],
        "num_layers": (2, 3, 4, 2)[seed],
        "attention_head_dim": (16, 32, 8, 16)[seed],
        "axes_dims_rope": ((4, 6, 6), (8, 12, 12), (2, 2, 4), (4, 6, 6))[seed],
        "num_attention_heads": (4, 2, 8, 6)[seed],
        "num_key_value_heads": (2, None, 1, 3)[seed],
        "joint_attention_dim": 24 + seed,
        "mlp_ratio": (4.0, 3.0, 5.0, 4.0)[seed],
        "dense_moe_strategy": (
            "all_moe",
            "leave_first_block_dense",
            "leave_first_three_blocks_dense",
            "all_moe",
        )[seed],
        "num_experts": (4, 3, 5, 64)[seed],
        "moe_intermediate_dim": (24, 16, 40, 8)[seed],
        "capacity_factors": (1.0, [0.5, 2.0, 1.0], 1.5, 2.0)[seed],
        "use_sigmoid": seed == 1,
        "route_scale": (2.5, 1.0, 0.7, 2.5)[seed],
    }
    generator = torch.Generator().manual_seed(seed)
    size = ((8, 20), (6, 10), (2, 14), (4, 6))[seed]
    inputs = {
        "latent": torch.randn(2, config["in_channels"] // 4, *size, generator=generator),
        "timestep": torch.tensor([0.731, 0.003]),
        "encoder_hidden_states": torch.randn(2, 6, config["joint_attention_dim"], generator=generator),
    }
    if seed % 2:
        inputs["encoder_hidden_states_mask"] = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]]).bool()
    dit_checks.check_random(PORT, config, inputs, seed)


def moe_layer(experts=8, factor=2.0, dim=12):
    torch.manual_seed(0)
    layer = MoELayer(dim, 6, experts, factor, use_sigmoid=False, route_scale=2.5).requires_grad_(False)
    return layer, torch.randn(1, dim)


@pytest.mark.parametrize(("tokens", "capacity"), [(1, 1), (3, 1), (4, 1), (5, 2), (64, 16)])
def test_an_expert_takes_its_share_rounded_up_and_at_least_one(tokens, capacity):
    layer, vec = moe_layer()
    x = torch.randn(1, tokens, 12)
    places, weights = layer.route(x, vec)
    assert places.shape == weights.shape == (1, 8, capacity) and int(places.max()) < tokens
    assert layer(x, x, vec).isfinite().all()


def test_one_token_is_taken_by_all_experts():
    layer, vec = moe_layer()
    _, weights = layer.route(torch.randn(1, 1, 12), vec)
    assert float(weights.sum()) == pytest.approx(2.5, rel=1e-6)


def test_a_token_that_nobody_takes_has_the_shared_expert_alone():
    layer, vec = moe_layer(experts=2, factor=0.5)
    x = torch.randn(1, 16, 12)
    places, _ = layer.route(x, vec)
    left = sorted(set(range(16)) - set(places.flatten().tolist()))
    assert left
    assert torch.equal(layer(x, x, vec)[:, left], layer.shared_expert(x)[:, left])


def test_equal_scores_change_only_who_is_left_out():
    """Equal tokens score equally; whichever the experts take, a taken token gets the same."""
    layer, vec = moe_layer()
    x = torch.randn(1, 1, 12).expand(1, 9, 12)
    out = layer(x, x, vec)
    taken = sorted(set(layer.route(x, vec)[0].flatten().tolist()))
    assert out.isfinite().all() and len(taken) >= layer.capacity(9)


def test_shares_of_a_token_add_up_to_the_scale():
    layer, vec = moe_layer()
    places, weights = layer.route(torch.randn(1, 40, 12), vec)
    total = torch.zeros(40).index_add(0, places.flatten(), weights.flatten())
    assert torch.allclose(total[places.unique()], torch.tensor(2.5))


def published_state():
    with torch.device("meta"):
        return diffusers.NucleusMoEImageTransformer2DModel(**PUBLISHED).state_dict()


def shapes_of(state, prefix=""):
    return {prefix + key: tuple(value.shape) for key, value in state.items()}


def test_published_layout_loads_strictly_at_full_size():
    state = published_state()
    assert len(state) == 610 and sum(value.numel() for value in state.values()) == 16_922_679_296
    result = NucleusMoEImageTransformer2DModel(**PUBLISHED, device="meta").load_state_dict(state, assign=True)
    assert not result.missing_keys and not result.unexpected_keys


def test_published_banks_are_not_copied():
    golden = BY_NAME["moe_masked"]
    key = "transformer_blocks.1.img_mlp.experts.down_proj"
    assert build(golden).state_dict()[key + ".weight"].data_ptr() == golden.weights[key].data_ptr()


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "transformer."])
def test_published_configuration_is_read_from_shapes(prefix):
    match = find_architecture(shapes_of(published_state(), prefix))
    assert (match.architecture.name, match.prefix, match.config) == ("nucleus_image", prefix, PUBLISHED)
    own = NucleusMoEImageTransformer2DModel(**PUBLISHED, device="meta").state_dict()
    shapes = {
        part.name: part.shape(shape)
        for key, shape in shapes_of(published_state(), prefix).items()
        for part in match.parts(key)
    }
    assert shapes == shapes_of(own)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_our_layout_has_the_same_configuration(prefix):
    state = NucleusMoEImageTransformer2DModel(**PUBLISHED, device="meta").state_dict()
    match = find_architecture(shapes_of(state, prefix))
    assert (match.architecture.name, match.prefix, match.layout, match.config) == (
        "nucleus_image",
        prefix,
        None,
        PUBLISHED,
    )


@pytest.mark.parametrize("golden", TARGETS, ids=str)
@pytest.mark.parametrize("ours", [True, False])
def test_a_recordings_weights_load_through_the_front_door(golden, ours, tmp_path):
    file = golden.folder / "weights.safetensors"
    if ours:
        file = tmp_path / "dit.safetensors"
        save_file({key: value.contiguous() for key, value in build(golden).state_dict().items()}, file)
    module = nativedit.load_diffusion_model(file, architecture="nucleus_image", config=golden.config)
    inputs = golden.group("inputs")
    with torch.no_grad():
        assert rel_err(run_ours(module, inputs), run_ours(build(golden), inputs)) <= 1e-6


def test_no_known_layout_of_another_model_is_claimed(shared):
    for path in sorted((shared / "reference" / "layouts").glob("*.json")):
        shapes = json.loads(path.read_text()).get("keys")
        if isinstance(shapes, dict):
            for prefix in ("", "model.diffusion_model."):
                assert CARD.match({prefix + key: tuple(shape) for key, shape in shapes.items()}, prefix) is None, path


def test_no_other_card_claims_it():
    for state in (published_state(), NucleusMoEImageTransformer2DModel(**PUBLISHED, device="meta").state_dict()):
        assert [card.name for card in architectures() if card.match(shapes_of(state))] == ["nucleus_image"]


@pytest.mark.parametrize("size", [(13, 21), (1, 1), (12, 7)])
def test_a_size_the_patches_do_not_divide_is_padded_and_cropped(size):
    golden = BY_NAME["moe_masked"]
    module, inputs = build(golden), golden.group("inputs")
    x = torch.randn(2, 16, *size)
    padded = torch.nn.functional.pad(x, (0, size[1] % 2, 0, size[0] % 2), mode="replicate")
    call = (inputs["timestep"], inputs["encoder_hidden_states"], inputs["encoder_hidden_states_mask"])
    out, whole = module(x, *call), module(padded, *call)
    assert out.shape == x.shape and torch.equal(out, whole[..., : size[0], : size[1]])


def test_a_latent_of_one_frame_is_a_picture_and_of_two_is_refused():
    golden = BY_NAME["moe_masked"]
    module, inputs = build(golden), golden.group("inputs")
    call = (inputs["timestep"], inputs["encoder_hidden_states"], inputs["encoder_hidden_states_mask"])
    out = module(inputs["latent"][:, :, None], *call)
    assert torch.equal(out[:, :, 0], module(inputs["latent"], *call))
    with pytest.raises(ValueError, match="2 frames"):
        module(torch.randn(2, 16, 2, 4, 4), *call)


def test_compiles_into_one_graph():
    dit_checks.check_compiles(PORT, BY_NAME["moe_masked"])


def test_gradient_checkpointing_recomputes_blocks_and_keeps_gradients():
    dit_checks.check_checkpointing(PORT, BY_NAME["moe_masked"])


def test_block_patches_see_every_block_and_can_replace_it():
    golden = BY_NAME["moe_masked"]
    module, inputs = build(golden), golden.group("inputs")
    expected, seen = run_ours(module, inputs), []

    def watch(args, extra):
        options = args["transformer_options"]
        seen.append((options["block_type"], options["block_index"], options["total_blocks"]))
        return extra["original_block"](args)

    def options(patch):
        return {"patches_replace": {"dit": {("double_block", i): patch for i in range(3)}}}

    assert torch.equal(run_ours(module, inputs, transformer_options=options(watch)), expected)
    assert seen == [("double", i, 3) for i in range(3)]
    skipped = run_ours(module, inputs, transformer_options=options(lambda args, extra: {"img": args["img"]}))
    assert rel_err(skipped, expected) > 0.1


def test_float16_is_clipped_where_it_would_overflow():
    golden = BY_NAME["moe_masked"]
    module = build(golden, torch.float16)
    loud = module.transformer_blocks[0].img_mlp.net[2].weight
    loud.mul_(3e4).clamp_(-6e4, 6e4)
    inputs, seen = dit_checks.cast(golden.group("inputs"), torch.float16), []
    module.transformer_blocks[0].register_forward_hook(lambda *args: seen.append(args[2]["img"]))
    run_ours(module, inputs)
    assert seen[0].isfinite().all() and float(seen[0].abs().max()) == 65504.0


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"dense_moe_strategy": "some"}, "leave_first_block_dense"),
        ({"axes_dims_rope": (16, 16, 16)}, "axes_dims_rope"),
        ({"num_key_value_heads": 5}, "5 key and value heads"),
        ({"capacity_factors": [1.0]}, "1 capacity_factors for 24 blocks"),
    ],
)
def test_configuration_that_can_not_run_is_refused(arguments, what):
    with pytest.raises(ValueError, match=what):
        NucleusMoEImageTransformer2DModel(**arguments, device="meta")


def test_the_prompt_is_the_published_template():
    from diffusers.pipelines.nucleusmoe_image.pipeline_nucleusmoe_image import DEFAULT_SYSTEM_PROMPT

    text = CARD.prompt.template.format(prompt="a cat")
    assert text == (
        f"<|im_start|>system\n{DEFAULT_SYSTEM_PROMPT}<|im_end|>\n"
        "<|im_start|>user\na cat<|im_end|>\n<|im_start|>assistant\n"
    )


def test_sampling_is_the_published_one():
    assert CARD.sampling.prediction == "-velocity" and CARD.sampling.multiplier == 1.0
    assert CARD.prompt.layers == (-8,)


def test_quantization_takes_the_experts_and_keeps_the_router():
    from nativedit.quant.policy import matches

    state = NucleusMoEImageTransformer2DModel(**PUBLISHED, device="meta").state_dict()
    layers = [key.removesuffix(".weight") for key, value in state.items() if value.ndim > 1]
    card = CARD.quantization
    kept = {layer for layer in layers if any(matches(pattern, layer) for pattern, _ in card.never)}
    chosen = {layer for layer in layers if any(matches(pattern, layer) for pattern in (*card.blocks, *card.banks))}
    assert kept | chosen == set(layers) and not kept & chosen
    assert len(chosen) == 32 * 6 + 3 * 2 + 29 * 4
    share = sum(state[layer + ".weight"].numel() for layer in chosen) / sum(value.numel() for value in state.values())
    assert share > 0.94


def full_size_decisions(name):
    from nativedit.quant.formats import parse_recipe
    from nativedit.quant.policy import Policy, decide

    state = NucleusMoEImageTransformer2DModel(**PUBLISHED, device="meta").state_dict()
    tensors = {key: ("BF16", tuple(value.shape), 2 * value.numel()) for key, value in state.items()}
    return tensors, decide(tensors, Policy(parse_recipe(name), card=CARD.quantization))


@pytest.mark.parametrize(
    ("name", "bank", "down"),
    [
        ("int8_convrot", "int8_tensorwise:scale=row", "int8_tensorwise:convrot=64"),
        ("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn"),
        ("mxfp8", "mxfp8", "mxfp8"),
        ("nvfp4", "nvfp4", "nvfp4"),
        ("convrot_w4a4", "convrot_w4a4:convrot=64", "convrot_w4a4:convrot=64"),
        ("asym_w4a8_int8", "int8_tensorwise:scale=row", "asym_w4a8_int8:convrot=64,group=16,codebook=yes"),
    ],
)
def test_every_format_takes_all_experts_as_core_can_multiply_them(name, bank, down):
    """1344 input features don't divide by 256, and ComfyUI's int8 banks lose their rotation."""
    _, decisions = full_size_decisions(name)
    found = {decision.layer: str(decision.recipe) for decision in decisions if decision.recipe}
    assert len(found) == 32 * 6 + 3 * 2 + 29 * 4
    assert found["transformer_blocks.3.img_mlp.experts.down_proj"] == bank
    assert found["transformer_blocks.3.img_mlp.shared_expert.net.2"] == down


def test_text_states_of_another_encoder_are_refused_in_words():
    golden = MOE[0]
    module = NucleusMoEImageTransformer2DModel(**golden.config)
    inputs = golden.group("inputs")
    wide = torch.nn.functional.pad(inputs["encoder_hidden_states"], (0, 8))
    with pytest.raises(ValueError, match="another model's text encoder"):
        run_ours(module, inputs | {"encoder_hidden_states": wide})
