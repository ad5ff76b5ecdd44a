"""`nativedit compare`: planted mistakes are named by their first stage, schedules told apart from networks."""

from __future__ import annotations

import json
from pathlib import Path

import planted_bugs
import pytest
import torch
from safetensors.torch import save_file
from support import golden_cases, rel_err

from nativedit.cli import main
from nativedit.parity import compare as compare_module
from nativedit.parity import measure
from nativedit.parity.build import build_ours, build_reference, random_module
from nativedit.parity.capture import Tap, may_attend, run_tapped
from nativedit.parity.compare import compare
from nativedit.parity.ports import find_port, ports
from nativedit.parity.stages import compare_with_reference
from nativedit.parity.subjects import Fixture, open_subject
from nativedit.supported_models import get_architecture

pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("single_thread")

WITH_REFERENCE = sorted(name for port in ports() if port.reference for name in port.tiny)
FIXTURES = {name: golden_cases(name, role="target")[0] for name in ("prx", "prx_pixel", "cogview4", "sana", "flite")}


def tiny(name: str, seed: int = 0):
    """(port, class of ours, configuration, weights, inputs) of a random tiny model."""
    port, card, generator = find_port(name), get_architecture(name), torch.Generator().manual_seed(seed)
    module = random_module(card, port.tiny[name], generator)
    return port, card.module_class(), port.tiny[name], module.state_dict(), port.inputs(port.tiny[name], generator)


def first_difference_of(cls: type, name: str):
    port, _, config, weights, inputs = tiny(name)
    reference = build_reference(port, config, weights)
    rows = compare_with_reference(port, build_ours(cls, config, weights), reference, inputs)
    return next((row for row in rows if row.differs), None)


# the network


@pytest.mark.parametrize("bug", planted_bugs.PRX_BUGS, ids=str)
def test_a_mistake_planted_in_prx_is_named_by_its_first_stage(bug, tmp_path):
    broken = planted_bugs.plant(bug, planted_bugs.PRX, tmp_path)
    assert first_difference_of(broken.PRXTransformer2DModel, "prx").name == bug.first_stage


@pytest.mark.parametrize("bug", planted_bugs.COGVIEW4_BUGS, ids=str)
def test_a_mistake_planted_in_cogview4_is_named_by_its_first_stage(bug, tmp_path):
    broken = planted_bugs.plant(bug, planted_bugs.COGVIEW4, tmp_path)
    assert first_difference_of(broken.CogView4Transformer2DModel, "cogview4").name == bug.first_stage


def test_a_copy_without_a_mistake_has_no_first_stage(tmp_path):
    none = planted_bugs.Bug("none", "EPS = 1e-6", "EPS = 1e-6", "")
    copy = planted_bugs.plant(none, planted_bugs.PRX, tmp_path)
    assert first_difference_of(copy.PRXTransformer2DModel, "prx") is None


