"""How the pack gets along with ComfyUI's code and with other packs: checks that run inside ComfyUI's Python, in one
process and in this order, before those of inside_models.py; test_inside.py makes a test of each.

Run as `python inside.py COMFYUI BASE FILE`: results go to FILE as JSON, {check: "" or the traceback}. It imports the
pack as ComfyUI does, from BASE/custom_nodes.
"""

import compileall
import inspect
import json
import sys
import time
import traceback
from pathlib import Path

# Before anything that imports comfy.
from inside_world import (
    BASE,
    LOG,
    OUTPUT,
    PACK,
    RECORDED,
    STATE,
    TINY,
    load_pack,
    model_call,
    node_list,
    part,
    quantized,
    state_dict,
    with_lora,
)

# isort: split
import comfy.lora
import comfy.model_detection
import comfy.sample
import comfy.sd
import comfy.supported_models
import comfyui_version
import torch

CORE_VERDICT = {}


def foreign_wrapper(owner, name):
    """What another pack may do: no functools.wraps, whatever arguments come, and it notes them."""
    original = getattr(owner, name)

    def foreign(*args, **kwargs):
        RECORDED.append((name, args, kwargs))
        return original(*args, **kwargs)

    setattr(owner, name, foreign)


HOOKED = [
    (comfy.model_detection, "detect_unet_config"),
    (comfy.sd, "load_text_encoder_state_dicts"),
    (comfy.lora, "model_lora_keys_unet"),
    (comfy.lora, "model_lora_keys_clip"),
    (comfy.lora, "load_lora"),
    (comfy.sd.VAE, "__init__"),
]


def check_comfyui_does_not_know_our_layout():
    assert comfy.model_detection.detect_unet_config(state_dict(), "") is None


def check_registering_imports_no_model():
    core_detect = comfy.model_detection.detect_unet_config

    def core(state_dict, key_prefix, *args, **kwargs):  # a future version with more arguments
        RECORDED.append(("core", args, kwargs))
        return CORE_VERDICT.get("answer") or core_detect(state_dict, key_prefix)

    comfy.model_detection.detect_unet_config = core
    for owner, name in HOOKED:
        foreign_wrapper(owner, name)
    STATE["routes"] = routes()
    compileall.compile_dir(PACK, quiet=2)  # a user pays for that once
    before, start = set(sys.modules), time.process_time()
    STATE["pack"] = load_pack(PACK)
    STATE["nodes"] = node_list(STATE["pack"])
    for node in STATE["nodes"]:
        node.GET_SCHEMA()
    STATE["seconds"] = time.process_time() - start
    new = set(sys.modules) - before
    heavy = {name.split(".")[0] for name in new} & {
        "diffusers",
        "transformers",
        "sentencepiece",
        "huggingface_hub",
        "einops",
    }
    assert not heavy, heavy
    models = [name for name in new if name.endswith((".model", ".language_model", ".kl", ".dc_ae", ".engine"))]
    models.remove(f"{STATE['pack'].__name__}.bridge.model")
    assert not models, models
    assert "diffusers" not in sys.modules


def routes():
    """HTTP routes belong to the server object, which does not exist here; a pack that adds some would import it."""
    return "server" in sys.modules


def check_no_http_routes_are_added():
    assert routes() == STATE["routes"]


def check_every_architecture_is_registered_once():
    names = [getattr(model, "unet_config", {}).get("image_model") for model in comfy.supported_models.models]
    ours = [name for name in names if str(name).startswith("nativedit_")]
    assert "nativedit_prx_pixel" in ours
    assert len(ours) == len(set(ours))


def check_registering_again_changes_nothing():
    functions = [getattr(owner, name) for owner, name in HOOKED]
    models = list(comfy.supported_models.models)
    assert [node.__name__ for node in node_list(STATE["pack"])] == [node.__name__ for node in STATE["nodes"]]
    assert [getattr(owner, name) for owner, name in HOOKED] == functions
    assert list(comfy.supported_models.models) == models


def check_foreign_wrappers_before_and_after_ours_both_run():
    for owner, name in HOOKED:
        foreign_wrapper(owner, name)
    node_list(STATE["pack"])  # a foreign wrapper outside hides ours; it must not be installed a second time
    RECORDED.clear()
    unclaimed = {"some.weight": torch.zeros(1)}
    comfy.model_detection.detect_unet_config(unclaimed, "")
    assert [name for name, *_ in RECORDED] == ["detect_unet_config", "detect_unet_config", "core"]


