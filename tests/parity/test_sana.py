"""Sana, SANA-1.5 and SANA-Sprint beside diffusers' SanaTransformer2DModel 0.42.1."""

import json
import math

import dit_checks
import pytest
import torch
from dit_checks import Port
from support import find_shared, golden_cases, rel_err

from nativedit.ldm.layers.linear_attention import linear_attention
from nativedit.ldm.sana.model import SanaTransformer2DModel
from nativedit.ldm.sana.position import position_table
from nativedit.supported_models import find_architecture, get_architecture

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("single_thread")

TARGETS = golden_cases("sana", role="target")
INVARIANCE = golden_cases("sana", role="invariance")
BY_NAME = {golden.folder.name: golden for golden in TARGETS}
SPRINT = BY_NAME["sprint"]


def run_ours(module, inputs, **more):
    return module(
        inputs["hidden_states"],
        inputs["timestep"],
        inputs["encoder_hidden_states"],
        inputs.get("encoder_attention_mask"),
        guidance=inputs.get("guidance"),
        **more,
    )


PORT = Port(
    ours=SanaTransformer2DModel,
    reference=diffusers.SanaTransformer2DModel,
    run_ours=run_ours,
    run_reference=lambda module, inputs: module(**inputs).sample,
    stages={
        "patch_embed": "patch_embed",
        "text_embed": "caption_norm",
        "time_embed.1": "time_embed",
        "block_first_self_attn": "transformer_blocks.0.attn1",
        "block_first_cross_attn": "transformer_blocks.0.attn2",
        "block_first_mlp": "transformer_blocks.0.ff",
        "block_first": "transformer_blocks.0",
    },
    reshape={
        "time_embed.1": lambda out: out[1],
        "block_first": lambda out: out["img"],
        # ours gives tokens, the reference a picture; the norm of a difference does not care
        "block_first_mlp": lambda out: out.transpose(1, 2),
    },
)

LARGE = {"num_layers": 20}
SMALL = {
    "num_attention_heads": 36,
    "num_layers": 28,
    "num_cross_attention_heads": 16,
    "cross_attention_head_dim": 72,
    "cross_attention_dim": 1152,
}
NORMED = {"qk_norm": "rms_norm_across_heads"}
SPRINTING = {**NORMED, "guidance_embeds": True}
# card, constructor arguments, keys, parameters, keys of the publisher's own layout without the position table
PUBLISHED = {
    "sana 0.6B": ("sana", SMALL, 548, 591_747_872, 437),
    "sana 1.6B": ("sana", LARGE, 396, 1_604_462_752, 317),
    "sana 1.6B 2K": ("sana", {**LARGE, "sample_size": 64, "interpolation_scale": 1.0}, 396, 1_604_462_752, 317),
    "sana 1.6B 4K": ("sana", {**LARGE, "sample_size": 128, "interpolation_scale": 2.0}, 396, 1_604_462_752, 317),
    "sana-1.5 1.6B": ("sana", {**LARGE, **NORMED}, 476, 1_604_641_952, 397),
    "sana-1.5 4.8B": ("sana", {**NORMED, "num_layers": 60}, 1396, 4_721_825_952, None),
    "sprint 0.6B": ("sana_sprint", {**SMALL, **SPRINTING}, 664, 593_501_216, None),
    "sprint 1.6B": ("sana_sprint", {**LARGE, **SPRINTING}, 480, 1_610_237_472, 401),
}
# What no shape tells: where the position table is, and constants that the module has as defaults.
NOT_IN_SHAPES = {"sample_size", "interpolation_scale"}


def meta_shapes(config):
    state = SanaTransformer2DModel(**config, device="meta").state_dict()
    return {key: tuple(value.shape) for key, value in state.items()}


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_output_equals_the_recording_and_the_reference(golden):
    dit_checks.check_golden(PORT, golden)


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_stages_equal_the_recording(golden):
    dit_checks.check_stages(PORT, golden)


@pytest.mark.parametrize("golden", INVARIANCE, ids=str)
def test_padding_and_batching_do_not_leak(golden):
    dit_checks.check_invariance(PORT, golden, BY_NAME[golden.meta["invariance"]["of"].split("/")[-1]])


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_bfloat16_loses_no_more_than_the_references_twice(golden):
    dit_checks.check_bfloat16(PORT, golden)


