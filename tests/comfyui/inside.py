"""Checks that run inside ComfyUI's Python, in one process and in this order; test_inside.py makes a test of each.

Run as `python inside.py COMFYUI BASE FILE`: results go to FILE as JSON, {check: "" or the traceback}. It imports the
pack as ComfyUI does, from BASE/custom_nodes.
"""

import asyncio
import compileall
import importlib.util
import inspect
import json
import logging
import sys
import time
import traceback
from pathlib import Path

COMFYUI, BASE = Path(sys.argv[1]), Path(sys.argv[2])
OUTPUT = Path(sys.argv[3])
sys.argv = ["main.py", "--cpu", "--base-directory", str(BASE)]
sys.path.insert(0, str(COMFYUI))

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.ldm.modules.attention  # noqa: E402
import comfy.lora  # noqa: E402
import comfy.model_detection  # noqa: E402
import comfy.model_sampling  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.sd1_clip  # noqa: E402
import comfy.supported_models  # noqa: E402
import comfy.utils  # noqa: E402
import comfy_api.latest  # noqa: E402, F401
import comfyui_version  # noqa: E402
import folder_paths  # noqa: E402, F401
import torch  # noqa: E402

PACK = BASE / "custom_nodes" / "ComfyUI-NativeDiT"
TINY = BASE / "models" / "diffusion_models" / "tiny.safetensors"
TEXT = BASE / "models" / "text_encoders" / "tiny_text.safetensors"
VERSION = tuple(int(part) for part in comfyui_version.__version__.split(".")[:2])


