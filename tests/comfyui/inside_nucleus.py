"""Nucleus-Image inside ComfyUI's Python; test_nucleus.py makes a test of each check.

Run as `python inside_nucleus.py COMFYUI BASE FILE`. BASE/models/diffusion_models holds a tiny model in the published
layout, in ours and quantized; BASE/expected.safetensors the inputs, and what the modules outside of ComfyUI make of
them. Results go to FILE as JSON, {check: "" or the traceback}.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import sys
import time
import traceback
from pathlib import Path

COMFYUI, BASE, OUTPUT = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
sys.argv = ["main.py", "--cpu", "--base-directory", str(BASE)]
sys.path.insert(0, str(COMFYUI))

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_detection  # noqa: E402
import comfy.model_management  # noqa: E402
import comfy.ops  # noqa: E402
import comfy.patcher_extension  # noqa: E402
import comfy.quant_ops  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import comfy_api.latest  # noqa: E402, F401
import core_nodes  # noqa: E402
import folder_paths  # noqa: E402
import torch  # noqa: E402
from comfy_api.torch_helpers import set_torch_compile_wrapper  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

torch.set_num_threads(1)
folder_paths.set_output_directory(str(BASE / "output"))
PACK = BASE / "custom_nodes" / "ComfyUI-NativeDiT"
MODELS = BASE / "models" / "diffusion_models"
EXPECTED = load_file(BASE / "expected.safetensors")
HAS_BANKS = "MoEExperts" in inspect.getsource(comfy.ops)
FORMATS = [key.removeprefix("output.") for key in EXPECTED if key.startswith("output.")]

PUBLISHED = comfy.utils.load_torch_file(str(MODELS / "published.safetensors"))
CORE_SAYS = comfy.model_detection.detect_unet_config(PUBLISHED, "")

NAME = str(PACK).replace(".", "_x_")
spec = importlib.util.spec_from_file_location(NAME, PACK / "__init__.py")
package = importlib.util.module_from_spec(spec)
sys.modules[NAME] = package
spec.loader.exec_module(package)
NODES = {node.__name__: node for node in asyncio.run(asyncio.run(package.comfy_entrypoint()).get_node_list())}
host = importlib.import_module(f"{NAME}.host").current_host()


def load(name):
    return comfy.sd.load_diffusion_model(str(MODELS / f"{name}.safetensors"))


@torch.no_grad()
def output(patcher):
    comfy.model_management.load_models_gpu([patcher])
    model = patcher.model.diffusion_model
    given = (EXPECTED["x"], EXPECTED["timesteps"], EXPECTED["context"], EXPECTED["mask"])
    return model(*given, transformer_options={}).float()


def error(value, reference):
    return float((value - reference).norm() / reference.norm())


def conditions():
    return [[[EXPECTED["context"][:1], {}]], [[EXPECTED["context"][1:, :3], {}]]]


def readable_formats():
    """Those whose layers and banks this ComfyUI holds."""
    known = comfy.quant_ops.QUANT_ALGOS
    formats = {name: name.partition(":")[0].replace("int8_convrot", "int8_tensorwise") for name in FORMATS}
    return [name for name, stored in formats.items() if HAS_BANKS and stored in known]


def sample(patcher, cfg=4.0, steps=4, latent=None, noise=None, denoise=1.0, mask=None):
    latent = torch.zeros(1, 16, 1, 8, 12) if latent is None else latent
    noise = comfy.sample.prepare_noise(latent, 3) if noise is None else noise
    positive, negative = conditions()
    # 4: so many steps that ComfyUI's table of 1000 sigmas holds them exactly.
    arguments = (steps, cfg, "euler", "simple", positive, negative, latent)
    options = {"denoise": denoise, "noise_mask": mask, "disable_pbar": True, "seed": 3}
    return comfy.sample.sample(patcher, noise, *arguments, **options)


def check_core_mistakes_the_file_and_the_pack_does_not():
    assert CORE_SAYS is not None and CORE_SAYS["image_model"] == "qwen_image"
    found = comfy.model_detection.detect_unet_config(PUBLISHED, "")
    assert found["image_model"] == "nativedit_nucleus_image", found
    assert type(load("published").model).__name__ == "NativeDiTModel"


def check_the_published_layout_computes_as_outside_of_comfyui():
    assert error(output(load("published")), EXPECTED["plain"]) < 2e-6


def check_our_layout_computes_the_same():
    assert error(output(load("ours")), EXPECTED["plain"]) < 2e-6


def check_every_format_computes_as_outside_of_comfyui():
    if not HAS_BANKS:
        try:
            load("float8_e4m3fn")
        except ValueError as problem:
            assert "can't hold a quantized" in str(problem), problem
        else:
            raise AssertionError("a bank that this ComfyUI can't hold was loaded")
        return
    found = {}
    for name in readable_formats():
        patcher = load(name)
        bank = patcher.model.diffusion_model.transformer_blocks[3].img_mlp.experts.down_proj
        assert isinstance(bank.weight, comfy.quant_ops.QuantizedTensor), name
        value = output(patcher)
        found[name] = [error(value, EXPECTED["output." + name]), error(value, EXPECTED["plain"])]
    print(json.dumps(found, indent=1))
    assert found
    # Linear layers multiply integers here, which rounds their inputs; experts choose other tokens for less.
    assert all(own < 0.3 for own, _ in found.values()), found


def check_a_bank_takes_a_patch_and_gives_it_back():
    patcher = load("published")
    before = output(patcher)
    key = "diffusion_model.transformer_blocks.3.img_mlp.experts.down_proj.weight"
    weight = comfy.utils.get_attr(patcher.model, key)
    patched = patcher.clone()
    assert patched.add_patches({key: ("diff", (torch.ones(weight.shape) * 0.05,))}, 1.0)
    assert error(output(patched), before) > 1e-4
    assert torch.equal(output(patcher), before)


def check_a_sampled_picture_is_finite_and_follows_the_guidance():
    patcher = load("published")
    plain = sample(patcher)
    guided = sample(NODES["NativeDiTPatchRenormalizedGuidance"].execute(patcher).result[0])
    assert plain.shape == guided.shape == (1, 16, 1, 8, 12)
    assert plain.isfinite().all() and guided.isfinite().all() and error(guided, plain) > 1e-3
    assert error(guided, EXPECTED["sampled"]) < 1e-4, error(guided, EXPECTED["sampled"])


def check_an_empty_latent_of_four_dimensions_becomes_a_picture():
    patcher = load("published")
    latent = comfy.sample.fix_empty_latent_channels(patcher, torch.zeros(1, 4, 8, 12))
    assert latent.shape == (1, 16, 1, 8, 12)
    made = host.empty_latent(patcher, width=96, height=64, batch_size=2)["samples"]
    assert made.shape == (2, 16, 1, 8, 12)


def check_a_saved_model_reloads_in_cores_loader():
    for name in ("published", *readable_formats()):
        patcher = load(name)
        expected = output(patcher)
        graph = importlib.import_module(f"{NAME}.host").Graph({"1": {"class_type": "X", "inputs": {}}}, {})
        path = Path(host.save_diffusion_model(patcher, prefix="test/saved", graph=graph).path)
        saved = load_file(path)
        key = "transformer_blocks.3.img_mlp.experts.gate_up_proj.weight"
        assert any(found.endswith(key) for found in saved), list(saved)[:5]
        markers = [found for found in saved if found.endswith(".experts.gate_up_proj.comfy_quant")]
        assert len(markers) == (0 if name == "published" else 2), (name, markers)
        assert error(output(comfy.sd.load_diffusion_model(str(path))), expected) < 2e-6, name
        path.unlink()


def check_cores_own_view_of_an_expert_is_ours():
    """What we write is right in ComfyUI's own bank too, whose int8 view forgets a rotation."""
    for name in readable_formats():
        module = load(name).model.diffusion_model
        for bank in ("gate_up_proj", "down_proj"):
            bank = module.transformer_blocks[4].img_mlp.experts.get_submodule(bank)
            x = torch.randn(bank.num_experts, 3, bank.in_features, generator=torch.manual_seed(0))
            own = bank(x)
            for expert in (0, bank.num_experts - 1):
                assert error(x[expert] @ bank.expert_weight(expert).dequantize().float().t(), own[expert]) < 1e-2, name