@pytest.mark.parametrize("seed", range(4))
def test_random_configurations_equal_the_reference(seed):
    heads, head_dim = (3, 2, 4, 1)[seed], (16, 32, 8, 64)[seed]
    config = {
        "in_channels": (32, 16, 8, 32)[seed],
        "out_channels": (32, 16, 8, 32)[seed],
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "num_layers": 1 + seed,
        "num_cross_attention_heads": (2, 4, 1, 3)[seed],
        "cross_attention_head_dim": (20, 8, 32, 16)[seed],
        "cross_attention_dim": heads * head_dim,
        "caption_channels": 24 + seed,
        "mlp_ratio": (2.5, 2.0, 4.0, 1.5)[seed],
        "attention_bias": seed == 1,
        "sample_size": (16, 32, 8, 64)[seed],
        "patch_size": (1, 2, 1, 1)[seed],
        "norm_elementwise_affine": seed == 2,
        "norm_eps": (1e-6, 1e-5, 1e-6, 1e-6)[seed],
        "interpolation_scale": (None, 2.0, 1.0, None)[seed],
        "guidance_embeds": seed == 3,
        "qk_norm": (None, None, "rms_norm_across_heads", "rms_norm_across_heads")[seed],
    }
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "hidden_states": torch.randn(2, config["in_channels"], 6 + 2 * seed, 12, generator=generator),
        "timestep": torch.rand(2, generator=generator) * (1.0 if seed == 3 else 100.0),
        "encoder_hidden_states": torch.randn(2, 7, config["caption_channels"], generator=generator),
        "encoder_attention_mask": torch.arange(7)[None] < torch.tensor([[7], [4]]),
    }
    if config["guidance_embeds"]:
        inputs["guidance"] = torch.tensor([0.45, 0.1])
    dit_checks.check_random(PORT, config, inputs, seed)


@pytest.mark.parametrize(("size", "dim", "base", "scale"), [((64, 64), 2240, 64, 1.0), ((128, 96), 2240, 128, 2.0)])
def test_position_table_of_2k_and_4k_equals_the_references(size, dim, base, scale):
    """The reference's angles are float64; ours, float32, go up to 64 and are off by 4e-6 at most."""
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    reference = get_2d_sincos_pos_embed(dim, size, base_size=base, interpolation_scale=scale)
    ours = position_table(size, dim, base, scale, torch.device("cpu"))
    assert ours.dtype == torch.float32 and (ours - reference).abs().max() <= 4e-6


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layout_loads_strictly_at_full_size(name):
    _, config, keys, parameters, _ = PUBLISHED[name]
    with torch.device("meta"):
        state = diffusers.SanaTransformer2DModel(**config).state_dict()
    assert len(state) == keys and sum(value.numel() for value in state.values()) == parameters
    result = SanaTransformer2DModel(**config, device="meta").load_state_dict(state, strict=True, assign=True)
    assert not result.missing_keys and not result.unexpected_keys


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_read_from_shapes(name):
    card, config, *_ = PUBLISHED[name]
    shapes = meta_shapes(config)
    match = find_architecture({"model.diffusion_model." + key: shape for key, shape in shapes.items()})
    assert match.architecture.name == card and match.layout is None
    assert meta_shapes(match.config) == shapes
    expected = {key: value for key, value in config.items() if key not in NOT_IN_SHAPES}
    assert {key: match.config[key] for key in expected} == expected


def publisher_state(state):
    """A state dict in the publisher's layout, made from ours with the names the converter in diffusers reads."""
    theirs = {}
    for key, value in state.items():
        key = key.replace("transformer_blocks.", "blocks.").replace("time_embed.emb.", "time_embed.")
        for ours, name in (
            ("patch_embed.", "x_embedder."),
            ("caption_projection.linear_", "y_embedder.y_proj.fc"),
            ("caption_norm.", "attention_y_norm."),
            ("time_embed.timestep_embedder.linear_1.", "t_embedder.mlp.0."),
            ("time_embed.timestep_embedder.linear_2.", "t_embedder.mlp.2."),
            ("time_embed.guidance_embedder.linear_1.", "cfg_embedder.mlp.0."),
            ("time_embed.guidance_embedder.linear_2.", "cfg_embedder.mlp.2."),
            ("time_embed.linear.", "t_block.1."),
            (".attn1.to_out.0.", ".attn.proj."),
            (".attn1.norm_q.", ".attn.q_norm."),
            (".attn1.norm_k.", ".attn.k_norm."),
            (".attn2.to_q.", ".cross_attn.q_linear."),
            (".attn2.to_out.0.", ".cross_attn.proj."),
            (".attn2.norm_q.", ".cross_attn.q_norm."),
            (".attn2.norm_k.", ".cross_attn.k_norm."),
            (".ff.conv_inverted.", ".mlp.inverted_conv.conv."),
            (".ff.conv_depth.", ".mlp.depth_conv.conv."),
            (".ff.conv_point.", ".mlp.point_conv.conv."),
            ("proj_out.", "final_layer.linear."),
        ):
            key = key.replace(ours, name)
        if key == "scale_shift_table":
            key = "final_layer.scale_shift_table"
        for parts, fused in (
            ((".attn1.to_q.", ".attn1.to_k.", ".attn1.to_v."), ".attn.qkv."),
            ((".attn2.to_k.", ".attn2.to_v."), ".cross_attn.kv_linear."),
        ):
            for part in parts:
                if part in key:
                    key = key.replace(part, fused)
        theirs[key] = torch.cat((theirs[key], value)) if key in theirs else value
    theirs["y_embedder.y_embedding"] = torch.empty(300, 2304, device="meta")
    return theirs


