"""PRX and PRXPixel beside diffusers' PRXTransformer2DModel 0.42.1."""

import dit_checks
import pytest
import torch
from dit_checks import Port
from support import golden_cases, rel_err

from nativedit.ldm.layers.embeddings import grid_rope
from nativedit.ldm.prx.model import PRXTransformer2DModel
from nativedit.supported_models import find_architecture, get_architecture

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("single_thread")

TARGETS = golden_cases("prx", role="target") + golden_cases("prx_pixel", role="target")
INVARIANCE = golden_cases("prx", role="invariance") + golden_cases("prx_pixel", role="invariance")
BY_NAME = {golden.folder.name: golden for golden in TARGETS}


def run_ours(module, inputs):
    return module(
        inputs["hidden_states"], inputs["timestep"], inputs["encoder_hidden_states"], inputs.get("attention_mask")
    )


PORT = Port(
    ours=PRXTransformer2DModel,
    reference=diffusers.PRXTransformer2DModel,
    run_ours=run_ours,
    run_reference=lambda module, inputs: module(**inputs).sample,
    stages={
        "patch_embed": "img_in",
        "text_embed": "txt_in",
        "time_embed": "time_in",
        "resolution_embed": "resolution_embedder",
        "block_first_attn": "blocks.0.attention",
        "block_first": "blocks.0",
        "final_layer": "final_layer",
    },
    reshape={"block_first": lambda out: out["img"]},
)

