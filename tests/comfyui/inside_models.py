"""Checks of inside.py that are about models, prompts and text encoders; they run after its own, in the same process."""

import comfy.ldm.modules.attention
import comfy.lora
import comfy.model_detection
import comfy.sample
import comfy.sd
import comfy.sd1_clip
import core_nodes
import torch
from inside_world import BASE, LOG, TEXT, TINY, VERSION, bytes_tensor, clip, model_call, part, state_dict, with_lora


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


def adapters(rows, columns):
    """One file per kind of adapter, for a weight of this size; {kind: tensors without the layer's name}."""
    products = (("a", (rows, 2)), ("b", (2, columns)))
    shapes = {
        "lora": {"lora_B.weight": (rows, 2), "lora_A.weight": (2, columns)},
        "loha": {f"hada_w{i}_{part}": shape for i in "12" for part, shape in products},
        "lokr": {"lokr_w1": (2, 4), "lokr_w2": (rows // 2, columns // 4)},
        "lokr in factors": {
            "lokr_w1_a": (2, 1), "lokr_w1_b": (1, 4), "lokr_w2_a": (rows // 2, 3), "lokr_w2_b": (3, columns // 4),
        },
        "glora": {
            "a1.weight": (columns, 2), "a2.weight": (2, columns), "b1.weight": (rows, 2), "b2.weight": (2, columns),
        },
        "old glora": {
            "a1.weight": (2, columns), "a2.weight": (columns, 2), "b1.weight": (2, columns), "b2.weight": (rows, 2),
        },
        "diff": {"diff": (rows, columns)},
    }  # fmt: skip
    return {kind: {name: torch.ones(shape) for name, shape in parts.items()} for kind, parts in shapes.items()}


def check_an_adapter_of_another_size_is_one_that_comfyui_leaves_out():
    misfit = part("bridge.lora_shapes").misfit
    load_lora = comfy.lora._nativedit_wrapped["load_lora"]
    model = comfy.sd.load_diffusion_model(str(TINY)).model
    key = "diffusion_model.blocks.1.gate_proj.weight"
    weight = model.state_dict()[key]
    assert weight.shape == (128, 64)
    for rows, columns in ((128, 64), (128, 48), (96, 64), (96, 48), (256, 64)):
        for kind, tensors in adapters(rows, columns).items():
            named = {f"layer.{name}": value for name, value in tensors.items()}
            [patch] = load_lora(named, {"layer": key}).values()
            changed = comfy.lora.calculate_weight([(1.0, patch, 1.0, None, None)], weight.clone(), key)
            applied = not torch.equal(changed, weight)
            assert applied == ((rows, columns) == (128, 64)), (kind, rows, columns)
            expected = None if applied else ((rows, columns), (128, 64))
            assert misfit(patch, key, [model]) == expected, (kind, rows, columns)


def check_what_is_not_certain_about_an_adapter_is_not_said():
    misfit, weight_shape = part("bridge.lora_shapes").misfit, part("bridge.lora_shapes").weight_shape
    model = comfy.sd.load_diffusion_model(str(TINY)).model
    key = "diffusion_model.blocks.1.gate_proj.weight"
    wrong = ("diff", (torch.ones(3, 3),))
    assert misfit(wrong, key, [model]) == ((3, 3), (128, 64))
    padded = ("diff", (torch.ones(300, 64), {"pad_weight": True}))
    for patch in (padded, ("set", (torch.ones(3, 3),)), ("model_as_lora", (torch.ones(3, 3),)), object(), None):
        assert misfit(patch, key, [model]) is None, patch
    assert misfit(wrong, (key, (0, 0, 3)), [model]) is None  # a slice of the weight
    assert misfit(wrong, "diffusion_model.no.such.weight", [model]) is None

    class Wrapper(torch.Tensor):
        """As packs keep codes of their own: the shape is the codes'."""

    layer = model.diffusion_model.blocks[1].gate_proj
    layer.weight = torch.nn.Parameter(torch.zeros(5).as_subclass(Wrapper), requires_grad=False)
    assert weight_shape(model, key) == (128, 64)
    layer.weight = None  # as ComfyUI's dynamic memory manager leaves it until it is needed
    assert weight_shape(model, key) == (128, 64)
    layer.in_features = None
    assert weight_shape(model, key) is None


def check_cores_own_nodes_that_reach_into_a_model():
    generator = torch.manual_seed(12)
    positive, negative = ([[torch.randn(1, length, 32, generator=generator), {}]] for length in (5, 3))
    picture = torch.zeros(1, 3, 48, 64)
    noise = comfy.sample.prepare_noise(picture, 5)

    def load():
        return comfy.sd.load_diffusion_model(str(TINY))

    def sample(model, steps=core_nodes.STEPS, cfg=1.0):
        arguments = (steps, cfg, "euler", "simple", positive, negative, picture)
        return comfy.sample.sample(model, noise, *arguments, disable_pbar=True, seed=5)

    core_nodes.check_step_caches(load, sample)
    core_nodes.check_a_wrapper_may_write_into_its_input(load, sample)
    core_nodes.check_renormalized_guidance(load, lambda model: sample(model, 3, 4.0))


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
        if VERSION < (0, 29) and "<" in text:
            continue  # it took the bracket for a part of the name
        expected = core.tokenize_with_weights(text)
        assert core.tokenize_with_weights("".join(piece for piece, _ in pieces), disable_weights=True)[0] == [
            (token, 1.0) for token, _ in expected[0]
        ], text
    row, lines = LOG.during(lambda: clip().tokenize("a red embedding:bad-hands cube"))
    assert row == clip().tokenize("a red cube")
    assert [line for line in lines if "embedding:bad-hands is left out" in line], lines


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


def check_weights_to_save_are_the_files_own_while_a_lora_is_patched_in():
    weights = part("bridge.weights").diffusion_weights
    plain = comfy.sd.load_diffusion_model(str(TINY))
    patched = with_lora(plain)
    patched.patch_model(device_to=torch.device("cpu"))
    source = weights(plain).source
    assert all(torch.equal(source.read(key), value) for key, value in state_dict().items())
    assert set(source.tensors) == set(state_dict()), set(source.tensors)
    baked = weights(patched).source
    changed = [key for key, value in state_dict().items() if not torch.equal(baked.read(key), value)]
    assert set(baked.tensors) == set(source.tensors) and len(changed) == len(patched.patches), changed


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