def check_a_batch_is_the_same_pictures_at_once():
    """Experts choose among the tokens of one picture, whoever else is in the batch."""
    latent = torch.zeros(2, 16, 1, 8, 12)
    both = sample(load("ours"), latent=latent)
    noise = comfy.sample.prepare_noise(latent, 3)
    for row in (0, 1):
        alone = sample(load("ours"), latent=latent[:1], noise=noise[row : row + 1])
        assert error(both[row : row + 1], alone) < 1e-5


def check_image_to_image_keeps_what_a_mask_protects():
    start = torch.randn(1, 16, 1, 8, 12, generator=torch.manual_seed(9))
    mask = torch.zeros(1, 1, 8, 12)
    mask[..., :6] = 1.0
    whole, masked = (sample(load("ours"), latent=start, denoise=0.5, mask=part) for part in (None, mask))
    assert error(masked[..., 6:], start[..., 6:]) < 1e-5 and error(masked[..., :6], start[..., :6]) > 1e-2
    assert 1e-2 < error(whole, start) < error(sample(load("ours"), latent=start), start)


def check_patches_of_other_packs_see_every_block():
    patched, counts, seen = load("ours").clone(), {}, set()

    def count(name, value):
        counts[name] = counts.get(name, 0) + 1
        return value

    def attention(original, *args, **kwargs):
        options = kwargs["transformer_options"]
        seen.add((options["block_type"], options["block_index"], options["total_blocks"]))
        return original(*args, **kwargs)

    wrap = comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL
    patched.set_model_patch_replace(
        lambda args, extra: count("replaced", extra["original_block"](args)), "dit", "double_block", 3
    )
    patched.set_model_patch(lambda args: count("after", {"img": args["img"]}), "double_block")
    patched.add_wrapper(wrap, lambda executor, *args, **kwargs: count("wrapper", executor(*args, **kwargs)))
    patched.model_options["transformer_options"]["optimized_attention_override"] = attention
    assert torch.equal(sample(patched, cfg=1.0), sample(load("ours"), cfg=1.0))
    assert counts == {"replaced": 4, "after": 20, "wrapper": 4}, counts
    if "optimized_attention_override" in inspect.getsource(importlib.import_module("comfy.ldm.modules.attention")):
        assert seen == {("double", i, 5) for i in range(5)}, seen


