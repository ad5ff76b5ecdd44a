"""Workflows as ComfyUI's editor saves them become what its File > Export (API) gives."""

from __future__ import annotations

import copy
import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

sys.path.insert(0, str(Path(__file__).parent))
from ui_levels import NESTED, SUBGRAPH, Level, of_everything, socket


def converted(saved: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{id: (class and inputs)} of the graph that the file means."""
    from nativedit.engine.declare import widgets_of
    from nativedit.engine.graph import read_workflow

    prompt = read_workflow(saved, widgets_of).prompt()
    return {key: {"class": node["class_type"], **node["inputs"]} for key, node in prompt.items()}


def refused(saved: dict[str, Any]) -> str:
    from nativedit.engine.errors import WorkflowError

    with pytest.raises(WorkflowError) as caught:
        converted(saved)
    return str(caught.value)


def test_the_demo_workflow_is_its_own_export():
    saved = json.loads((ROOT / "example_workflows" / "nativedit_demo.json").read_text(encoding="utf-8"))
    exported = json.loads((ROOT / "example_workflows" / "api" / "nativedit_demo.json").read_text(encoding="utf-8"))

    assert converted(saved) == {key: {"class": n["class_type"], **n["inputs"]} for key, n in exported.items()}


def text_level() -> Level:
    """A text encoder, a prompt, a reroute between them."""
    level = Level()
    level.add(1, "CLIPLoader", "", "CLIP:CLIP", ["te.safetensors", "sd3", "default"])
    level.add(2, "Reroute", ":*", ":CLIP")
    level.add(3, "CLIPTextEncode", "clip:CLIP *text:STRING", "CONDITIONING:CONDITIONING", ["a cat"])
    level.link(1, 0, 2, 0)
    level.link(2, 0, 3, 0)
    return level


def test_a_reroute_is_a_wire():
    assert converted(text_level().saved()) == {
        "1": {"class": "CLIPLoader", "clip_name": "te.safetensors", "type": "sd3", "device": "default"},
        "3": {"class": "CLIPTextEncode", "clip": ["1", 0], "text": "a cat"},
    }


def test_a_primitive_hands_its_value_on():
    level = text_level()
    level.add(4, "PrimitiveNode", "", "STRING:STRING", ["a dog"])
    level.link(4, 0, 3, 1)

    assert converted(level.saved())["3"]["text"] == "a dog"


def test_a_primitive_to_be_randomized_draws_seeds_and_nothing_else():
    """Behind the number of a primitive the editor always keeps what happens to it after a run."""
    level = sampler_level()
    level.nodes[1]["inputs"] += [socket("*seed:INT"), socket("*steps:INT")]
    level.add(4, "PrimitiveNode", "", "INT:INT", [12, "randomize"])
    level.link(4, 0, 2, 4)
    level.link(4, 0, 2, 5)
    node = converted(level.saved())["2"]

    assert (node["seed"], node["steps"]) == (-1, 12)


def test_a_choice_may_bring_widgets_and_a_new_widget_has_its_default():
    """As nodes of a server declare them: the editor saves the widgets of the choice that was made behind it."""
    from nativedit.engine.remote import _widgets
    from nativedit.engine.ui_graph import graph_from_ui

    number = ["INT", {"default": 512}]
    options = [
        {"key": "to a size", "inputs": {"required": {"width": number, "height": number}}},
        {"key": "by a factor", "inputs": {"required": {"factor": ["FLOAT", {"default": 1.0}], "mask": ["MASK"]}}},
    ]
    required = {"mode": ["COMFY_DYNAMICCOMBO_V3", {"options": options}], "way": ["COMBO", {"default": "area"}]}
    required["sharpen"] = ["BOOLEAN", {"default": False}]
    declared = list(_widgets({"required": required}))
    level = Level()
    level.add(1, "Resize", "image:IMAGE", "", ["by a factor", 2.0, "lanczos"])
    level.add(2, "Resize", "image:IMAGE", "", ["to a size", 64])
    level.add(3, "Resize", "image:IMAGE")

    found = {key: node.inputs for key, node in graph_from_ui("x", level.saved(), lambda _: declared).nodes.items()}
    assert found == {
        "1": {"mode": "by a factor", "mode.factor": 2.0, "way": "lanczos", "sharpen": False},
        "2": {"mode": "to a size", "mode.width": 64, "mode.height": 512, "way": "area", "sharpen": False},
        "3": {"mode": "to a size", "mode.width": 512, "mode.height": 512, "way": "area", "sharpen": False},
    }


def test_widgets_of_any_type_count_by_what_marks_them():
    """Numbers that may be of either kind, and what has an editor of its own; inputs that are never widgets do not."""
    from nativedit.engine.remote import _widgets
    from nativedit.engine.ui_graph import graph_from_ui

    box = ["BOUNDING_BOX", {"default": {"x": 0}, "socketless": True}]
    required = {
        "frames": ["INT", {"default": 97}],
        "rate": ["FLOAT,INT", {"default": 25.0, "widgetType": "FLOAT"}],
        "size": ["INT", {"default": 1}],
        "boxes": ["BOUNDING_BOX", {**box[1], "forceInput": True}],
        "crop": box,
        "colors": ["COMBO", {"multiselect": True, "options": ["a", "b"], "default": ["a"]}],
        "view": ["IMAGECOMPARE", {"socketless": True}],
    }
    declared = list(_widgets({"required": required}))
    level = Level()
    level.add(1, "Any", "image:IMAGE", "", [49, 24, 2, {"x": 8}, ["b"]])
    level.add(2, "Any", "image:IMAGE", "", [49])
    graph = graph_from_ui("x", level.saved(), lambda _: declared)

    rest = {"view": ["", ""]}
    assert graph.nodes["1"].inputs == {"frames": 49, "rate": 24, "size": 2, "crop": {"x": 8}, "colors": ["b"], **rest}
    assert graph.nodes["2"].inputs == {
        "frames": 49, "rate": 25.0, "size": 1, "crop": {"x": 0}, "colors": ["a"], **rest
    }  # fmt: skip
    assert graph.prompt()["1"]["inputs"]["colors"] == {"__value__": ["b"]}  # a bare list would be a link


def test_a_number_node_to_be_randomized_keeps_its_number():
    level = Level()
    level.add(1, "PrimitiveInt", "", "INT:INT", [48, "randomize"])
    level.add(2, "EmptyLatentImage", "*width:INT *height:INT", "LATENT:LATENT", [64, 32, 1])
    level.link(1, 0, 2, 0)

    assert converted(level.saved())["1"] == {"class": "PrimitiveInt", "value": 48}


def test_a_widget_turned_into_an_input_takes_its_link():
    level = text_level()
    level.add(4, "PrimitiveString", "", "STRING:STRING", ["a dog"])
    level.link(4, 0, 3, 1)

    assert converted(level.saved())["3"]["text"] == ["4", 0]


def test_notes_are_left_out():
    level = text_level()
    level.add(5, "MarkdownNote", widgets=["hello"])
    level.add(6, "Note", widgets=["hello"])

    assert set(converted(level.saved())) == {"1", "3"}


def test_widget_values_by_name_are_understood():
    level = Level()
    level.add(1, "EmptyLatentImage", "", "LATENT:LATENT", {"width": 64, "height": 32, "batch_size": 2})

    assert converted(level.saved())["1"] == {"class": "EmptyLatentImage", "width": 64, "height": 32, "batch_size": 2}


def sampler_level(control: str = "fixed") -> Level:
    level = Level()
    level.add(1, "UNETLoader", "", "MODEL:MODEL", ["m.safetensors", "default"])
    sockets = "model:MODEL positive:CONDITIONING negative:CONDITIONING latent_image:LATENT"
    level.add(2, "KSampler", sockets, "LATENT:LATENT", [42, control, 20, 4.0, "euler", "simple", 1.0])
    level.link(1, 0, 2, 0)
    return level


def test_the_control_after_a_seed_is_no_value_of_the_node():
    node = converted(sampler_level().saved())["2"]

    assert (node["seed"], node["steps"], node["cfg"], node["sampler_name"]) == (42, 20, 4.0, "euler")


def test_a_seed_to_be_randomized_is_drawn_and_embedded():
    from nativedit.engine.declare import widgets_of
    from nativedit.engine.graph import read_workflow
    from nativedit.engine.overrides import settle_seeds

    graph = read_workflow(sampler_level("randomize").saved(), widgets_of)

    assert settle_seeds(graph, None, lambda: 1234) == {"2": 1234}
    assert graph.prompt()["2"]["inputs"]["seed"] == 1234
    assert graph.workflow["nodes"][1]["widgets_values"][0] == 1234


def bypass_level(mode: int) -> Level:
    level = sampler_level()
    level.add(3, "LoraLoader", "model:MODEL clip:CLIP", "MODEL:MODEL CLIP:CLIP", ["l.safetensors", 1.0, 1.0], mode=mode)
    level.add(4, "CLIPLoader", "", "CLIP:CLIP", ["te.safetensors", "sd3", "default"])
    level.add(5, "CLIPTextEncode", "clip:CLIP", "CONDITIONING:CONDITIONING", ["x"])
    level.links.clear()
    level.link(1, 0, 3, 0)
    level.link(4, 0, 3, 1)
    level.link(3, 0, 2, 0)
    level.link(3, 1, 5, 0)
    return level


def test_a_bypassed_node_hands_on_what_has_the_same_type():
    graph = converted(bypass_level(4).saved())

    assert "3" not in graph
    assert graph["2"]["model"] == ["1", 0] and graph["5"]["clip"] == ["4", 0]


def test_a_muted_node_takes_its_links_with_it():
    graph = converted(bypass_level(2).saved())

    assert "3" not in graph
    assert "model" not in graph["2"] and "clip" not in graph["5"]


def lost(run, saved: dict[str, Any]) -> list[str]:
    from nativedit.engine.errors import WorkflowError

    with pytest.raises(WorkflowError) as caught:
        run(saved)
    return [problem for problem in caught.value.problems if "which gave it" in problem]


def test_a_required_input_that_was_lost_is_one_clear_error_with_the_muted_node(run):
    level = bypass_level(2)
    level.nodes[2]["title"] = "my style"
    level.add(9, "SaveLatent", "samples:LATENT", "", ["x"])
    level.link(2, 0, 9, 0)

    assert lost(run, level.saved()) == [
        'node 2 KSampler: input model (MODEL) is not set: node 3 LoraLoader "my style", which gave it, is muted'
    ]


def test_a_bypassed_loader_is_named_where_its_output_is_missing(run):
    level = sampler_level()
    level.nodes[0]["mode"] = 4
    level.add(3, "Reroute", ":*", ":MODEL")
    level.links.clear()
    level.link(1, 0, 3, 0)
    level.link(3, 0, 2, 0)
    level.add(9, "SaveLatent", "samples:LATENT", "", ["x"])
    level.link(2, 0, 9, 0)

    (problem,) = lost(run, level.saved())
    assert problem.endswith("is not set: node 1 UNETLoader, which gave it, is bypassed and gets none to hand on")


def test_a_muted_subgraph_and_a_muted_node_in_one_are_named(run):
    saved = outer_level(mode=2)
    saved["nodes"][1]["title"] = "Prompts"
    saved["nodes"] += [
        {"id": 9, "type": "ConditioningZeroOut", "inputs": [socket("conditioning:C")], "outputs": [socket("C:C")]},
    ]
    assert 'node 7 Inside "Prompts", which gave it, is muted' in str(whys(saved))
    inside = outer_level()
    inside["definitions"]["subgraphs"][0]["nodes"][1]["mode"] = 2
    assert whys(inside) == {("8", "conditioning_2"): "node 7:2 ConditioningZeroOut, which gave it, is muted"}


def whys(saved: dict[str, Any]) -> dict[tuple[str, str], str]:
    from nativedit.engine.declare import widgets_of
    from nativedit.engine.graph import read_workflow

    return read_workflow(saved, widgets_of).lost


def test_an_optional_input_may_lose_its_node():
    level = text_level()
    level.add(4, "PrimitiveString", "", "STRING:STRING", ["a dog"], mode=2)
    level.link(4, 0, 3, 1)

    assert converted(level.saved())["3"]["text"] == "a cat"


def inner_level() -> Level:
    """CLIP in; two conditionings out; the text of the first is promoted to the instance."""
    inner = Level()
    inner.add(1, "CLIPTextEncode", "clip:CLIP *text:STRING", "CONDITIONING:CONDITIONING", ["inner text"])
    inner.add(2, "ConditioningZeroOut", "conditioning:CONDITIONING", "CONDITIONING:CONDITIONING")
    inner.link(-10, 0, 1, 0)
    inner.link(-10, 1, 1, 1)
    inner.link(1, 0, 2, 0)
    inner.link(1, 0, -20, 0)
    inner.link(2, 0, -20, 1)
    return inner


def outer_level(values: Any = (), **more: Any) -> dict[str, Any]:
    outer = Level()
    outer.add(1, "CLIPLoader", "", "CLIP:CLIP", ["te.safetensors", "sd3", "default"])
    sockets = "positive:CONDITIONING negative:CONDITIONING"
    outer.add(7, SUBGRAPH, "clip:CLIP *text:STRING", sockets, values, **more)
    outer.add(8, "ConditioningCombine", "conditioning_1:CONDITIONING conditioning_2:CONDITIONING", "C:CONDITIONING")
    outer.link(1, 0, 7, 0)
    outer.link(7, 0, 8, 0)
    outer.link(7, 1, 8, 1)
    return outer.saved([inner_level().subgraph(SUBGRAPH, "clip:CLIP text:STRING", sockets)])


def test_a_subgraph_is_opened():
    graph = converted(outer_level())

    assert graph == {
        "1": {"class": "CLIPLoader", "clip_name": "te.safetensors", "type": "sd3", "device": "default"},
        "7:1": {"class": "CLIPTextEncode", "clip": ["1", 0], "text": "inner text"},
        "7:2": {"class": "ConditioningZeroOut", "conditioning": ["7:1", 0]},
        "8": {"class": "ConditioningCombine", "conditioning_1": ["7:1", 0], "conditioning_2": ["7:2", 0]},
    }


def test_an_instance_has_values_of_its_own():
    assert converted(outer_level(["outer text"]))["7:1"]["text"] == "outer text"


def sampler_inside(values: list[Any], shown: str, control: str = "fixed") -> dict[str, Any]:
    """A subgraph for two widgets and a model, as editors of 2026 save it: its instance names some of its inputs."""
    inner = Level()
    sockets = "model:MODEL *seed:INT *steps:INT"
    inner.add(1, "KSampler", sockets, "LATENT:LATENT", [42, control, 20, 4.0, "euler", "simple", 1.0])
    inner.add(2, "PreviewAny", "source:*")
    for link in ((-10, 0, 1, 1), (-10, 1, 1, 0), (-10, 2, 1, 2), (-10, 2, 2, 0)):
        inner.link(*link)
    outer = Level()
    outer.add(1, "UNETLoader", "", "MODEL:MODEL", ["m.safetensors", "default"])
    outer.add(2, SUBGRAPH, shown, "", values)
    number = outer.link(1, 0, 2, 9)
    for given in outer.nodes[1]["inputs"]:
        given["link"] = number if given["name"] == "model" else None
    return outer.saved([inner.subgraph(SUBGRAPH, "seed:INT model:MODEL steps:INT", "")])


@pytest.mark.parametrize("shown", ["model:MODEL", "*steps:INT model:MODEL", "*seed:INT model:MODEL *steps:INT"])
def test_an_instance_that_names_some_of_its_inputs_gets_all_of_them(shown: str):
    """The editor shows and runs an instance's own values, whatever its definition was left at."""
    graph = converted(sampler_inside([7, 12], shown))

    assert (graph["2:1"]["model"], graph["2:1"]["seed"], graph["2:1"]["steps"]) == (["1", 0], 7, 12)
    assert graph["2:2"]["source"] == 12


def test_an_instance_without_values_has_its_definitions():
    graph = converted(sampler_inside([], "model:MODEL"))

    assert (graph["2:1"]["model"], graph["2:1"]["seed"], graph["2:1"]["steps"]) == (["1", 0], 42, 20)
    assert graph["2:2"]["source"] == 20  # what the same input of the subgraph gives to the widget


def test_a_seed_in_a_subgraph_is_randomized_if_its_widget_says_so():
    assert converted(sampler_inside([7, 12], "model:MODEL", "randomize"))["2:1"]["seed"] == -1


def settled(saved: dict[str, Any]) -> tuple[dict[str, int], dict[str, Any]]:
    """The seeds that are drawn (1, 2, ...), and the workflow that goes into the picture."""
    from nativedit.engine.declare import widgets_of
    from nativedit.engine.graph import read_workflow
    from nativedit.engine.overrides import settle_seeds

    graph = read_workflow(saved, widgets_of)
    seeds = settle_seeds(graph, None, count(1).__next__)
    return seeds, graph.workflow


def test_a_drawn_seed_is_written_where_the_editor_reads_it():
    seeds, workflow = settled(sampler_inside([7, 12], "model:MODEL", "randomize"))

    assert seeds == {"2:1": 1}
    assert workflow["nodes"][1]["widgets_values"] == [1, 12]
    assert converted(workflow)["2:1"]["steps"] == 12


def test_samplers_of_one_primitive_have_one_seed():
    level = sampler_level()
    level.nodes[1]["inputs"].append(socket("*seed:INT"))
    level.add(4, "PrimitiveNode", "", "INT:INT", [12, "randomize"])
    level.add(5, "KSampler", "*seed:INT", "LATENT:LATENT", [42, "fixed", 20, 4.0, "euler", "simple", 1.0])
    level.add(6, "KSampler", "", "LATENT:LATENT", [42, "randomize", 20, 4.0, "euler", "simple", 1.0])
    level.link(4, 0, 2, 4)
    level.link(4, 0, 5, 0)
    seeds, workflow = settled(level.saved())

    assert seeds == {"2": 1, "5": 1, "6": 2}
    kept = {node["id"]: node["widgets_values"] for node in workflow["nodes"]}
    assert kept[4] == [1, "randomize"] and kept[6][0] == 2


def test_an_input_with_a_dot_in_its_name_is_set():
    from nativedit.engine.graph import read_workflow
    from nativedit.engine.overrides import apply_values

    node = {"class_type": "Resize", "inputs": {"mode.factor": 1.0}, "_meta": {"title": "v1.5"}}
    graph = read_workflow({"1": node}, None)
    apply_values(graph, {"v1.5.mode.factor": "2.5"})

    assert graph.nodes["1"].inputs == {"mode.factor": 2.5}


def test_a_subgraph_in_a_subgraph_with_eight_outputs():
    inner = Level()
    for number in range(1, 9):
        inner.add(number, "PrimitiveInt", "", "INT:INT", [number, "fixed"])
        inner.link(number, 0, -20, number - 1)
    ints = " ".join(f"o{number}:INT" for number in range(8))
    middle = Level()
    middle.add(3, NESTED, "", ints)
    for slot in range(8):
        middle.link(3, slot, -20, slot)
    outer = Level()
    outer.add(5, SUBGRAPH, "", ints)
    outer.add(6, "EmptyLatentImage", "*width:INT *height:INT *batch_size:INT", "LATENT:LATENT", [64, 64, 1])
    outer.link(5, 7, 6, 0)
    outer.link(5, 4, 6, 2)
    saved = outer.saved([inner.subgraph(NESTED, "", ints), middle.subgraph(SUBGRAPH, "", ints)])

    graph = converted(saved)

    assert {f"5:3:{number}" for number in range(1, 9)} == graph.keys() - {"6"}
    assert (graph["6"]["width"], graph["6"]["height"], graph["6"]["batch_size"]) == (["5:3:8", 0], 64, ["5:3:5", 0])


def test_a_bypassed_instance_hands_on_what_fits():
    graph = converted(outer_level(mode=4))

    assert set(graph) == {"1", "8"}
    assert "conditioning_1" not in graph["8"]


def test_a_node_inside_a_subgraph_can_be_bypassed():
    saved = outer_level()
    saved["definitions"]["subgraphs"][0]["nodes"][1]["mode"] = 4

    assert converted(saved)["8"]["conditioning_2"] == ["7:1", 0]


def test_a_workflow_of_everything_becomes_what_its_editor_exports():
    assert converted(of_everything()) == {
        "1": {"class": "UNETLoader", "unet_name": "tiny.safetensors", "weight_dtype": "default"},
        "2": {
            "class": "NativeDiTLoadTextEncoder",
            "file": "tiny_text.safetensors",
            "architecture": "auto",
            "precision": "as stored",
        },
        "4:2": {"class": "CLIPTextEncode", "clip": ["2", 0], "text": "a red circle"},
        "4:3": {"class": "CLIPTextEncode", "clip": ["2", 0], "text": "a blue square"},
        "6": {"class": "NativeDiTEmptyLatent", "model": ["1", 0], "width": ["8", 0], "height": 48, "batch_size": 1},
        "8": {"class": "PrimitiveInt", "value": 64},
        "9": {
            "class": "KSampler",
            "model": ["1", 0],
            "positive": ["4:2", 0],
            "negative": ["4:3", 0],
            "latent_image": ["6", 0],
            "seed": 42,
            "steps": 3,
            "cfg": 4.0,
            "sampler_name": "euler",
            "scheduler": "simple",
            "denoise": 1.0,
        },
        "10": {"class": "VAELoader", "vae_name": "pixel_space"},
        "11": {"class": "VAEDecode", "samples": ["9", 0], "vae": ["10", 0]},
        "12": {"class": "SaveImage", "images": ["11", 0], "filename_prefix": "everything"},
    }


def test_a_subgraph_that_the_file_lacks_is_an_error_that_names_the_node():
    saved = outer_level()
    saved["definitions"] = {}

    assert f"node 7 {SUBGRAPH}: a subgraph that the file does not define" in refused(saved)


@pytest.mark.parametrize(
    "damage",
    [
        lambda saved: saved["nodes"][0].pop("id"),
        lambda saved: saved["nodes"][0].pop("type"),
        lambda saved: saved["nodes"].append(None),
        lambda saved: saved["nodes"][1].update(inputs=[3]),
        lambda saved: saved["nodes"][1].update(widgets_values=7),
        lambda saved: saved["links"].append([1, 2]),
        lambda saved: saved["links"].append([99, -10, 0, 2, 1, "MODEL"]),
        lambda saved: saved["links"][0].__setitem__(2, "MODEL"),
    ],
)
def test_a_damaged_file_is_one_sentence(damage):
    saved = sampler_level().saved()
    saved["nodes"][1]["inputs"].append(socket("negative:CONDITIONING"))
    damage(saved)

    assert "is damaged" in refused(saved)


def test_reroutes_in_a_circle_are_one_sentence():
    level = text_level()
    level.add(8, "Reroute", ":*", ":*")
    level.add(9, "Reroute", ":*", ":*")
    for link in ((8, 0, 9, 0), (9, 0, 8, 0), (9, 0, 3, 1)):
        level.link(*link)

    assert "RecursionError" in refused(level.saved())


def test_a_subgraph_that_contains_itself_is_an_error():
    saved = outer_level()
    again = copy.deepcopy(saved["nodes"][1]) | {"id": 3}
    saved["definitions"]["subgraphs"][0]["nodes"].append(again)

    assert "node 7:3: a subgraph that contains itself" in refused(saved)


def test_a_node_that_the_engine_lacks_is_reported_and_not_dropped(run):
    from nativedit.engine.errors import WorkflowError

    level = text_level()
    level.add(4, "SomeoneElsesNode", "c:CONDITIONING", "", [1, 2])
    level.link(3, 0, 4, 0)
    with pytest.raises(WorkflowError, match="node 4 SomeoneElsesNode"):
        run(level.saved())


def test_the_saved_workflow_travels_in_the_picture(run, tmp_path: Path):
    from PIL import Image

    level = Level()
    level.add(1, "SolidMask", "", "MASK:MASK", [0.5, 8, 8])
    level.add(2, "MaskToImage", "mask:MASK", "IMAGE:IMAGE")
    level.add(3, "SaveImage", "images:IMAGE", "", ["x"])
    level.link(1, 0, 2, 0)
    level.link(2, 0, 3, 0)
    (picture,) = run(level.saved()).pictures

    with Image.open(picture) as image:
        assert json.loads(image.text["workflow"]) == level.saved()
        assert json.loads(image.text["prompt"])["3"]["class_type"] == "SaveImage"
