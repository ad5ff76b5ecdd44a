"""A run from file to picture: what it returns, writes, remembers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from comfyui_graphs import node, text_to_latent, with_picture
from PIL import Image
from support import rel_err


@pytest.fixture
def graph() -> dict:
    return with_picture(text_to_latent(steps=2))


def latent_of(result) -> torch.Tensor:
    return result.outputs["sampler"][0]["samples"]


def test_a_graph_gives_a_picture_and_says_how(run, graph: dict, tmp_path: Path):
    result = run(graph)

    assert result.pictures == [tmp_path / "output" / "test_00001_.png"]
    with Image.open(result.pictures[0]) as picture:
        assert (picture.size, picture.mode) == ((64, 48), "RGB")
    assert result.seeds == {"sampler": 7}
    assert result.ui["picture"] == {"images": [{"filename": "test_00001_.png", "subfolder": "", "type": "output"}]}
    assert set(result.seconds) == set(graph) and result.cached == []
    assert latent_of(result).shape == (1, 3, 48, 64)


def test_a_picture_holds_the_pixels_that_the_model_made(run, graph: dict):
    result = run(graph)

    with Image.open(result.pictures[0]) as picture:
        seen = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).reshape(48, 64, 3)
    expected = ((latent_of(result)[0].clamp(-1, 1) + 1) / 2 * 255).to(torch.uint8).movedim(0, -1)
    assert torch.equal(seen, expected)


def test_the_picture_carries_the_workflow_and_runs_again_from_it(run, graph: dict):
    workflow = {"nodes": [], "links": [], "note": "as the editor had it"}
    posted = {"prompt": graph, "extra_data": {"extra_pnginfo": {"workflow": workflow}}}
    result = run(posted)

    with Image.open(result.pictures[0]) as picture:
        text = picture.text
    assert list(text) == ["prompt", "workflow"]
    assert json.loads(text["prompt"]) == graph
    assert json.loads(text["workflow"]) == workflow
    again = run(result.pictures[0])
    assert torch.equal(latent_of(again), latent_of(result))


def test_the_second_run_says_what_it_kept_and_returns_the_same_pictures(run, graph: dict):
    first, second = run(graph), run(graph)

    assert second.pictures == first.pictures
    assert set(second.cached) == set(graph)


def test_a_change_runs_only_what_depends_on_it(run, graph: dict):
    run(graph)
    graph["negative"]["inputs"]["text"] = "blue"

    assert set(run(graph).cached) == {"model", "clip", "positive", "latent", "vae"}


def test_a_cached_samplers_settings_are_in_the_next_picture_too(run, graph: dict):
    graph["sampler"] = node(
        "NativeDiTSample", seed=7, steps=2, **{name: [name, 0] for name in ("model", "positive", "negative")}
    )
    graph["sampler"]["inputs"]["latent_image"] = ["latent", 0]
    kept = []
    for prefix in ("first", "second"):
        graph["picture"]["inputs"]["filename_prefix"] = prefix
        result = run(graph)
        with Image.open(result.pictures[0]) as picture:
            kept.append(json.loads(picture.info["prompt"])["sampler"]["_meta"]["nativedit"])

    assert "sampler" in result.cached
    assert kept[0]["steps"] == 2 and kept[0] == kept[1]


def test_a_deleted_picture_is_made_again_from_what_is_remembered(run, graph: dict):
    first = run(graph)
    first.pictures[0].unlink()

    second = run(graph)

    assert second.pictures == first.pictures and first.pictures[0].is_file()
    assert set(graph) - set(second.cached) == {"picture"}


def test_a_file_that_was_replaced_is_loaded_again(run, graph: dict, models: Path, tmp_path: Path):
    import shutil

    folder = tmp_path / "models" / "diffusion_models"
    folder.mkdir(parents=True)
    shutil.copy(models / "diffusion_models" / "tiny.safetensors", folder / "mine.safetensors")
    graph["model"]["inputs"]["unet_name"] = "mine.safetensors"
    run(graph, models_dir=[tmp_path / "models", models])
    shutil.copy(models / "diffusion_models" / "tiny_bf16.safetensors", folder / "mine.safetensors")

    assert "model" not in run(graph, models_dir=[tmp_path / "models", models]).cached


def test_an_existing_picture_is_never_overwritten(run, graph: dict, tmp_path: Path):
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "test_00041_.png").write_bytes(b"mine")

    assert run(graph).pictures == [tmp_path / "output" / "test_00042_.png"]


def test_every_picture_of_a_batch_is_saved(run, tmp_path: Path):
    result = run(with_picture(text_to_latent(steps=1, batch=3)))

    assert [path.name for path in result.pictures] == [f"test_0000{n}_.png" for n in (1, 2, 3)]


def test_a_prefix_may_name_folders_size_date_and_other_nodes_inputs(run, graph: dict, tmp_path: Path):
    prefix = "%year%/%width%x%height%/seed %sampler.seed%"
    graph["picture"]["inputs"]["filename_prefix"] = prefix.replace("%sampler.", "%KSampler.")
    result = run(graph)

    (path,) = result.pictures
    assert path.relative_to(tmp_path / "output").parts[1:] == ("64x48", "seed 7_00001_.png")
    assert path.parts[-3].isdigit() and len(path.parts[-3]) == 4


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("a_%date:yyyy-MM-dd%", "a_2026-03-04"),
        ("%date:yyMd_hhmmss%", "2634_050607"),
        ("%year%%month%%day%-%hour%%minute%%second%", "20260304-050607"),
        ("100%", "100%"),
        ("%Nothing.here%", "%Nothing.here%"),
        ("%My text.text%", "a_b"),
    ],
)
def test_templates_of_a_prefix(prefix: str, expected: str):
    import time

    from nativedit.engine.pictures import expand_prefix

    now = time.struct_time((2026, 3, 4, 5, 6, 7, 0, 0, 0))
    prompt = {"1": {"class_type": "X", "inputs": {"text": "a/b"}, "_meta": {"title": "My text"}}}

    assert expand_prefix(prefix, width=8, height=8, prompt=prompt, now=now) == expected


@pytest.mark.parametrize(
    ("prefix", "says"),
    [
        ("../x", "leaves the output folder"),
        ("/etc/x", "an absolute path"),
        ("C:\\x", "'C:' names a drive"),
        ("a:b", "'a:' names a drive"),
        ("a\\..\\..\\x", "leaves the output folder"),
        ("nul", "'nul' is the name of a device"),
        ("x/cat?", "it holds '?'"),
        ("x.", "ends with a dot"),
        ("a\0b", "control characters"),
    ],
)
def test_a_prefix_that_no_file_can_have_is_refused_before_anything_is_loaded(
    run, graph: dict, prefix: str, says: str, tmp_path: Path
):
    from nativedit.engine.errors import WorkflowError

    graph["picture"]["inputs"]["filename_prefix"] = prefix
    with pytest.raises(WorkflowError, match="node picture SaveImage: input filename_prefix: ") as caught:
        run(graph)
    assert says in str(caught.value)
    assert not list(tmp_path.rglob("*.png"))


def test_a_link_out_of_the_output_folder_is_refused(run, graph: dict, tmp_path: Path):
    from nativedit.engine.errors import NodeError

    (tmp_path / "output").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "output" / "link").symlink_to(tmp_path / "elsewhere")
    graph["picture"]["inputs"]["filename_prefix"] = "link/x"
    with pytest.raises(NodeError, match="leads out of"):
        run(graph)


def test_runs_side_by_side_take_numbers_of_their_own(tmp_path: Path):
    """Writers in three processes, one prefix, one folder."""
    code = (
        "import sys; from pathlib import Path; from nativedit.engine.pictures import NumberedFiles\n"
        "files = NumberedFiles(Path(sys.argv[1]), 'x')\n"
        "print(*(files.write(sys.argv[2].encode())['filename'] for _ in range(20)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    started = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True, cwd=tmp_path) for name in "abc"]
    named = {name: process.communicate()[0].split() for name, process in zip("abc", started, strict=True)}

    assert sum(map(len, named.values())) == len(list((tmp_path / "out").iterdir())) == 60
    for name, files in named.items():
        assert {(tmp_path / "out" / file).read_text() for file in files} == {name}


def test_a_seed_of_minus_one_is_drawn_said_and_written_into_the_picture(run, graph: dict):
    graph["sampler"]["inputs"]["seed"] = -1
    result = run(graph)

    seed = result.seeds["sampler"]
    assert seed >= 0
    with Image.open(result.pictures[0]) as picture:
        assert json.loads(picture.text["prompt"])["sampler"]["inputs"]["seed"] == seed
    again = run(graph, seed=seed)
    assert torch.equal(latent_of(again), latent_of(result))
    assert run(graph).seeds["sampler"] != seed


def test_values_can_be_set_by_id_title_or_class(run, graph: dict):
    graph["positive"]["_meta"] = {"title": "What to draw"}
    result = run(
        graph, values={"sampler.steps": "1", "what to draw.text": "green", "VAELoader.vae_name": "pixel_space"}
    )

    assert result.prompt["sampler"]["inputs"]["steps"] == 1
    assert result.prompt["positive"]["inputs"]["text"] == "green"


def test_a_textual_inversion_in_a_prompt_is_left_out_and_said(run):
    plain, other = text_to_latent(steps=1), text_to_latent(steps=1)
    plain["negative"]["inputs"]["text"] = "a blue cube"
    other["negative"]["inputs"]["text"] = "a embedding:bad-hands blue cube"

    result = run(other)

    assert torch.equal(latent_of(result), latent_of(run(plain)))
    assert [note for note in result.notes if "embedding:bad-hands is left out of the prompt" in note]


def test_a_name_of_pictographs_and_templates_is_a_file(run, graph: dict):
    graph["picture"]["inputs"]["filename_prefix"] = "%date:yyyy%/\U0001f431 v1.2 %sampler.seed%"
    (picture,) = run(graph).pictures

    assert picture.name == "\U0001f431 v1.2 %sampler.seed%_00001_.png" and picture.parent.name.isdigit()


def test_the_largest_seed_has_noise_of_its_own_for_every_step(run):
    """ComfyUI itself overflows there: the noise of ancestral steps has the next seed."""
    latents = [
        latent_of(run(text_to_latent(steps=2, sampler="euler_ancestral", seed=seed))) for seed in (2**64 - 1, 2**64 - 2)
    ]
    assert latents[0].isfinite().all() and not torch.equal(*latents)


def test_a_prompt_weight_that_is_no_number_is_an_error_of_its_node(run, graph: dict):
    from nativedit.engine.errors import NodeError

    graph["positive"]["inputs"]["text"] = "a (red:1e999) cube"
    with pytest.raises(NodeError, match=r"node positive CLIPTextEncode: .*gives 'red' a weight of inf"):
        run(graph)


def test_a_picture_for_looking_only_is_not_among_the_results(run, graph: dict, tmp_path: Path):
    graph["picture"] = node("PreviewImage", images=["decode", 0])
    result = run(graph)

    assert result.pictures == []
    (shown,) = result.ui["picture"]["images"]
    assert shown["type"] == "temp"
    assert (tmp_path / "output" / "temp" / shown["filename"]).is_file()


def test_a_latent_can_be_saved_and_loaded(run, tmp_path: Path):
    saved = run(text_to_latent(steps=1))
    (entry,) = saved.ui["save"]["latents"]
    loading = {
        "latent": node("LoadLatent", latent=f"{entry['subfolder']}/{entry['filename']} [output]"),
        "save": node("SaveLatent", samples=["latent", 0], filename_prefix="again"),
    }

    assert torch.equal(run(loading).outputs["latent"][0]["samples"], latent_of(saved))


def test_weights_in_bfloat16_compute_in_float32(run):
    """The numbers of a bfloat16 file widened beforehand, as ComfyUI's are on a CPU."""
    narrow = run(text_to_latent(steps=2, model="tiny_bf16.safetensors", clip="tiny_text_bf16.safetensors"))
    wide = run(text_to_latent(steps=2))

    assert 0 < rel_err(latent_of(narrow), latent_of(wide)) < 0.05


def test_a_file_too_large_to_widen_is_widened_layer_by_layer(run, monkeypatch: pytest.MonkeyPatch):
    from nativedit import engine
    from nativedit.engine import host

    graph = text_to_latent(steps=2, model="tiny_bf16.safetensors")
    widened = run(graph)
    engine._cache = None
    monkeypatch.setattr(host, "_free_memory", lambda: 1000)
    kept = run(graph)

    assert {p.dtype for p in widened.outputs["model"][0].module.parameters()} == {torch.float32}
    assert {p.dtype for p in kept.outputs["model"][0].module.parameters()} == {torch.bfloat16}
    assert rel_err(latent_of(kept), latent_of(widened)) <= 1e-6


def test_diffusers_and_transformers_stay_unloaded(tmp_path: Path, models: Path):
    (tmp_path / "graph.json").write_text(json.dumps(with_picture(text_to_latent(steps=1))))
    code = (
        f"import nativedit, sys; nativedit.run('graph.json', models_dir={str(models)!r}, output_dir='out')\n"
        "assert not {'diffusers', 'transformers', 'huggingface_hub', 'scipy'} & set(sys.modules), sorted(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