@pytest.mark.parametrize("name", WITH_REFERENCE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_stage_of_every_port_agrees_with_its_reference(name, dtype):
    report = compare(name, dtype=dtype, seed=1)
    assert report.first_difference is None and report.first_non_finite is None, report.text()
    assert report.stages[-1].name == "output" and len(report.stages) > 40
    assert {stage.dtype for stage in report.stages} <= {dtype, "float32", "bool"}


@pytest.mark.parametrize("name", FIXTURES)
def test_a_recording_agrees_stage_by_stage(name):
    card = "f_lite" if name == "flite" else name
    report = compare(card, FIXTURES[name].folder)
    assert report.first_difference is None, report.text()
    assert len(report.stages) >= 8
    assert compare(card, FIXTURES[name].folder, dtype="bfloat16", stages=["output"]).first_difference is None


def test_a_fixture_alone_is_held_against_the_live_reference():
    report = compare(FIXTURES["prx"].folder)
    assert report.first_difference is None and len(report.stages) > 60
    assert report.first.endswith("(recording)") and report.second == "diffusers:PRXTransformer2DModel"


def test_stages_are_in_the_order_of_execution():
    names = [stage.name for stage in compare("prx").stages]
    order = ["img_in", "rope", "blocks.0.modulation", "blocks.0.attention.input", "blocks.0.attention.query"]
    order += ["blocks.0.attention", "blocks.0.mlp.input", "blocks.0", "blocks.1.attention", "final_layer", "output"]
    assert sorted(order, key=names.index) == order


def test_only_the_named_stages_are_compared():
    assert [stage.name for stage in compare("prx", stages=["blocks.1", "out*"]).stages] == ["blocks.1", "output"]
    with pytest.raises(ValueError, match=r"no stage is called blocks\.9; there are rope, img_in"):
        compare("prx", stages=["blocks.9"])


def test_seeds_change_weights_and_inputs_and_repeat():
    same, again, other = (compare("prx", stages=["output"], seed=seed).stages[0] for seed in (3, 3, 4))
    assert same == again and same.relative_error != other.relative_error


def test_the_first_tensor_that_overflows_is_named():
    """The gate's product leaves float16's range, on both sides: no difference, and no picture either."""
    port, cls, config, weights, inputs = tiny("prx")
    for key in ("gate_proj", "up_proj"):
        weights[f"blocks.1.{key}.weight"] = weights[f"blocks.1.{key}.weight"] * 1e3
    half = torch.float16
    ours, reference = build_ours(cls, config, weights, half), build_reference(port, config, weights, half)
    rows = compare_with_reference(port, ours, reference, inputs, dtype=half)
    bad = next(row for row in rows if row.non_finite or row.other_non_finite)
    assert bad.name == "blocks.1.down_proj.input" and not any(row.differs for row in rows)
    assert bad.non_finite == pytest.approx(bad.other_non_finite, rel=0.01) and bad.non_finite > 1000
    assert not any(row.non_finite for row in rows[: rows.index(bad)]) and rows[-1].non_finite


def test_an_overflow_on_one_side_alone_is_a_difference(tmp_path):
    bug = planted_bugs.Bug("overflow", "x = self.down_proj(", "x = 1e30 * 1e30 * self.down_proj(", "blocks.0")
    found = first_difference_of(planted_bugs.plant(bug, planted_bugs.PRX, tmp_path).PRXTransformer2DModel, "prx")
    assert found.name == "blocks.0" and "not finite" in found.problem and found.non_finite > 0
    assert found.other_non_finite == 0


# the schedule


def test_a_schedule_that_differs_is_reported_apart_from_the_network(capsys):
    assert main(["compare", "prx", "--stages", "output"]) == 0
    printed = capsys.readouterr().out
    assert "network: every stage agrees" in printed and "schedule: differs, not the network" in printed
    # diffusers shifts the low end twice: 0.00893 where the trainer's schedule has 0.5
    assert "4 steps: sigmas differ, most at 3: 0.50000, in diffusers' PRXPipeline 0.00893" in printed
    assert "prompt" not in printed and "the network is given" not in printed


def test_the_publishers_own_schedule_is_not_reported(capsys):
    assert main(["compare", "cogview4", "--stages", "output"]) == 0
    assert "schedule and prompts: agree" in capsys.readouterr().out


def test_a_card_that_says_something_else_about_prompts_and_timesteps_is_told(monkeypatch):
    from dataclasses import replace

    from nativedit.parity.schedule import compare_schedules

    card = get_architecture("prx")
    wrong = replace(
        card, prompt=replace(card.prompt, clean="light"), sampling=replace(card.sampling, multiplier=1000.0)
    )
    pipeline = find_port("prx").pipelines["prx"]
    found = compare_schedules(wrong, pipeline, lambda card, steps, height, width: pipeline.sigmas(steps, height, width))
    assert found.sigmas[4][0] == found.sigmas[4][1]
    told = found.differences
    assert any("prompt 'A Red Fox, oil on canvas' becomes 'A Red Fox" in line for line in told)
    assert any("at sigma 0.700 the network is given 700.00000" in line for line in told)


def test_with_noise_and_sigmas_given_both_networks_end_at_the_same_picture(tmp_path, capsys):
    noise = tmp_path / "noise.safetensors"
    save_file({"noise": torch.randn(1, 16, 8, 12, generator=torch.Generator().manual_seed(5))}, noise)
    code = main(
        ["compare", "prx", "--stages", "output", "--noise", str(noise), "--sigmas", "1,0.9,0.75,0.5,0", "--json"]
    )
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["sampling"]["sigmas"] == [1, 0.9, 0.75, 0.5, 0]
    assert len(found["sampling"]["steps"]) == 4 and max(found["sampling"]["steps"]) <= 1e-5
    assert found["sampling"]["own"] > 1e-3, "diffusers' own schedule is another one"


def test_noise_of_another_shape_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the noise is \[1, 4, 8, 8\]; PRX wants \[2 or 1, 16, height, width\]"):
        compare("prx", noise=torch.zeros(1, 4, 8, 8), sigmas=[1.0, 0.0])


@pytest.mark.parametrize("sigmas", ["1", "0,1", "1,1,0", "nan,0", "inf,0", "1,nan,0", "1,-1"])
def test_sigmas_that_do_not_fall_are_refused_with_an_example(sigmas, capsys):
    assert main(["compare", "prx", "--sigmas", sigmas]) == 2
    assert f"--sigmas {sigmas}: two or more falling numbers are needed" in capsys.readouterr().err


# checkpoints


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    _, _, _, weights, _ = tiny("prx")
    save_file(weights, tmp_path / "prx.safetensors")
    return tmp_path / "prx.safetensors"


def test_a_checkpoint_is_held_against_the_reference_with_its_own_weights(checkpoint):
    for pair in ((checkpoint,), ("prx", checkpoint), (checkpoint, "prx")):
        report = compare(*pair, stages=["output"])
        assert report.first == str(checkpoint) and report.first_difference is None


def test_two_checkpoints_are_compared_weight_by_weight(checkpoint, tmp_path, capsys):
    _, _, _, weights, _ = tiny("prx")
    changed, gate = dict(weights), "blocks.1.gate_proj.weight"
    changed[gate] = changed[gate] * 1.01
    save_file({f"model.diffusion_model.{key}": value for key, value in changed.items()}, tmp_path / "other.safetensors")
    assert main(["compare", str(tmp_path / "other.safetensors"), str(checkpoint)]) == 0
    printed = capsys.readouterr().out
    assert f"1 of {len(weights)} differ, most {gate} (rel. err 1.0e-02, SQNR 40.0 dB)" in printed
    report = compare(tmp_path / "other.safetensors", checkpoint, stages=["*"])
    assert report.first_difference.name == "blocks.1.gate_proj"


def test_a_quantized_checkpoint_is_compared_with_its_original(checkpoint, tmp_path):
    import nativedit

    quantized = tmp_path / "int8.safetensors"
    nativedit.quantize(checkpoint, quantized, format="int8_tensorwise", include=["blocks.*_proj"])
    report = compare(quantized, checkpoint, stages=["*"])
    worst = max(report.weights, key=lambda weight: weight.relative_error)
    assert worst.stored.startswith("int8") and worst.other_stored == "F32" and 20 < worst.sqnr < 60
    assert 1e-3 < report.first_difference.relative_error < 0.1
    with pytest.raises(ValueError, match=r"is quantized .* compare it with its original"):
        compare(quantized)


def test_a_wrong_checkpoint_is_refused_with_the_reason(checkpoint, tmp_path):
    _, _, _, weights, _ = tiny("cogview4")
    save_file(weights, tmp_path / "cogview4.safetensors")
    with pytest.raises(ValueError, match=r"is PRX and .* is CogView4"):
        compare(checkpoint, tmp_path / "cogview4.safetensors")
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        compare("missing.safetensors")
    with pytest.raises(ValueError, match="unknown architecture 'prxx'; the closest known: prx"):
        compare("prxx")
    with pytest.raises(ValueError, match="F-Lite has no reference that can be imported; give a recording"):
        compare("f_lite")
    with pytest.raises(ValueError, match=r"FLUX\.1 runs with ComfyUI's own code"):
        compare("flux")


def test_a_folder_that_only_looks_like_a_recording_is_named(tmp_path):
    for name in ("weights.safetensors", "io.safetensors"):
        save_file({"x": torch.zeros(1)}, tmp_path / name)
    (tmp_path / "meta.json").write_text("{}", encoding="utf-8")
    assert Fixture.is_one(tmp_path)
    with pytest.raises(ValueError, match=r"meta\.json: is no fixture's description"):
        open_subject(tmp_path)


def test_the_exit_code_says_whether_the_network_differs(monkeypatch, tmp_path, capsys):
    bug = planted_bugs.PRX_BUGS[0]
    broken = planted_bugs.plant(bug, planted_bugs.PRX, tmp_path).PRXTransformer2DModel
    from nativedit.parity import subjects

    def module(card, config, generator):
        healthy = random_module(card, config, generator)
        return build_ours(broken, config, healthy.state_dict())

    monkeypatch.setattr(subjects, "random_module", module)
    assert main(["compare", "prx"]) == 1
    assert f"first stage that differs: {bug.first_stage} (rel. err 1" in capsys.readouterr().out
    assert main(["compare", "prx", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first_stage_that_differs"] == bug.first_stage


def test_a_reference_that_is_not_installed_is_named(monkeypatch):
    from dataclasses import replace

    broken = replace(find_port("prx"), reference="no_such_package.models:Model")
    monkeypatch.setattr(compare_module, "open_subject", lambda text: replace(open_subject(text), port=broken))
    with pytest.raises(
        ImportError, match=r"no_such_package\.models:Model can't be imported .* pip install -U no_such_pac"
    ):
        compare("prx")


# what it is made of


def test_taps_take_copies_in_the_order_of_execution():
    class Inner(torch.nn.Module):
        def forward(self, x, *, scale):
            return x * scale

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            a = self.inner(x, scale=2.0)
            b = self.inner(x, scale=3.0)
            return a.add_(b)

    module = Outer()
    taps = {
        "last": Tap(""),
        "both": Tap("inner", join=torch.cat),
        "first": Tap("inner"),
        "scale": Tap("inner", "input", lambda given: torch.tensor(given["scale"])),
    }
    found = run_tapped(module, taps, lambda: module(torch.ones(1)))
    assert list(found) == ["scale", "both", "first", "last"]
    assert (found["first"].item(), found["scale"].item(), found["last"].item()) == (2.0, 2.0, 5.0)
    assert found["both"].tolist() == [2.0, 3.0]
    assert not module.inner._forward_hooks and not module._forward_hooks


def test_masks_of_every_kind_say_the_same():
    query, key = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 5, 8)
    boolean = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 0, 0, 0]], dtype=torch.bool)[:, None, None]
    additive = torch.zeros(2, 1, 1, 5).masked_fill(~boolean, torch.finfo(torch.float16).min)
    expected = boolean.expand(2, 1, 4, 5)
    assert torch.equal(may_attend(boolean, query, key), expected)
    assert torch.equal(may_attend(additive, query, key), expected)
    assert torch.equal(may_attend(additive.masked_fill(~boolean, float("-inf")), query, key), expected)
    assert bool(may_attend(None, query, key).all())


def test_measures_are_those_of_the_recordings_readme():
    a, b = torch.randn(7, generator=torch.Generator().manual_seed(1)), torch.arange(7.0)
    assert measure.relative_error(a, b) == pytest.approx(rel_err(a, b))
    assert measure.cosine(a, a * 3) == pytest.approx(1.0) and measure.cosine(a, -a) == pytest.approx(-1.0)
    assert measure.max_abs_error(a, a + 0.5) == pytest.approx(0.5)
    assert measure.relative_error(torch.zeros(3), torch.zeros(3)) == 0.0
    assert measure.non_finite(torch.tensor([1.0, float("inf"), float("nan")])) == 2
