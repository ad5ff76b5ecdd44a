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
import comfy.quant_ops  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import comfy_api.latest  # noqa: E402, F401
import folder_paths  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

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


def sample(patcher, cfg=4.0, latent=None):
    latent = torch.zeros(1, 16, 1, 8, 12) if latent is None else latent
    noise = comfy.sample.prepare_noise(latent, 3)
    positive, negative = conditions()
    arguments = (
        4,
        cfg,  # so many steps that ComfyUI's table of 1000 sigmas holds them exactly
        "euler",
        "simple",
        positive,
        negative,
        latent,
    )
    return comfy.sample.sample(patcher, noise, *arguments, denoise=1.0, disable_pbar=True, seed=3)


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
    for name in FORMATS:
        if name.partition(":")[0].replace("int8_convrot", "int8_tensorwise") not in comfy.quant_ops.QUANT_ALGOS:
            continue
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
    for name in ("published", "float8_e4m3fn") if HAS_BANKS else ("published",):
        patcher = load(name)
        expected = output(patcher)
        graph = importlib.import_module(f"{NAME}.host").Graph({"1": {"class_type": "X", "inputs": {}}}, {})
        path = Path(host.save_diffusion_model(patcher, prefix=f"test/{name}", graph=graph).path)
        saved = load_file(path)
        key = "transformer_blocks.3.img_mlp.experts.gate_up_proj.weight"
        assert any(found.endswith(key) for found in saved), list(saved)[:5]
        assert error(output(comfy.sd.load_diffusion_model(str(path))), expected) < 2e-6, name


CHECKS = {name: value for name, value in list(globals().items()) if name.startswith("check_")}
RESULTS = {}
for name, check in CHECKS.items():
    try:
        check()
        RESULTS[name] = ""
    except Exception:
        RESULTS[name] = traceback.format_exc()
OUTPUT.write_text(json.dumps(RESULTS))
