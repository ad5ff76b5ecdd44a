"""One clear error for each thing that is wrong, before anything is loaded where that is possible."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from comfyui_graphs import node, text_to_latent, with_picture


@pytest.fixture
def graph() -> dict[str, Any]:
    return with_picture(text_to_latent(steps=1))


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in which a file is loaded."""
    from nativedit.engine.host import EngineHost

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    for name in ("load_diffusion_model", "load_text_encoder", "load_vae"):
        monkeypatch.setattr(EngineHost, name, refuse)


def problems(run, graph: Any, **options: Any) -> list[str]:
    from nativedit.engine.errors import WorkflowError

    with pytest.raises(WorkflowError) as caught:
        run(graph, **options)
    return caught.value.problems


def failure(run, graph: Any, **options: Any) -> str:
    from nativedit.engine.errors import NodeError

    with pytest.raises(NodeError) as caught:
        run(graph, **options)
    return str(caught.value)


# the graph


@pytest.mark.parametrize("cfg", [float("nan"), float("inf"), "nan"])
def test_a_number_that_is_none_is_refused(run, graph: dict, nothing_loads: None, cfg: Any):
    graph["sampler"]["inputs"]["cfg"] = cfg
    assert problems(run, graph) == [f"node sampler KSampler: input cfg wants a number, found {cfg!r}"]


def test_every_problem_comes_in_one_report_before_anything_is_loaded(run, graph: dict, nothing_loads: None):
    graph["model"]["inputs"]["unet_name"] = "gone.safetensors"
    graph["sampler"]["inputs"] |= {"steps": 0, "sampler_name": "euler2", "cfg": "much"}
    del graph["sampler"]["inputs"]["positive"]
    graph["sampler"]["inputs"]["negatve"] = ["negative", 0]
    graph["decode"]["inputs"]["vae"] = ["model", 0]
    graph["extra"] = node("KSamplr")

    found = problems(run, graph)

    assert len(found) == 8
    text = "\n".join(found)
    for expected in (
        r"node extra KSamplr: .*the closest: KSampler",
        r"node model UNETLoader: input unet_name .*'gone.safetensors' is not among the diffusion_models",
        r"node sampler KSampler: input steps is 0; the smallest is 1",
        r"node sampler KSampler: input sampler_name can't be 'euler2'; the closest: euler",
        r"node sampler KSampler: input cfg wants a number, found 'much'",
        r"node sampler KSampler: input positive \(CONDITIONING\) is not set",
        r"node sampler KSampler: has no input 'negatve'; did you mean negative\?",
        r"node decode VAEDecode: input vae wants VAE, but output 0 of node model UNETLoader is MODEL",
    ):
        assert re.search(expected, text), text


def test_the_message_names_the_title_that_the_user_sees(run, graph: dict):
    graph["sampler"]["_meta"] = {"title": "My sampler"}
    graph["sampler"]["inputs"]["steps"] = 0

    assert problems(run, graph)[0].startswith('node sampler KSampler "My sampler": input steps')


def test_an_unknown_node_says_where_it_may_run(run, graph: dict):
    graph["odd"] = node("SomeoneElsesNode")

    (problem,) = problems(run, graph)
    assert "node odd SomeoneElsesNode" in problem and "--server" in problem


def test_a_cycle_is_named_step_by_step(run, graph: dict):
    graph["again"] = node("LatentUpscaleBy", samples=["sampler", 0], upscale_method="bilinear", scale_by=1.0)
    graph["sampler"]["inputs"]["latent_image"] = ["again", 0]

    (problem,) = problems(run, graph)
    assert problem.startswith("the graph runs in a circle: ")
    assert "node sampler KSampler <- node again LatentUpscaleBy <- node sampler KSampler" in problem


def test_a_node_that_takes_from_itself_is_a_cycle(run, graph: dict):
    graph["sampler"]["inputs"]["latent_image"] = ["sampler", 0]

    assert problems(run, graph)[0].startswith("the graph runs in a circle")


