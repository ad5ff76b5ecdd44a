"""Sampling, patches, memory and text encoders: checks of inside_life.py."""

import comfy.model_detection
import comfy.model_management
import comfy.patcher_extension
import comfy.sample
import comfy.sd
import comfy.utils
import comfyui_version
import core_nodes
import torch
from quant_world import BASE, FORMATS, GRAPH, MODELS, RESULTS, WORST, error, host, load, part, same, saved, with_lora
from safetensors.torch import load_file

TEXTS = BASE / "models" / "text_encoders"
PROMPT = "a red circle above a blue square"
VERSION = tuple(int(number) for number in comfyui_version.__version__.split(".")[:2])


def given(row):
    return load_file(BASE / "inputs" / f"{row}.safetensors")


def sample(patcher, row, *, batch=1, cfg=3.0, steps=3, start=None, denoise=1.0, mask=None):
    """A latent by Euler on the "simple" schedule; prompts of different length."""
    inputs = given(row)
    positive, negative = [[inputs["context"], {}]], [[inputs["context"].flip(1)[:, :3], {}]]
    shape = (batch, *inputs["x"].shape[1:])
    latent = torch.zeros(shape) if start is None else start
    noise = comfy.sample.prepare_noise(latent, 5)
    arguments = (steps, cfg, "euler", "simple", positive, negative, latent)
    return comfy.sample.sample(patcher, noise, *arguments, denoise=denoise, noise_mask=mask, disable_pbar=True, seed=5)


def check_a_batch_is_the_same_pictures_at_once(row):
    batch = sample(load(row), row, batch=2)
    assert batch.std() > 0.1 and error(batch[1], batch[0]) > 1e-2
    assert error(batch[:1], sample(load(row), row)) < 1e-5