@pytest.mark.parametrize("name", [name for name, row in PUBLISHED.items() if row[4]])
def test_publishers_own_layout_is_recognised_and_split_into_ours(name):
    card, config, _, _, keys = PUBLISHED[name]
    ours = meta_shapes(config)
    theirs = publisher_state({key: torch.empty(shape, device="meta") for key, shape in ours.items()})
    assert len(theirs) == keys
    if "interpolation_scale" in config:
        theirs["pos_embed"] = torch.empty(1, config["sample_size"] ** 2, 2240, device="meta")
    shapes = {key: tuple(value.shape) for key, value in theirs.items()}
    match = find_architecture(shapes)
    assert match.architecture.name == card and match.layout.name == "publisher"
    assert {part.name: part.shape(shapes[key]) for key in shapes for part in match.parts(key)} == ours
    assert match.config.get("interpolation_scale") == config.get("interpolation_scale")
    assert match.config.get("sample_size", 32) == config.get("sample_size", 32)


def test_fused_weights_are_split_in_the_publishers_order():
    ours = PORT.build(SPRINT.config, SPRINT.weights).state_dict()
    layout = get_architecture("sana_sprint").layouts[0]
    for key, tensor in publisher_state(ours).items():
        for part in layout.parts(key):
            assert torch.equal(part.take(tensor), ours[part.name]), key


@pytest.mark.skipif(find_shared() is None, reason="needs ../shared")
def test_no_other_architecture_is_taken_for_sana(shared):
    files = [f for f in sorted((shared / "reference" / "layouts").glob("*.json")) if "." in f.stem]
    assert files
    for file in files:
        shapes = {key: tuple(shape) for key, shape in json.loads(file.read_text())["keys"].items()}
        for name in ("sana", "sana_sprint"):
            assert get_architecture(name).detect(shapes) is None, file.name


def test_pointwise_convolutions_are_matrices_inside_and_keep_their_published_shape_outside():
    module = PORT.build(SPRINT.config, SPRINT.weights)
    key = "transformer_blocks.0.ff.conv_point.weight"
    assert dict(module.named_parameters())[key].shape == (48, 120)
    assert module.state_dict()[key].shape == SPRINT.weights[key].shape == (48, 120, 1, 1)
    assert torch.equal(module.state_dict()[key], SPRINT.weights[key])
    matrices = {name: value.flatten(1) if name == key else value for name, value in SPRINT.weights.items()}
    assert torch.equal(PORT.build(SPRINT.config, matrices).state_dict()[key], SPRINT.weights[key])
    wrong = SPRINT.weights | {key: torch.zeros(48, 120, 3, 3)}
    with pytest.raises(RuntimeError, match="conv_point"):
        module.load_state_dict(wrong)


def test_linear_attention_does_not_overflow_where_float16_sums_would():
    """4096 tokens whose products are 600 in one channel: their sum is 2.5 million, float16 ends at 65504."""
    q = torch.full((1, 4096, 2, 8), 5.0, dtype=torch.float16)
    k, v = torch.full_like(q, 20.0), torch.full_like(q, 30.0)
    out = linear_attention(q, k, v)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, torch.full((1, 4096, 16), 30.0, dtype=torch.float16))


def test_a_query_that_no_key_answers_gives_zero():
    q, k, v = -torch.ones(1, 3, 1, 4), torch.ones(1, 3, 1, 4), torch.ones(1, 3, 1, 4)
    assert torch.equal(linear_attention(q, k, v), torch.zeros(1, 3, 4))