def check_a_second_copy_in_another_folder_steps_aside():
    models = list(comfy.supported_models.models)
    other = load_pack(BASE / "second_copy")
    listed, lines = LOG.during(lambda: node_list(other))
    assert listed == []
    assert any("installed twice" in line and str(PACK) in line and "second_copy" in line for line in lines), lines
    assert list(comfy.supported_models.models) == models


def check_a_pip_installed_copy_does_not_interfere():
    sys.path.insert(0, str(BASE / "site"))
    models, backend = list(comfy.supported_models.models), part("ldm.layers.attention")._backend
    import nativedit

    assert Path(nativedit.__file__).parent == BASE / "site" / "nativedit"
    assert any(card.name == "prx_pixel" for card in nativedit.architectures())
    module = nativedit.load_diffusion_model(TINY)
    assert type(module).__module__.startswith("nativedit.")
    assert list(comfy.supported_models.models) == models
    assert part("ldm.layers.attention")._backend is backend


def check_more_arguments_than_today_are_passed_on():
    RECORDED.clear()
    unclaimed = {"some.weight": torch.zeros(1)}
    comfy.model_detection.detect_unet_config(unclaimed, "", {"a": "b"}, "one more", another=1)
    assert RECORDED[-1] == ("core", ({"a": "b"}, "one more"), {"another": 1})
    comfy.model_detection.detect_unet_config(state_dict=unclaimed, key_prefix="", metadata=None, another=2)
    assert RECORDED[-1] == ("core", (), {"metadata": None, "another": 2})


def check_every_wrapper_of_ours_hands_on_what_a_later_comfyui_adds():
    unclaimed = {"some.weight": torch.zeros(1)}
    model = torch.nn.Linear(1, 1)
    today = {
        "detect_unet_config": (unclaimed, ""),
        "load_clip": (["some.safetensors"],),
        "load_checkpoint_guess_config": ("some.safetensors",),
        "load_diffusion_model": ("some.safetensors",),
        "load_text_encoder_state_dicts": ([unclaimed],),
        "model_lora_keys_unet": (model, {}),
        "model_lora_keys_clip": (model, {}),
        "load_lora": ({}, {}),
        "__init__": (model, unclaimed),
        "sample": (comfy.sd.load_diffusion_model(str(TINY)), torch.zeros(1, 3, 16, 16), 1),
    }
    owners = [comfy.model_detection, comfy.sd, comfy.lora, comfy.sample, comfy.sd.VAE]
    wrapped = [(owner, name) for owner in owners for name in owner._nativedit_wrapped]
    assert {name for _, name in wrapped} == set(today)
    for owner, name in wrapped:
        function, received = getattr(owner, name), []
        while "wrapper" not in (outside := inspect.getclosurevars(function).nonlocals):
            function = outside["original"]  # a foreign wrapper outside ours

        def later(*args, received=received, **kwargs):
            received.append((args, kwargs))
            return {}

        outside["wrapper"](later, *today[name], "one more", another=1)
        [(args, kwargs)] = [call for call in received if "another" in call[1]]
        assert args[-1] == "one more" and kwargs["another"] == 1, name


def check_our_file_is_ours_under_every_prefix():
    for prefix in ("", "model.diffusion_model.", "diffusion_model.", "transformer."):
        tensors = {prefix + key: value for key, value in state_dict().items()}
        stripped = "" if prefix != "model.diffusion_model." else prefix
        found = comfy.model_detection.detect_unet_config(tensors, stripped)
        assert found["image_model"] == "nativedit_prx_pixel", prefix
        assert found["depth"] == 3


def check_core_wins_where_it_has_the_architecture():
    CORE_VERDICT["answer"] = {"image_model": "core's own"}
    try:
        assert comfy.model_detection.detect_unet_config(state_dict(), "") == {"image_model": "core's own"}
    finally:
        CORE_VERDICT.clear()


def check_detection_never_raises_on_strange_state_dicts():
    signature = {key: 1 for key in state_dict()}  # right keys, values without shapes
    for strange in (signature, {}, {key: torch.zeros(()) for key in signature}, {"": torch.zeros(1)}):
        RECORDED.clear()
        comfy.model_detection.detect_unet_config(strange, "")
        assert RECORDED[-1][0] == "core"