def check_image_to_image_keeps_what_a_mask_protects(row):
    start = torch.randn(given(row)["x"].shape, generator=torch.manual_seed(9))
    mask = torch.zeros(1, 1, *start.shape[-2:])
    mask[..., : start.shape[-1] // 2] = 1.0
    whole, masked = (sample(load(row), row, start=start, denoise=0.6, mask=part) for part in (None, mask))
    left, right = (slice(None, start.shape[-1] // 2), slice(start.shape[-1] // 2, None))
    assert error(masked[..., right], start[..., right]) < 1e-5
    assert error(masked[..., left], start[..., left]) > 1e-2
    assert 1e-2 < error(whole, start) < error(sample(load(row), row, start=start), start)


def check_patches_of_other_packs_see_every_block(row):
    counts, seen = {}, set()
    patched = load(row).clone()
    blocks = len(repeated(patched.model.diffusion_model))

    def count(name):
        counts[name] = counts.get(name, 0) + 1

    def replace(args, extra):
        count("replaced")
        assert {"img", "txt", "vec", "transformer_options"} <= set(args)
        assert "pe" in args or row == "sana"  # which has no positions to rotate by
        return extra["original_block"](args)

    def after(args):
        count("after")
        return {"img": args["img"]}

    def wrapper(executor, *args, **kwargs):
        count("wrapper")
        return executor(*args, **kwargs)

    def attention(original, *args, **kwargs):
        options = kwargs["transformer_options"]
        seen.add((options["block_type"], options["block_index"], options["total_blocks"]))
        return original(*args, **kwargs)

    patched.set_model_patch_replace(replace, "dit", "double_block", 1)
    patched.set_model_patch(after, "double_block")
    patched.add_wrapper(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, wrapper)
    patched.model_options["transformer_options"]["optimized_attention_override"] = attention
    assert torch.equal(sample(patched, row, cfg=1.0), sample(load(row), row, cfg=1.0))
    assert counts == {"replaced": 3, "after": 3 * blocks, "wrapper": 3}, counts
    assert seen == {("double", i, blocks) for i in range(blocks)}, seen


def check_cores_caches_of_steps_skip_some(row):
    core_nodes.check_step_caches(lambda: load(row), lambda model: sample(model, row, cfg=1.0, steps=core_nodes.STEPS))
    core_nodes.check_a_wrapper_may_write_into_its_input(lambda: load(row), lambda model: sample(model, row, cfg=1.0))


def check_cores_renormalized_guidance_finds_its_channels(row):
    core_nodes.check_renormalized_guidance(lambda: load(row), lambda model: sample(model, row))


def repeated(module):
    return [child for child in module.modules() if type(child).__name__ in module.repeated_blocks]


def apply(model, row):
    """The denoised latent at one sigma."""
    inputs = given(row)
    with torch.inference_mode():
        return model.apply_model(
            inputs["x"], torch.tensor([0.7]), c_crossattn=inputs["context"], transformer_options={}
        )


def check_half_offloaded_layers_get_their_lora_too(row):
    cpu = torch.device("cpu")
    plain, full, half = load(row), with_lora(load(row)), with_lora(load(row))
    for patcher in (plain, full):
        patcher.patch_model(device_to=cpu)
    half.patch_model(device_to=cpu, lowvram_model_memory=half.model_size() // 2)
    assert half.model.model_lowvram
    assert error(apply(half.model, row), apply(full.model, row)) < 1e-4
    assert error(apply(full.model, row), apply(plain.model, row)) > 1e-2


def check_weights_that_do_not_exist_before_loading_are_fine(row):
    """Since 0.33 layers have none when the dynamic memory manager runs; here only its way of loading is simulated."""
    if VERSION < (0, 33):
        return
    import comfy.memory_management

    quantized = BASE / "output" / f"lazy_{row}.safetensors"
    part("checkpoints.quantize").quantize(MODELS / f"{row}.safetensors", quantized, format="float8_e4m3fn")
    for path in (MODELS / f"{row}.safetensors", quantized):
        plain = comfy.sd.load_diffusion_model(str(path))
        plain.patch_model(device_to=torch.device("cpu"))
        weights = comfy.utils.load_torch_file(str(path))
        comfy.memory_management.aimdo_enabled = True
        try:
            config = comfy.model_detection.model_config_from_unet(weights, "")
            config.set_inference_dtype(torch.float32, torch.float32)
            config.quant_config = comfy.utils.detect_layer_quantization(weights, "")
            model = config.get_model(weights, "")
            lazy = [layer for layer in model.diffusion_model.modules() if isinstance(layer, torch.nn.Linear)]
            assert all(layer.weight is None for layer in lazy)
            assert lazy or path == quantized
            model.load_model_weights(weights, "", assign=True)
        finally:
            comfy.memory_management.aimdo_enabled = False
        assert error(apply(model, row), apply(plain.model, row)) < 1e-5


def weight_shapes(patcher):
    """What a LoRA is held against, which is told of weights in any format."""
    shape = part("bridge.lora_shapes").weight_shape
    return {key: shape(patcher.model, key) for key in patcher.model.state_dict() if key.endswith(".weight")}


def check_a_model_in_every_format_by_cores_loader_and_saved(row):
    """Quantized by the command, loaded by ComfyUI's loader, sampled, saved as stored, loaded and sampled again."""
    plain, shapes, found = sample(load(row), row, cfg=1.0), weight_shapes(load(row)), {}
    assert None not in shapes.values()
    for name in FORMATS:
        path = BASE / "output" / f"{row}_{name}.safetensors"
        report = part("checkpoints.quantize").quantize(MODELS / f"{row}.safetensors", path, format=name)
        assert len(report.quantized) > 10, name
        model = comfy.sd.load_diffusion_model(str(path))
        assert {key: weight_shapes(model)[key] for key in shapes} == shapes, name
        latent = sample(model, row, cfg=1.0)
        found[name] = error(latent, plain)
        assert 0 < found[name] < WORST.get(name, 0.1), found
        target, again = saved(model, f"saved_{row}_{name}")
        assert torch.equal(sample(again, row, cfg=1.0), latent), name
        target.unlink()
        path.unlink()
    RESULTS[f"latent errors {row}"] = found


def check_quantizing_in_the_graph_is_quantizing_on_load(row):
    in_graph = host.quantize_model(load(row), precision=FORMATS[0])
    latents = (sample(model, row, cfg=1.0, steps=1) for model in (in_graph, load(row, FORMATS[0])))
    assert error(*latents) < 1e-5


def check_a_baked_lora_is_the_lora_at_run_time(row):
    patched = with_lora(load(row))
    wanted = sample(patched, row)
    target, again = saved(patched, f"baked_{row}")
    assert error(sample(again, row), wanted) < 1e-5
    assert error(wanted, sample(load(row), row)) > 1e-2
    target.unlink()


def encoded(clip):
    [[states, _]] = clip.encode_from_tokens_scheduled(clip.tokenize(PROMPT))
    return states.float()


def check_a_text_encoder_in_every_format_from_both_loaders_and_saved(row):
    """Quantized by the command, loaded by our node and by ComfyUI's, saved with no bit changed."""
    plain = encoded(host.load_text_encoder(f"{row}.safetensors", architecture=row))
    found = {}
    for name in FORMATS:
        target = TEXTS / f"{row}_{name}.safetensors"
        report = part("checkpoints.quantize").quantize(
            TEXTS / f"{row}.safetensors", target, format=name, policy={"min_weights": 10000}
        )
        assert len(report.quantized) > 10, name
        clip = host.load_text_encoder(target.name, architecture=row)
        states = encoded(clip)
        found[name] = error(states, plain)
        assert 0 < found[name] < 2 * WORST.get(name, 0.1), found  # ten layers of T5, whose scores have no scale
        cores = comfy.sd.load_clip([str(target)], clip_type=comfy.sd.CLIPType.STABLE_DIFFUSION)
        assert torch.equal(encoded(cores), states), name
        [written] = host.save_text_encoder(clip, prefix=f"test/{row}_{name}", graph=GRAPH)
        stored = {key: value for key, value in load_file(written.path).items() if key != "text_encoder_config"}
        same(stored, load_file(target))
        target.unlink()
    RESULTS[f"text errors {row}"] = found