def test_a_long_chain_is_no_problem(run, graph: dict):
    for number in range(1500):
        source = "positive" if number == 0 else f"zero{number - 1}"
        graph[f"zero{number}"] = node("ConditioningZeroOut", conditioning=[source, 0])
    graph["sampler"]["inputs"]["positive"] = ["zero1499", 0]
    run(graph)


def test_a_link_to_a_missing_node_or_output(run, graph: dict):
    graph["sampler"]["inputs"]["positive"] = ["nowhere", 0]
    graph["decode"]["inputs"]["samples"] = ["sampler", 3]

    found = "\n".join(problems(run, graph))
    assert "takes from node nowhere, which does not exist" in found
    assert "takes output 3 of node sampler KSampler, which has 1" in found


def test_a_graph_without_output(run, graph: dict):
    del graph["picture"], graph["save"]

    assert problems(run, graph) == ["no node saves or shows anything; add a SaveImage node"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "is no workflow"),
        ('{"a": 1}', "is no workflow"),
        ('{"1": {"inputs": {}}}', "node 1 has no class_type"),
        ('{"1": {"class_type": 3, "inputs": {}}}', "class_type must be a text"),
        ("[1, 2]", "a JSON object was expected"),
        ('{"1": ', "is no JSON: .*line 1"),
    ],
)
def test_a_file_that_is_no_workflow(run, tmp_path: Path, text: str, expected: str):
    (tmp_path / "workflow.json").write_text(text)

    (problem,) = problems(run, tmp_path / "workflow.json")
    assert re.search(expected, problem)


def test_a_missing_workflow_file(run, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no such workflow file"):
        run(tmp_path / "gone.json")


def test_a_picture_without_a_workflow(run, tmp_path: Path):
    from PIL import Image

    Image.new("RGB", (4, 4)).save(tmp_path / "plain.png")
    assert "carries no workflow" in problems(run, tmp_path / "plain.png")[0]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("steps", "is not NODE.INPUT"),
        ("nobody.steps", "there is no node 'nobody'"),
        ("CLIPTextEncode.text", "several nodes are called 'CLIPTextEncode'; use the id: positive, negative"),
    ],
)
def test_a_value_set_for_no_node(run, graph: dict, target: str, expected: str):
    assert expected in problems(run, graph, values={target: "x"})[0]


# what travels differs between systems, and is forgiven


@pytest.mark.parametrize(
    "change",
    [
        lambda g: {"prompt": g, "client_id": "x", "extra_data": {"extra_pnginfo": {}}},
        lambda g: {"prompt": g},
        lambda g: {"_comment": "made by hand", "//": ["a", "list"], "#": {"x": 1}, "version": 3, **g},
        lambda g: json.dumps(g),
        lambda g: {**g, "picture": {**g["picture"], "is_changed": ["x"], "_meta": {"title": None}}},
        lambda g: {**g, "note": node("Note"), "note2": node("MarkdownNote", text="hello")},
    ],
)
def test_api_json_with_things_around_it_is_accepted(run, graph: dict, change: Any):
    assert len(run(change(graph)).pictures) == 1


@pytest.mark.parametrize("written", ["sub\\m.safetensors", "sub/m.safetensors", "SUB/M.safetensors", "m.safetensors"])
def test_a_model_in_a_subfolder_is_found_as_other_systems_write_it(
    run, graph: dict, models: Path, tmp_path: Path, written
):
    folder = tmp_path / "more" / "diffusion_models" / "sub"
    folder.mkdir(parents=True)
    (folder / "m.safetensors").symlink_to(models / "diffusion_models" / "tiny.safetensors")
    graph["model"]["inputs"]["unet_name"] = written

    result = run(graph, models_dir=[tmp_path / "more", models])
    assert result.prompt["model"]["inputs"]["unet_name"] == "sub/m.safetensors"


