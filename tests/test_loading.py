"""From a file to a module: what fits loads, what does not is named."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import DATA, golden_cases, rel_err

import nativedit
from nativedit import supported_models
from nativedit.files.errors import FileError
from nativedit.ldm.prx.model import PRXTransformer2DModel
from nativedit.supported_models import Sampling, _registry

PIXEL = next(golden for golden in golden_cases("prx_pixel") if golden.folder.name == "pixel")


@pytest.fixture
def weights():
    return dict(PIXEL.weights)


@pytest.fixture
def save(tmp_path):
    def save(tensors, name="model.safetensors", **metadata):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata or None)
        return path

    return save


def run(module):
    inputs = PIXEL.group("inputs")
    return module(
        inputs["hidden_states"], inputs["timestep"], inputs["encoder_hidden_states"], inputs["attention_mask"]
    )


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model.", "transformer."])
def test_a_file_loads_under_every_usual_prefix(weights, save, prefix):
    path = save({prefix + key: value for key, value in weights.items()})
    module = nativedit.load_diffusion_model(path)
    assert isinstance(module, PRXTransformer2DModel) and module.dtype == torch.float32
    assert rel_err(run(module), PIXEL.io["output"]) <= 1e-5


def test_a_diffusers_folder_with_shards_loads(weights, save, tmp_path):
    keys = sorted(weights)
    half = len(keys) // 2
    parts = {"a-00001-of-00002.safetensors": keys[:half], "a-00002-of-00002.safetensors": keys[half:]}
    for name, part in parts.items():
        save({key: weights[key] for key in part}, f"pipeline/transformer/{name}")
    folder = tmp_path / "pipeline" / "transformer"
    index = {"weight_map": {key: name for name, part in parts.items() for key in part}}
    (folder / "a.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(
        json.dumps({"_class_name": "PRXTransformer2DModel", "_diffusers_version": "0.42.1", **PIXEL.config})
    )
    for path in (tmp_path / "pipeline", folder):
        assert rel_err(run(nativedit.load_diffusion_model(path)), PIXEL.io["output"]) <= 1e-5


def test_weights_come_in_the_dtype_asked_for(weights, save):
    module = nativedit.load_diffusion_model(save(weights), dtype="bfloat16")
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16} == {module.dtype}


def test_the_headers_config_beats_the_card_and_the_callers_beats_both(weights, save):
    header = json.dumps({"transformer": {"theta": 77, "time_factor": 3.0}})
    module = nativedit.load_diffusion_model(save(weights, config=header), config={"time_factor": 5.0})
    assert (module.theta, module.time_factor) == (77, 5.0)


def test_a_header_config_that_is_no_json_is_ignored(weights, save):
    nativedit.load_diffusion_model(save(weights, config="{not json"))


def test_a_missing_layer_is_named(weights, save):
    del weights["blocks.1.attention.txt_kv_proj.weight"]
    with pytest.raises(FileError, match=r"model\.safetensors.*missing.*blocks\.1\.attention\.txt_kv_proj\.weight"):
        nativedit.load_diffusion_model(save(weights))


def test_a_layer_of_the_wrong_shape_is_named_with_both_shapes(weights, save):
    weights["blocks.0.down_proj.weight"] = torch.zeros(48, 100)
    with pytest.raises(FileError, match=r"blocks\.0\.down_proj\.weight is \[48, 100\], expected \[48, 144\]"):
        nativedit.load_diffusion_model(save(weights))


def test_a_layer_left_over_is_named(weights, save):
    weights["blocks.0.extra.weight"] = torch.zeros(3)
    with pytest.raises(FileError, match=r"unknown to this model: blocks\.0\.extra\.weight"):
        nativedit.load_diffusion_model(save(weights))


def test_a_truncated_file_is_refused(weights, save):
    path = save(weights)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(FileError, match=r"model\.safetensors"):
        nativedit.load_diffusion_model(path)


def test_a_configuration_that_does_not_fit_is_one_error(weights, save):
    with pytest.raises(FileError, match="axes_dim"):
        nativedit.load_diffusion_model(save(weights), config={"axes_dim": [2, 2]})
    with pytest.raises(FileError, match="no_such_option"):
        nativedit.load_diffusion_model(save(weights), config={"no_such_option": 1})


WRONG = {
    "lora": ({"diffusion_model.blocks.0.down_proj.lora_A.weight": torch.zeros(4, 144)}, "LoRA", "Load LoRA"),
    "autoencoder": (
        {"decoder.conv_in.weight": torch.zeros(8, 4, 3, 3), "encoder.conv_in.weight": torch.zeros(8, 3, 3, 3)},
        "autoencoder",
        "Load VAE",
    ),
    "clip": (
        {"text_model.encoder.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4)},
        "text encoder",
        "models/text_encoders",
    ),
    "checkpoint": (
        {"model.diffusion_model.x.weight": torch.zeros(2), "first_stage_model.y.weight": torch.zeros(2)},
        "all-in-one",
        "Load Checkpoint",
    ),
    "unknown": ({"something.weight": torch.zeros(2)}, "no kind of model", "wants a diffusion model"),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_kind_of_file_is_told_what_it_is_and_where_it_goes(save, name):
    tensors, what, where = WRONG[name]
    with pytest.raises(FileError, match=what) as caught:
        nativedit.load_diffusion_model(save(tensors))
    assert where in str(caught.value) and "model.safetensors" in str(caught.value)


def test_a_diffusion_model_in_the_text_encoder_slot_is_told_so(weights, save):
    with pytest.raises(FileError, match=r"is a diffusion model, not a text encoder.*models/diffusion_models"):
        nativedit.load_text_encoder(save(weights))


def test_an_unknown_layout_lists_the_closest_architectures_and_its_first_keys(weights, save):
    for key in [key for key in weights if key.startswith("final_layer")]:
        del weights[key]
    with pytest.raises(FileError, match=r"unknown layout.*prx.*first keys: .*blocks\.0\."):
        nativedit.load_diffusion_model(save(weights))


def test_an_unknown_architecture_lists_the_closest(weights, save):
    with pytest.raises(ValueError, match=r"'prx_pixels'; the closest known: prx_pixel"):
        nativedit.load_diffusion_model(save(weights), architecture="prx_pixels")


def test_a_pickle_is_refused_without_being_read(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"a": torch.zeros(2)}, path)
    with pytest.raises(FileError, match=r"model\.pt"):
        nativedit.load_diffusion_model(path)


def test_inspect_tells_what_a_file_is(weights, save):
    info = nativedit.inspect(save({"model.diffusion_model." + key: value for key, value in weights.items()}))
    assert (info.kind, info.architecture, info.prefix) == ("diffusion_model", "prx_pixel", "model.diffusion_model.")
    assert info.tensors == len(weights) and info.parameters == sum(v.numel() for v in weights.values())
    assert info.dtypes == {"F32": len(weights)} and info.config["patch_size"] == 16


def test_no_card_claims_a_layout_of_another_architecture(shared):
    claimed = {}
    for path in sorted((shared / "reference" / "layouts").glob("*.*.json")):
        keys = json.loads(path.read_text())["keys"]
        match = supported_models.find_architecture({key: tuple(shape) for key, shape in keys.items()})
        if match is not None:
            claimed[path.name] = match.architecture
    ours = {name: card.name for name, card in claimed.items() if card.module is not None}
    assert ours == {}, "a card with a module of ours claims a file of core's"


def test_a_card_that_does_not_import_disables_itself_alone(monkeypatch, caplog):
    class Broken:
        name = "broken_card"

    real = _registry.pkgutil.iter_modules
    monkeypatch.setattr(_registry.pkgutil, "iter_modules", lambda path: [Broken, *real(path)])
    supported_models.architectures.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            names = [card.name for card in supported_models.architectures()]
    finally:
        supported_models.architectures.cache_clear()
    assert "prx_pixel" in names
    assert len([record for record in caplog.records if "broken_card" in record.getMessage()]) == 1


def test_a_detection_that_raises_is_skipped_with_a_warning(caplog):
    card = supported_models.get_architecture("prx_pixel")
    shapes = {key: tuple(value.shape) for key, value in PIXEL.weights.items()}
    shapes["txt_in.bias"] = ()  # a scalar where a vector belongs
    with caplog.at_level(logging.WARNING):
        assert card.detect(shapes) is None
    assert "prx_pixel" in caplog.text


def test_every_card_names_classes_and_formats_that_exist():
    for card in supported_models.architectures():
        if card.module is not None:
            assert issubclass(card.module_class(), torch.nn.Module)
            assert isinstance(card.sampling, Sampling)
            assert card.dtypes and card.defaults.steps > 0


def test_the_demo_files_are_recognised():
    demo = DATA.parent.parent / "demo"
    transformer = next((demo / "diffusion_models").glob("*.safetensors"))
    encoder = next((demo / "text_encoders").glob("*.safetensors"))
    assert nativedit.inspect(transformer).architecture == "prx_pixel"
    assert nativedit.inspect(encoder).kind == "text_encoder"
    assert "tokenizer_json" in load_file(encoder)