def check_a_card_that_fails_disables_itself_alone():
    detection, architecture = part("bridge.detection"), part("supported_models").get_architecture("prx_pixel")
    import dataclasses

    broken = dataclasses.replace(architecture, name="broken", latent_format="no such format")
    fine = dataclasses.replace(architecture, name="fine")
    original, detection.architectures = detection.architectures, lambda: (broken, fine)
    models = list(comfy.supported_models.models)
    try:
        _, lines = LOG.during(detection.install)
    finally:
        detection.architectures = original
        added = [model.unet_config["image_model"] for model in comfy.supported_models.models[len(models) :]]
        comfy.supported_models.models[:] = models
        detection._registered.pop("fine", None)
    assert added == ["nativedit_fine"]
    [line] = [line for line in lines if "broken" in line]
    assert comfyui_version.__version__ in line and "no such format" in line


def check_a_part_that_this_comfyui_can_not_take_is_switched_off_alone():
    bridge, vae = part("bridge"), part("bridge.vae")
    install = vae.install

    def changed():
        raise AttributeError("module 'comfy.sd' has no attribute 'VAE'")

    vae.install = changed
    try:
        _, lines = LOG.during(bridge._install)
    finally:
        vae.install = install
    [line] = [line for line in lines if "NativeDiT" in line]
    assert "autoencoders" in line and "switched off" in line and comfyui_version.__version__ in line, line
    assert "no attribute 'VAE'" in line
    assert comfy.model_detection.detect_unet_config(state_dict(), "")["image_model"] == "nativedit_prx_pixel"


def check_what_our_loader_was_told_is_forgotten_by_the_next_loader():
    [ours] = [node for node in STATE["nodes"] if node.__name__ == "NativeDiTLoadDiffusionModel"]
    first = with_lora(ours.execute(TINY.name, architecture="prx_pixel", precision="bfloat16").args[0])
    assert first.model.get_dtype() == torch.bfloat16
    fresh = comfy.sd.load_diffusion_model(str(TINY))
    assert fresh.model.get_dtype() == torch.float32 and not fresh.patches
    assert part("bridge.detection")._only.get() is None
    again, expected = with_lora(fresh), with_lora(comfy.sd.load_diffusion_model(str(TINY)))
    for patcher in (again, expected):
        patcher.patch_model(device_to=torch.device("cpu"))
    assert torch.equal(model_call(again), model_call(expected))


def check_the_originals_stay_reachable():
    for owner, name in HOOKED:
        assert callable(owner._nativedit_wrapped[name]), name


def check_an_unknown_quantized_format_of_ours_is_refused_in_words():
    tensors = {**state_dict(), **quantized("int3_dreamt_up")}
    try:
        comfy.model_detection.detect_unet_config(tensors, "")
    except ValueError as error:
        text = str(error)
        assert "int3_dreamt_up" in text and "blocks.0.gate_proj" in text and comfyui_version.__version__ in text, text
    else:
        raise AssertionError("not refused")


def check_a_format_of_a_newer_comfyui_names_the_version():
    import comfy.quant_ops

    newer = [name for name in ("int8_tensorwise", "asym_w4a8_int8") if name not in comfy.quant_ops.QUANT_ALGOS]
    for name in newer:
        try:
            comfy.model_detection.detect_unet_config({**state_dict(), **quantized(name)}, "")
        except ValueError as error:
            assert "or newer" in str(error), error
        else:
            raise AssertionError("not refused")


def check_an_unknown_format_of_others_is_one_line_and_core_goes_on():
    tensors = {"x.weight": torch.zeros(1), **{f"x.{k}": v for k, v in quantized("int3_dreamt_up").items()}}
    RECORDED.clear()
    _, lines = LOG.during(lambda: comfy.model_detection.detect_unet_config(tensors, ""))
    assert RECORDED[-1][0] == "core"
    assert len([line for line in lines if "int3_dreamt_up" in line]) == 1


def main():
    import inside_models

    results = {}
    for name, check in [*globals().items(), *vars(inside_models).items()]:
        if name.startswith("check_") and inspect.isfunction(check):
            try:
                check()
                results[name] = ""
            except BaseException:  # every check is reported, whatever the others did
                results[name] = traceback.format_exc()
    results["seconds"] = STATE.get("seconds")
    OUTPUT.write_text(json.dumps(results))


main()