def test_a_name_that_fits_several_files_lists_them(run, graph: dict, models: Path, tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / "more" / "diffusion_models" / name).mkdir(parents=True)
        (tmp_path / "more" / "diffusion_models" / name / "m.safetensors").write_bytes(b"")
    graph["model"]["inputs"]["unet_name"] = "m.safetensors"

    (problem,) = problems(run, graph, models_dir=[tmp_path / "more", models])
    assert "ambiguous in diffusion_models: a/m.safetensors, b/m.safetensors" in problem


def test_a_missing_file_that_lies_in_another_folder(run, graph: dict):
    graph["model"]["inputs"]["unet_name"] = "tiny_text.safetensors"

    assert "there is one of that name in text_encoders" in problems(run, graph)[0]


@pytest.mark.parametrize("paths", ["unet", "other\nunet\n", ["other", "unet"]])
def test_folders_may_be_named_one_by_one_as_in_extra_model_paths(run, graph: dict, models: Path, tmp_path: Path, paths):
    (tmp_path / "mine" / "unet").mkdir(parents=True)
    (tmp_path / "mine" / "unet" / "m.safetensors").symlink_to(models / "diffusion_models" / "tiny.safetensors")
    graph["model"]["inputs"]["unet_name"] = "m.safetensors"

    run(graph, models_dir=[{"base_path": str(tmp_path / "mine"), "diffusion_models": paths}, models])


def test_a_missing_models_folder(run, graph: dict, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no such models folder"):
        run(graph, models_dir=tmp_path / "nowhere")


def test_a_missing_input_picture(run, graph: dict):
    graph["load"] = node("LoadImage", image="cat.png")
    graph["show"] = node("PreviewImage", images=["load", 0])

    (problem,) = problems(run, graph)
    assert problem.startswith("node load LoadImage: names an input file that is not there")


@pytest.mark.parametrize("name", ["../cat.png", "/etc/passwd", "C:\\cat.png"])
def test_an_input_picture_outside_its_folder(run, graph: dict, name: str):
    graph["load"] = node("LoadImage", image=name)
    graph["show"] = node("PreviewImage", images=["load", 0])

    assert "node load LoadImage: input file" in problems(run, graph)[0]


SAVES = {
    "MODEL": ("NativeDiTSaveDiffusionModel", "model"),
    "CLIP": ("NativeDiTSaveTextEncoder", "clip"),
    "VAE": ("NativeDiTSaveVAE", "vae"),
    "LATENT": ("SaveLatent", "samples"),
}


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "C:\\secret.safetensors", "a\0b"])
def test_no_node_of_ours_takes_a_file_that_it_does_not_list(run, name: str):
    from nativedit.engine.declare import _no_files
    from nativedit.nodes import NODES

    with _no_files():
        schemas = {cls.__name__: cls.define_schema() for cls in NODES}
    inputs = {cls: schema.inputs for cls, schema in schemas.items()}
    choices = {cls: [entry.id for entry in entries if entry.io_type == "COMBO"] for cls, entries in inputs.items()}
    texts = {entry.id for entries in inputs.values() for entry in entries if entry.io_type == "STRING"}
    # Prompts and patterns name no file; the prefix has tests of its own, where each node that has it saves.
    assert texts == {"text", "keep", "filename_prefix"}

    graph = {cls: node(cls, **dict.fromkeys(ids, name)) for cls, ids in choices.items()}
    for cls, ids in choices.items():  # only what a save node needs is looked at
        if ids and not schemas[cls].is_output_node:
            save, entry = SAVES[schemas[cls].outputs[0].io_type]
            graph[f"save {cls}"] = node(save, **{entry: [cls, 0]})
    found = problems(run, graph)

    accepted = [
        (cls, entry)
        for cls, ids in choices.items()
        for entry in ids
        if not any(problem.startswith(f"node {cls} ") and f"{entry} " in problem for problem in found)
    ]
    assert accepted == [], "\n".join(found)