class Log(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def during(self, action):
        before = len(self.lines)
        result = action()
        return result, self.lines[before:]


LOG = Log()
logging.getLogger().addHandler(LOG)
logging.getLogger().setLevel(logging.INFO)


def load_pack(folder):
    """As ComfyUI's nodes.py does: under a name made from the path."""
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def node_list(module):
    return asyncio.run(asyncio.run(module.comfy_entrypoint()).get_node_list())


def part(name):
    """A module of the pack."""
    return importlib.import_module(f"{STATE['pack'].__name__}.{name}")


STATE = {}
RECORDED = []
CORE_VERDICT = {}


def foreign_wrapper(owner, name):
    """What another pack may do: no functools.wraps, whatever arguments come, and it notes them."""
    original = getattr(owner, name)

    def foreign(*args, **kwargs):
        RECORDED.append((name, args, kwargs))
        return original(*args, **kwargs)

    setattr(owner, name, foreign)


def state_dict(path=TINY):
    return comfy.utils.load_torch_file(str(path))


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


def check_lora_names_are_added_to_our_models_only():
    lora = part("bridge.lora")
    model = comfy.sd.load_diffusion_model(str(TINY)).model
    assert isinstance(comfy.lora.model_lora_keys_unet(model, {}), lora.KeyMap)

    class Other(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.diffusion_model = torch.nn.Linear(2, 2)
            self.model_config = type("Config", (), {"unet_config": {}})

    original = comfy.lora._nativedit_wrapped["model_lora_keys_unet"]
    assert comfy.lora.model_lora_keys_unet(Other(), {}) == original(Other(), {})
    assert type(comfy.lora.model_lora_keys_unet(Other(), {})) is dict


def check_attention_is_right_with_masks_on_every_backend():
    backend = part("bridge.attention").comfyui_attention
    sdpa = part("ldm.layers.attention").sdpa
    q, k, v = (torch.randn(2, 3, length, 16, generator=torch.manual_seed(5)) for length in (40, 50, 50))
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[0, :20], mask[1, 45:] = False, False
    module = comfy.ldm.modules.attention
    chosen = module.optimized_attention
    try:
        for name in ("attention_basic", "attention_sub_quad", "attention_split", "attention_pytorch"):
            module.optimized_attention = getattr(module, name)
            for arguments in ({}, {"mask": mask}, {"mask": mask, "scale": 0.5}):
                error = (backend(q, k, v, **arguments) - sdpa(q, k, v, **arguments)).abs().max()
                assert error < 1e-5, (name, list(arguments), error)
    finally:
        module.optimized_attention = chosen


def check_prompt_weights_are_read_as_comfyui_reads_them():
    parse = part("text_encoders.prompt_weights").parse_weights
    core = comfy.sd1_clip
    texts = [
        "a cube", "a (red:1.3) cube", "(red)", "((red))", "(a (b:0.5) c:2)", "(a:b:1.5)", "(x:y)", "a \\(b\\) c", "",
        "(open", "close)", "a) (b", "(a", "(:1.2)", "(a:)", "()", "(a:-1)", "x (a:1.1)(b:0.9) y", "[a](b)", "(a:1e1)",
        "((a:1.5) b:0.2)", "\\(a:1.2\\)", "(a\\):1.2)",
    ]  # fmt: skip
    for text in texts:
        expected = [
            (core.unescape_important(piece), weight)
            for piece, weight in core.token_weights(core.escape_important(text), 1.0)
        ]
        assert parse(text) == [(piece, weight) for piece, weight in expected if piece], text


def check_embeddings_are_left_out_where_comfyui_leaves_out_missing_ones():
    core = comfy.sd1_clip.SDTokenizer(embedding_directory=str(BASE / "models" / "embeddings"))
    read = part("text_encoders.prompt_weights").read_prompt
    for text, names in {
        "embedding:bad-hands": ["bad-hands"],
        "a cube, embedding:sub/one.pt, of (embedding:two:1.2) glass": ["sub/one.pt", "two"],
        "(a (embedding:three) cube:0.5) embedding:four": ["three", "four"],
        "embedding:five<lora:six:1> x": ["five"],
        "see no_embedding:six": [],
    }.items():
        pieces, left_out = read(text)
        assert left_out == names, (text, left_out)
        expected = core.tokenize_with_weights(text)
        assert core.tokenize_with_weights("".join(piece for piece, _ in pieces), disable_weights=True)[0] == [
            (token, 1.0) for token, _ in expected[0]
        ], text
    row, lines = LOG.during(lambda: clip().tokenize("a red embedding:bad-hands cube"))
    assert row == clip().tokenize("a red cube")
    assert [line for line in lines if "embedding:bad-hands is left out" in line], lines


def clip():
    if "clip" not in STATE:
        [loader] = [node for node in STATE["nodes"] if node.__name__ == "NativeDiTLoadTextEncoder"]
        STATE["clip"] = loader.execute("tiny_text.safetensors").args[0]
    return STATE["clip"]


def check_our_clip_keeps_the_whole_contract_of_comfyuis():
    ours = clip()
    assert isinstance(ours, comfy.sd.CLIP)
    tokens = ours.tokenize("a (red:1.2) cube")
    words = ours.tokenize("a red cube", return_word_ids=True)
    [row] = next(iter(tokens.values()))
    assert [weight for _, weight in row] == [1.0, 1.2, 1.0]
    assert all(len(entry) == 3 for entry in next(iter(words.values()))[0])
    assert next(iter(ours.tokenize("(red:1.5)", disable_weights=True).values()))[0][0][1] == 1.0
    assert ours.tokenizer.untokenize(row)[1][1].strip() == "red"
    cond = ours.encode_from_tokens(tokens)
    assert cond.dtype == torch.float32 and cond.shape[:2] == (1, 3)
    both = ours.encode_from_tokens(tokens, return_pooled=True)
    assert torch.equal(both[0], cond) and both[1] is None
    as_dict = ours.encode_from_tokens(tokens, return_pooled=True, return_dict=True)
    assert torch.equal(as_dict["cond"], cond) and as_dict["attention_mask"].tolist() == [[1, 1, 1]]
    [[scheduled, extra]] = ours.encode_from_tokens_scheduled(tokens, add_dict={"guidance": 3.0})
    assert torch.equal(scheduled, cond) and extra["guidance"] == 3.0
    assert torch.equal(ours.encode("a (red:1.2) cube"), cond)
    copy = ours.clone()
    copy.set_tokenizer_option("some_min_length", 3)
    copy.clip_layer(-2)
    assert not torch.equal(copy.encode("a (red:1.2) cube"), cond)
    assert torch.equal(ours.encode("a (red:1.2) cube"), cond)
    assert ours.load_model() is ours.patcher
    assert ours.get_key_patches()
    assert "tokenizer_json" in ours.get_sd()
    if hasattr(ours, "state_dict_for_saving"):
        assert ours.state_dict_for_saving().keys() == ours.get_sd().keys()
    if hasattr(ours, "decode"):
        assert ours.decode([token for token, _ in row]).split() == ["a", "red", "<unk>"]
    if hasattr(ours, "generate"):
        try:
            ours.generate(tokens)
        except ValueError as error:
            assert "can't write text" in str(error)
        else:
            raise AssertionError("generate did not refuse")
    if hasattr(ours, "is_dynamic"):
        assert ours.is_dynamic() is False


def check_a_saved_clip_state_dict_loads_into_the_same_module():
    ours = clip()
    weights = {key: value.clone() for key, value in ours.cond_stage_model.state_dict().items()}
    missing, unexpected = ours.load_sd(ours.get_sd())
    assert list(missing) == [] and list(unexpected) == []
    missing, unexpected = ours.load_sd(ours.get_sd(), full_model=True)
    assert list(missing) == [] and list(unexpected) == []
    assert all(torch.equal(value, weights[key]) for key, value in ours.cond_stage_model.state_dict().items())


def check_an_empty_prompt_is_one_hidden_row():
    [[states, extra]] = clip().encode_from_tokens_scheduled(clip().tokenize(""))
    assert states.shape == (1, 1, 32) and extra["attention_mask"].tolist() == [[0]]


def check_scheduled_hooks_encode_the_same():
    import comfy.hooks

    ours = clip()
    plain = ours.encode("a red circle")
    hooked = ours.clone()
    hooked.use_clip_schedule = True
    group = comfy.hooks.HookGroup()
    hook = comfy.hooks.WeightHook(strength_model=0.0, strength_clip=0.0)
    group.add(hook)
    hooked.patcher.forced_hooks = group
    schedule = hooked.encode_from_tokens_scheduled(hooked.tokenize("a red circle"), show_pbar=False)
    assert torch.equal(schedule[0][0], plain)


def model_call(patcher):
    """The denoised picture at one sigma, for a fixed noisy input."""
    model = patcher.model
    x = torch.randn(1, 3, 48, 64, generator=torch.manual_seed(11))
    context = torch.randn(1, 5, 32, generator=torch.manual_seed(12))
    with torch.inference_mode():
        return model.apply_model(x, torch.tensor([0.7]), c_crossattn=context, transformer_options={})


def with_lora(patcher):
    lora = comfy.utils.load_torch_file(str(BASE / "models" / "loras" / "dit_comfy.safetensors"))
    return comfy.sd.load_lora_for_models(patcher, None, lora, 1.0, 0.0)[0]


def check_half_offloaded_layers_get_their_lora_too():
    cpu = torch.device("cpu")
    full = with_lora(comfy.sd.load_diffusion_model(str(TINY)))
    full.patch_model(device_to=cpu)
    expected = model_call(full)
    partial = with_lora(comfy.sd.load_diffusion_model(str(TINY)))
    with_room = partial.model_size() // 2
    partial.patch_model(device_to=cpu, lowvram_model_memory=with_room)
    assert partial.model.model_lowvram
    assert (model_call(partial) - expected).abs().max() < 1e-4
    plain = comfy.sd.load_diffusion_model(str(TINY))
    plain.patch_model(device_to=cpu)
    assert (model_call(plain) - expected).abs().max() > 1e-2


def check_cloning_and_detaching_leave_the_weights_as_they_were():
    cpu = torch.device("cpu")
    patcher = comfy.sd.load_diffusion_model(str(TINY))
    before = {key: value.clone() for key, value in patcher.model.state_dict().items()}
    clone = with_lora(patcher.clone())
    clone.patch_model(device_to=cpu)
    clone.partially_unload(cpu, clone.model_size() // 3)
    clone.detach()
    after = patcher.model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def check_weights_that_do_not_exist_before_loading_are_fine():
    """Since 0.33 layers have none when the dynamic memory manager runs; here only its way of loading is simulated."""
    if VERSION < (0, 33):
        return
    import comfy.memory_management

    expected = comfy.sd.load_diffusion_model(str(TINY))
    expected.patch_model(device_to=torch.device("cpu"))
    weights, text_weights = state_dict(), state_dict(TEXT)
    comfy.memory_management.aimdo_enabled = True
    try:
        config = comfy.model_detection.model_config_from_unet(weights, "")
        config.set_inference_dtype(torch.float32, None)
        model = config.get_model(weights, "")
        assert model.diffusion_model.txt_in.weight is None
        for broken, says in (
            ({"blocks.1.gate_proj.weight": torch.zeros(100, 64)}, "is [100, 64], expected [128, 64]"),
            ({"blocks.1.gate_proj.weight": None}, "1 weights are missing: blocks.1.gate_proj.weight"),
        ):
            tensors = {key: value for key, value in {**weights, **broken}.items() if value is not None}
            try:
                model.load_model_weights(tensors, "", assign=True)
            except ValueError as error:
                assert says in str(error), error
            else:
                raise AssertionError(f"not refused: {says}")
        model.load_model_weights(dict(weights), "", assign=True)
        with part("bridge.hooks").loading(str(TEXT)):  # as ComfyUI's load_clip has it, whose header says whose prompts
            text = comfy.sd.load_text_encoder_state_dicts([text_weights])
    finally:
        comfy.memory_management.aimdo_enabled = False

    class Holder:
        pass

    holder = Holder()
    holder.model = model
    assert (model_call(holder) - model_call(expected)).abs().max() < 1e-5
    assert torch.equal(text.encode("a red circle"), clip().encode("a red circle"))


def quantized(name):
    marker = bytes_tensor({"format": name})
    return {"blocks.0.gate_proj.comfy_quant": marker, "blocks.0.gate_proj.weight_scale": torch.ones(())}


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


def bytes_tensor(value):
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def check_text_encoders_of_others_are_left_to_comfyui():
    encoders = part("bridge.text_encoders")

    def qwen3(prefix, width):
        return {
            f"{prefix}embed_tokens.weight": torch.empty(100, width, device="meta"),
            f"{prefix}norm.weight": torch.empty(width, device="meta"),
            f"{prefix}layers.0.self_attn.q_proj.weight": torch.empty(width, width, device="meta"),
            f"{prefix}layers.0.self_attn.k_proj.weight": torch.empty(width, width, device="meta"),
            f"{prefix}layers.0.self_attn.q_norm.weight": torch.empty(128, device="meta"),
            f"{prefix}layers.0.post_attention_layernorm.weight": torch.empty(width, device="meta"),
            f"{prefix}layers.0.mlp.gate_proj.weight": torch.empty(3 * width, width, device="meta"),
        }

    tokenizer = {"tokenizer_json": torch.zeros(2, dtype=torch.uint8)}
    assert encoders._claim([qwen3("model.", 2560)]) is None, "Qwen3-4B is ComfyUI's"
    assert encoders._claim([qwen3("model.", 2560), qwen3("", 2560)]) is None, "two files are no file of ours"
    assert encoders._claim([{"text_model.encoder.layers.0.mlp.fc1.weight": torch.zeros(1)}]) is None
    assert encoders._claim([{}]) is None
    assert encoders._claim([qwen3("", 2048)]) is not None, "ComfyUI takes bare keys for CLIP-L"
    assert encoders._claim([{**qwen3("model.", 2048), **tokenizer}]) is not None, "a tokenizer was put in for us"
    for_us = bytes_tensor({"text_encoder": {}, "nativedit.architecture": "prx_pixel"})
    sized = {**qwen3("model.", 640), "text_encoder_config": for_us}
    assert encoders._claim([sized]).card.name == "prx_pixel", "of no size that ComfyUI has"
    try:
        comfy.sd.load_text_encoder_state_dicts([qwen3("", 640)])
    except ValueError as error:
        assert "choose one as architecture" in str(error), error
    else:
        raise AssertionError("nothing tells whose prompts it encodes, and it was not refused")


def check_autoencoders_of_others_are_left_to_comfyui():
    claim = part("bridge.vae").claim
    assert claim(None) is None and claim({}) is None
    assert claim({"pixel_space_vae": torch.tensor(1.0)}) is None
    assert claim({"decoder.conv_in.weight": torch.zeros(8, 4, 3, 3)}) is None
    vae = comfy.sd.VAE(sd={"pixel_space_vae": torch.tensor(1.0)})
    assert vae.latent_channels == 3


def check_the_originals_stay_reachable():
    for owner, name in HOOKED:
        assert callable(owner._nativedit_wrapped[name]), name


def main():
    results = {}
    for name, check in list(globals().items()):
        if name.startswith("check_") and inspect.isfunction(check):
            try:
                check()
                results[name] = ""
            except BaseException:  # every check is reported, whatever the others did
                results[name] = traceback.format_exc()
    results["seconds"] = STATE.get("seconds")
    OUTPUT.write_text(json.dumps(results))


main()