def check_cores_own_nodes_that_reach_into_a_model():
    core_nodes.check_step_caches(lambda: load("ours"), lambda model: sample(model, cfg=1.0, steps=core_nodes.STEPS))
    core_nodes.check_a_wrapper_may_write_into_its_input(lambda: load("ours"), lambda model: sample(model, cfg=1.0))
    core_nodes.check_renormalized_guidance(lambda: load("ours"), sample)


def check_a_compiled_block_with_experts_gives_the_same_latent():
    compiled = load("ours").clone()
    block = "diffusion_model.transformer_blocks.3"
    set_torch_compile_wrapper(compiled, backend="eager", fullgraph=False, keys=[block])
    assert error(sample(compiled, cfg=1.0, steps=1), sample(load("ours"), cfg=1.0, steps=1)) < 1e-5


def lora(spelling, strength=0.3):
    """On the layers that trainers reach: attention, dense feed-forwards and shared experts."""
    generator, tensors = torch.manual_seed(3), {}
    for key, weight in load_file(MODELS / "ours.safetensors").items():
        if weight.ndim == 2 and (".attn.to_" in key or ".net." in key) and key.endswith(".weight"):
            name = spelling.format(key.removesuffix(".weight"))
            tensors[f"{name}.lora_A.weight"] = torch.randn(2, weight.shape[1], generator=generator) / 16
            tensors[f"{name}.lora_B.weight"] = torch.randn(weight.shape[0], 2, generator=generator) * strength
    return tensors