# the files


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("truncated", "truncated.safetensors: "),
        ("lfs_pointer", "a Git LFS pointer"),
        ("web_page", "a web page"),
        ("missing_layer", r"weights are missing: blocks\.1\.gate_proj\.weight"),
        ("wrong_shape", r"blocks\.1\.gate_proj\.weight is \[100, 64\], expected \[128, 64\]"),
        ("a_text_encoder", "is a text encoder, not a diffusion model; .*models/text_encoders"),
        ("a_lora", "is a LoRA .*Load LoRA"),
        ("a_vae", "is an autoencoder .*Load VAE"),
        ("unknown", "is no kind of model that NativeDiT knows"),
    ],
)
def test_a_bad_diffusion_model(run, graph: dict, file: str, expected: str):
    graph["model"]["inputs"]["unet_name"] = f"{file}.safetensors"

    message = failure(run, graph)
    assert message.startswith("node model UNETLoader: ")
    assert f"{file}.safetensors" in message and re.search(expected, message)


def test_a_model_that_only_comfyuis_core_runs(run, graph: dict, monkeypatch: pytest.MonkeyPatch):
    from dataclasses import replace
    from types import SimpleNamespace

    from nativedit.engine import host
    from nativedit.supported_models import get_architecture

    card = replace(get_architecture("prx_pixel"), title="FLUX.1", module=None)
    monkeypatch.setattr(host, "recognise", lambda *_, **__: SimpleNamespace(architecture=card, config={}))
    assert re.search("tiny.safetensors: is FLUX.1, which ComfyUI's core runs .*--server", failure(run, graph))


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("a_diffusion_model", "is a diffusion model, not a text encoder; .*models/diffusion_models"),
        ("no_tokenizer", "has no tokenizer.*put the model's tokenizer.json beside it"),
        ("missing_layer", r"weights are missing: layers\.1\.mlp\.up_proj\.weight"),
    ],
)
@pytest.mark.parametrize("loader", ["CLIPLoader", "NativeDiTLoadTextEncoder"])
def test_a_bad_text_encoder(run, loader: str, file: str, expected: str):
    graph = text_to_latent(clip=f"{file}.safetensors", own_clip_loader=loader != "CLIPLoader")

    message = failure(run, graph)
    assert message.startswith(f"node clip {loader}: ")
    assert re.search(expected, message)


def test_a_size_that_the_patches_do_not_divide(run):
    message = failure(run, text_to_latent(size=(60, 64)))

    assert message.startswith("node latent NativeDiTEmptyLatent: 60x64 does not fit PRXPixel")
    assert "multiples of 8; the nearest sizes are 56x64 and 64x64" in message


def test_a_latent_that_the_vae_does_not_decode(run, graph: dict):
    graph["big"] = node("EmptySD3LatentImage", width=64, height=64, batch_size=1)
    graph["decode"]["inputs"]["samples"] = ["big", 0]

    assert "the latent has 16 channels, the VAE pixel_space decodes 3" in failure(run, graph)


def test_a_bug_inside_a_node_names_the_node_and_keeps_the_cause(run, graph: dict, monkeypatch: pytest.MonkeyPatch):
    from nativedit.engine import nodes_latent
    from nativedit.engine.errors import NodeError

    def broken(latent: Any, vae: Any) -> None:
        raise KeyError("samples")

    monkeypatch.setattr(nodes_latent, "check_channels", broken)
    with pytest.raises(NodeError, match="node decode VAEDecode: KeyError: 'samples'") as caught:
        run(graph)
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_interrupted_run_leaves_no_picture_and_continues_later(run, graph: dict, tmp_path: Path, monkeypatch):
    from nativedit.engine import nodes_latent

    def interrupt(latent: Any, vae: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(nodes_latent, "check_channels", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(graph)
    assert not list((tmp_path / "output").glob("*.png"))

    assert "sampler" in run(graph).cached