def test_float16_overflows_on_text_states_that_the_declared_dtypes_take():
    """Gemma 2's states are large; the projection of such a caption leaves float16's range, not bfloat16's."""
    inputs = SPRINT.group("inputs")
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"] * 6e4
    exact = run_ours(PORT.build(SPRINT.config, SPRINT.weights), inputs)
    outputs = {
        dtype: run_ours(PORT.build(SPRINT.config, SPRINT.weights, dtype), dit_checks.cast(inputs, dtype))
        for dtype in (torch.float16, torch.bfloat16)
    }
    assert not outputs[torch.float16].isfinite().all()
    assert rel_err(outputs[torch.bfloat16], exact) <= 0.05
    for name in ("sana", "sana_sprint"):
        assert get_architecture(name).dtypes == ("bfloat16", "float32")


def test_sprint_without_guidance_is_refused():
    inputs = SPRINT.group("inputs")
    del inputs["guidance"]
    with pytest.raises(ValueError, match="guidance_embeds_scale"):
        run_ours(PORT.build(SPRINT.config, SPRINT.weights), inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"cross_attention_dim": 64}, "cross_attention_dim 64"), ({"qk_norm": "layer_norm"}, "qk_norm 'layer_norm'")],
)
def test_configuration_that_does_not_add_up_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        SanaTransformer2DModel(**{**SPRINT.config, **change}, device="meta")


def test_a_mask_may_come_as_numbers():
    module, inputs = PORT.build(SPRINT.config, SPRINT.weights), SPRINT.group("inputs")
    expected = run_ours(module, inputs)
    for dtype in (torch.int64, torch.float32):
        mask = inputs["encoder_attention_mask"].to(dtype)
        assert torch.equal(run_ours(module, inputs | {"encoder_attention_mask": mask}), expected)


@pytest.mark.parametrize("size", [(7, 5), (1, 1)])
def test_a_size_the_patches_do_not_divide_is_padded_and_cropped(size):
    config = {**SPRINT.config, "patch_size": 2}
    module = SanaTransformer2DModel(**config)
    dit_checks.randomise(module)
    inputs = SPRINT.group("inputs")
    x = torch.randn(2, 32, *size)
    rows, columns = -(-size[0] // 2) * 2, -(-size[1] // 2) * 2
    padded = torch.nn.functional.pad(x, (0, columns - size[1], 0, rows - size[0]), mode="replicate")
    out = run_ours(module, inputs | {"hidden_states": x})
    whole = run_ours(module, inputs | {"hidden_states": padded})
    assert out.shape == x.shape and torch.equal(out, whole[..., : size[0], : size[1]])


def test_compiles_into_one_graph():
    dit_checks.check_compiles(PORT, SPRINT)


def test_gradient_checkpointing_recomputes_blocks_and_keeps_gradients():
    dit_checks.check_checkpointing(PORT, SPRINT)


def test_block_patches_see_every_block_and_can_replace_it():
    module, inputs = PORT.build(SPRINT.config, SPRINT.weights), SPRINT.group("inputs")
    expected, seen = run_ours(module, inputs), []

    def replace(args, extra):
        options = args["transformer_options"]
        seen.append((options["block_type"], options["block_index"], options["total_blocks"]))
        return extra["original_block"](args)

    def options(patch):
        return {"patches_replace": {"dit": {("double_block", i): patch for i in range(2)}}}

    assert torch.equal(run_ours(module, inputs, transformer_options=options(replace)), expected)
    assert seen == [("double", i, 2) for i in range(2)]
    skipped = run_ours(module, inputs, transformer_options=options(lambda args, extra: {"img": args["img"]}))
    assert rel_err(skipped, expected) > 0.1


def test_control_residuals_follow_the_reference_one_block_late():
    """The reference adds its first ControlNet sample after the second block; a host puts None before it."""
    inputs = SPRINT.group("inputs")
    sample = torch.randn(2, math.prod(inputs["hidden_states"].shape[-2:]), 48)
    reference = PORT.build_reference(SPRINT.config, SPRINT.weights)
    expected = reference(**inputs, controlnet_block_samples=(sample,)).sample
    ours = run_ours(PORT.build(SPRINT.config, SPRINT.weights), inputs, control={"input": [None, sample]})
    assert rel_err(ours, expected) <= dit_checks.FLOOR