def with_lora(name, spelling="diffusion_model.{}"):
    tensors = lora(spelling)
    patched, _ = comfy.sd.load_lora_for_models(load(name), None, tensors, 1.0, 1.0)
    assert len(patched.patches) == len(tensors) // 2, (spelling, len(patched.patches))
    return patched


def check_loras_of_every_spelling_are_the_merged_weights():
    merged = load_file(MODELS / "ours.safetensors")
    tensors = lora("{}")
    for key in [key for key in tensors if key.endswith("lora_A.weight")]:
        layer = key.removesuffix(".lora_A.weight")
        merged[layer + ".weight"] += tensors[layer + ".lora_B.weight"] @ tensors[key]
    save_file(merged, MODELS / "merged.safetensors")
    expected = output(load("merged"))
    assert error(output(load("ours")), expected) > 1e-2
    for spelling in ("diffusion_model.{}", "transformer.{}", "{}"):
        assert error(output(with_lora("published", spelling)), expected) < 1e-4, spelling


def apply(model):
    """The denoised latent at one sigma."""
    with torch.inference_mode():
        return model.apply_model(
            EXPECTED["x"], torch.full((2,), 0.7), c_crossattn=EXPECTED["context"], transformer_options={}
        )


def check_half_offloaded_banks_and_loras_give_the_same():
    cpu = torch.device("cpu")
    for name in ("ours", "float8_e4m3fn") if HAS_BANKS else ("ours",):
        full, half = with_lora(name), with_lora(name)
        full.patch_model(device_to=cpu)
        half.patch_model(device_to=cpu, lowvram_model_memory=half.model_size() // 2)
        assert half.model.model_lowvram
        assert error(apply(half.model), apply(full.model)) < (1e-4 if name == "ours" else 0.1), name


def check_weights_that_do_not_exist_before_loading_are_fine():
    """Since 0.33 layers have none when the dynamic memory manager runs; here only its way of loading is simulated."""
    if "aimdo_enabled" not in inspect.getsource(comfy.ops):
        return
    for name in ("ours", "published", *readable_formats()):
        expected = load(name)
        comfy.model_management.load_models_gpu([expected])
        weights = comfy.utils.load_torch_file(str(MODELS / f"{name}.safetensors"))
        comfy.memory_management.aimdo_enabled = True
        try:
            config = comfy.model_detection.model_config_from_unet(weights, "")
            config.set_inference_dtype(torch.float32, torch.float32 if name in FORMATS else None)
            if name in FORMATS:
                config.quant_config = comfy.utils.detect_layer_quantization(weights, "")
            model = config.get_model(weights, "")
            assert model.diffusion_model.transformer_blocks[3].img_mlp.experts.down_proj.weight is None
            model.load_model_weights(weights, "", assign=True)
        finally:
            comfy.memory_management.aimdo_enabled = False
        assert error(apply(model), apply(expected.model)) < 1e-5, name


CHECKS = {name: value for name, value in list(globals().items()) if name.startswith("check_")}
RESULTS = {}
for name, check in CHECKS.items():
    start = time.process_time()
    try:
        check()
        RESULTS[name] = ""
    except Exception:
        RESULTS[name] = traceback.format_exc()
    print(f"{name}: {time.process_time() - start:.1f} s")
OUTPUT.write_text(json.dumps(RESULTS))