PUBLISHED = {
    "prx": ({}, 188, 1_170_691_648),
    "prx_pixel": (
        {
            "in_channels": 3,
            "patch_size": 16,
            "context_in_dim": 2048,
            "hidden_size": 3584,
            "num_heads": 28,
            "depth": 24,
            "axes_dim": [64, 64],
            "bottleneck_size": 768,
            "resolution_embeds": True,
        },
        282,
        7_003_535_872,
    ),
}


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_output_equals_the_recording_and_the_reference(golden):
    dit_checks.check_golden(PORT, golden)


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_stages_equal_the_recording(golden):
    dit_checks.check_stages(PORT, golden)


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_rotary_table_equals_the_recording(golden):
    recorded = golden.io["stages.rope"][0, 0]  # [L, head_dim / 2, 2, 2], a rotation matrix per pair
    module = PORT.build(golden.config, golden.weights)
    height, width = golden.io["inputs.hidden_states"].shape[-2:]
    sizes = (height // module.patch_size, width // module.patch_size)
    ours = grid_rope(sizes, module.axes_dim, module.theta, torch.device("cpu"))
    assert rel_err(ours[..., 0], recorded[..., 0, 0]) <= 1e-6
    assert rel_err(ours[..., 1], recorded[..., 1, 0]) <= 1e-6


@pytest.mark.parametrize("golden", INVARIANCE, ids=str)
def test_padding_and_batching_do_not_leak(golden):
    dit_checks.check_invariance(PORT, golden, BY_NAME[golden.meta["invariance"]["of"].split("/")[-1]])


@pytest.mark.parametrize("golden", TARGETS, ids=str)
def test_bfloat16_loses_no_more_than_the_references_twice(golden):
    dit_checks.check_bfloat16(PORT, golden)


def random_inputs(config, batch, height, width, length, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(batch, length, generator=generator) > 0.4
    return {
        "hidden_states": torch.randn(batch, config["in_channels"], height, width, generator=generator),
        "timestep": torch.rand(batch, generator=generator),
        "encoder_hidden_states": torch.randn(batch, length, config["context_in_dim"], generator=generator),
        "attention_mask": mask,
    }


@pytest.mark.parametrize("seed", range(4))
def test_random_latent_configurations_equal_the_reference(seed):
    heads, head_dim = (3, 2, 4, 1)[seed], (16, 32, 8, 64)[seed]
    config = {
        "in_channels": (16, 32, 4, 16)[seed],
        "patch_size": (2, 1, 2, 4)[seed],
        "context_in_dim": 24 + seed,
        "hidden_size": heads * head_dim,
        "mlp_ratio": (3.5, 2.0, 4.0, 1.5)[seed],
        "num_heads": heads,
        "depth": 1 + seed,
        "axes_dim": [head_dim // 4, 3 * head_dim // 4],
        "theta": (10000, 500, 10000, 100)[seed],
    }
    dit_checks.check_random(PORT, config, random_inputs(config, 2, 8, 16, 5, seed), seed)


@pytest.mark.parametrize("seed", range(3))
def test_random_pixel_configurations_equal_the_reference(seed):
    heads, head_dim = (3, 2, 4)[seed], (16, 32, 8)[seed]
    config = {
        "in_channels": 3,
        "patch_size": (8, 16, 4)[seed],
        "context_in_dim": 20,
        "hidden_size": heads * head_dim,
        "mlp_ratio": 3.0,
        "num_heads": heads,
        "depth": 2,
        "axes_dim": [head_dim // 2, head_dim // 2],
        "bottleneck_size": 12 + seed,
        "resolution_embeds": True,
    }
    dit_checks.check_random(PORT, config, random_inputs(config, 1 + seed, 48, 32, 6, seed), seed)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layout_loads_strictly_at_full_size(name):
    config, keys, parameters = PUBLISHED[name]
    with torch.device("meta"):
        reference = diffusers.PRXTransformer2DModel(**config)
    state = reference.state_dict()
    assert len(state) == keys and sum(v.numel() for v in state.values()) == parameters
    ours = PRXTransformer2DModel(**config, device="meta")
    result = ours.load_state_dict(state, strict=True, assign=True)
    assert not result.missing_keys and not result.unexpected_keys


def test_published_pixel_config_is_read_from_shapes():
    config = PUBLISHED["prx_pixel"][0]
    state = PRXTransformer2DModel(**config, device="meta").state_dict()
    match = find_architecture({key: tuple(value.shape) for key, value in state.items()})
    assert match.architecture.name == "prx_pixel"
    assert match.config == {k: v for k, v in config.items() if k != "axes_dim"} | {"mlp_ratio": 3.5}


def test_trainer_layout_is_recognised_and_renamed_to_ours():
    config = PUBLISHED["prx_pixel"][0]
    ours = PRXTransformer2DModel(**config, device="meta").state_dict()
    backwards = {
        "attention.img_qkv_proj": "img_qkv_proj",
        "attention.txt_kv_proj": "txt_kv_proj",
        "attention.norm_q.weight": "qk_norm.query_norm.scale",
        "attention.norm_k.weight": "qk_norm.key_norm.scale",
        "attention.norm_added_k.weight": "k_norm.scale",
        "attention.to_out.0": "attn_out",
    }

    def trainer(key):
        for ours_part, theirs in backwards.items():
            key = key.replace(ours_part, theirs)
        return "state.model.denoiser." + key

    theirs = {trainer(key): tuple(value.shape) for key, value in ours.items()}
    match = find_architecture(theirs)
    assert match.architecture.name == "prx_pixel" and match.layout.name == "trainer"
    assert {match.rename(key) for key in theirs} == set(ours)


def test_no_text_at_all_equals_text_that_is_all_masked():
    golden = BY_NAME["pixel"]
    module = PORT.build(golden.config, golden.weights)
    inputs = golden.group("inputs")
    masked = run_ours(module, inputs | {"attention_mask": torch.zeros_like(inputs["attention_mask"])})
    context = inputs["encoder_hidden_states"][:, :0]
    none = module(inputs["hidden_states"], inputs["timestep"], context)
    empty = module(inputs["hidden_states"], inputs["timestep"], context, inputs["attention_mask"][:, :0])
    assert masked.isfinite().all()
    assert rel_err(none, masked) <= 1e-6 and rel_err(empty, masked) <= 1e-6


def test_a_mask_may_come_as_numbers():
    golden = BY_NAME["pixel"]
    module, inputs = PORT.build(golden.config, golden.weights), golden.group("inputs")
    expected = run_ours(module, inputs)
    for dtype in (torch.int64, torch.float32):
        assert torch.equal(run_ours(module, inputs | {"attention_mask": inputs["attention_mask"].to(dtype)}), expected)


@pytest.mark.parametrize("size", [(33, 47), (16, 31), (1, 1)])
def test_a_size_the_patches_do_not_divide_is_padded_and_cropped(size):
    golden = BY_NAME["pixel"]
    module, inputs = PORT.build(golden.config, golden.weights), golden.group("inputs")
    x = torch.randn(2, 3, *size)
    out = run_ours(module, inputs | {"hidden_states": x})
    rows, columns = -(-size[0] // 16) * 16, -(-size[1] // 16) * 16
    padded = torch.nn.functional.pad(x, (0, columns - size[1], 0, rows - size[0]), mode="replicate")
    whole = run_ours(module, inputs | {"hidden_states": padded})
    assert out.shape == x.shape and torch.equal(out, whole[..., : size[0], : size[1]])


def test_compiles_into_one_graph():
    dit_checks.check_compiles(PORT, BY_NAME["pixel"])


def test_gradient_checkpointing_recomputes_blocks_and_keeps_gradients():
    dit_checks.check_checkpointing(PORT, BY_NAME["pixel"])


def test_block_patches_see_every_block_and_can_replace_it():
    golden = BY_NAME["masked"]
    module, inputs = PORT.build(golden.config, golden.weights), golden.group("inputs")
    expected, seen = run_ours(module, inputs), []

    def replace(args, extra):
        options = args["transformer_options"]
        seen.append((options["block_type"], options["block_index"], options["total_blocks"]))
        return extra["original_block"](args)

    def options(patch):
        return {"patches_replace": {"dit": {("single_block", i): patch for i in range(3)}}}

    def run(transformer_options):
        return module(
            inputs["hidden_states"],
            inputs["timestep"],
            inputs["encoder_hidden_states"],
            inputs["attention_mask"],
            transformer_options=transformer_options,
        )

    assert torch.equal(run(options(replace)), expected)
    assert seen == [("single", i, 3) for i in range(3)]
    skipped = run(options(lambda args, extra: {"img": args["img"]}))
    assert rel_err(skipped, expected) > 0.1
    after = run({"patches": {"single_block": [lambda args: {"img": args["img"] * 0.0}]}})
    assert rel_err(after, expected) > 0.1
    given = {"patches": {}}
    run(given)
    assert given == {"patches": {}}, "the host's options are copied, not written to"


def test_control_residuals_are_added_to_image_tokens():
    golden = BY_NAME["masked"]
    module, inputs = PORT.build(golden.config, golden.weights), golden.group("inputs")
    expected = run_ours(module, inputs)
    tokens = 12 * 20 // 4
    zero = torch.zeros(2, tokens, 48)
    call = (inputs["hidden_states"], inputs["timestep"], inputs["encoder_hidden_states"], inputs["attention_mask"])
    assert torch.equal(module(*call, control={"output": [zero, None]}), expected)
    assert rel_err(module(*call, control={"output": [torch.randn_like(zero)]}), expected) > 0.01


def test_configuration_that_does_not_add_up_is_refused():
    with pytest.raises(ValueError, match="axes_dim"):
        PRXTransformer2DModel(hidden_size=48, num_heads=3, axes_dim=[8, 4], device="meta")


def test_sampling_facts_of_the_card():
    card = get_architecture("prx_pixel")
    assert (card.sampling.prediction, card.sampling.shift, card.sampling.noise_scale) == ("x0", 3.0, 2.0)
