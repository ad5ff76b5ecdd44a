"""The command line: what it prints, how it fails, from which Python it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import comfyui_files as files
import pytest
from comfyui_graphs import text_to_latent, with_picture
from comfyui_server import MODEL_FOLDERS
from support import ROOT

Called = subprocess.CompletedProcess


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in MODEL_FOLDERS:
        (folder / name).mkdir()
    files.write_models(folder)
    return folder


@pytest.fixture
def nativedit(tmp_path: Path) -> Callable[..., Called]:
    """Runs `python -m nativedit ...` in an empty folder."""

    def call(*arguments: object, command: tuple = (sys.executable, "-m", "nativedit"), **environment: str) -> Called:
        env = {**os.environ, "OMP_NUM_THREADS": "1"} | environment
        line = [str(part) for part in (*command, *arguments)]
        return subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, encoding="utf-8")

    return call


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(with_picture(text_to_latent(steps=1))), encoding="utf-8")
    return path


def main(*arguments: object) -> int:
    from nativedit.cli import main

    return main([str(argument) for argument in arguments])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., Called]:
    """The same as `nativedit`, within this process: a torch that is imported already saves seconds."""
    from nativedit import engine

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NATIVEDIT_MODELS_DIR", raising=False)

    def call(*arguments: object) -> Called:
        engine._cache = None
        code = main(*arguments)
        printed = capsys.readouterr()
        return Called(arguments, code, printed.out, printed.err)

    return call


def test_archs_lists_every_card(capsys: pytest.CaptureFixture):
    from nativedit import architectures

    assert main("archs") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [card.name for card in architectures()]

    assert main("archs", "--json") == 0
    assert [card["name"] for card in json.loads(capsys.readouterr().out)] == [card.name for card in architectures()]


def test_inspect_says_what_a_file_is(models: Path, capsys: pytest.CaptureFixture):
    file = models / "diffusion_models" / "tiny_bf16.safetensors"

    assert main("inspect", file) == 0
    printed = capsys.readouterr().out
    assert "a diffusion model" in printed and "prx_pixel" in printed and "BF16" in printed

    assert main("inspect", file, "--json") == 0
    assert json.loads(capsys.readouterr().out)["architecture"] == "prx_pixel"


def test_run_prints_where_the_picture_is(nativedit, workflow: Path, models: Path, tmp_path: Path):
    called = nativedit("run", workflow, "--models-dir", models, "--seed", 5, "--set", "sampler.steps=2")

    assert called.returncode == 0, called.stderr
    assert called.stdout.splitlines() == ["seed of node sampler: 5", str(Path("output") / "test_00001_.png")]
    assert (tmp_path / "output" / "test_00001_.png").is_file()
    assert "node sampler KSampler" in called.stderr


def test_run_quietly_and_as_json(here, workflow: Path, models: Path):
    quiet = here("run", workflow, "--models-dir", models, "--quiet")
    assert (quiet.stdout.strip(), quiet.stderr) == (str(Path("output") / "test_00001_.png"), "")

    report = json.loads(here("run", workflow, "--models-dir", models, "--json").stdout)
    assert report["seeds"] == {"sampler": 7}
    assert report["pictures"] == [str(Path("output") / "test_00002_.png")]


def test_models_are_found_by_the_variable_and_in_the_folder_one_stands_in(
    here, workflow: Path, models: Path, monkeypatch: pytest.MonkeyPatch
):
    assert here("run", workflow).returncode == 2
    with monkeypatch.context() as patch:
        patch.setenv("NATIVEDIT_MODELS_DIR", str(models))
        assert here("run", workflow).returncode == 0
    (workflow.parent / "models").symlink_to(models)
    assert here("run", workflow).returncode == 0


def test_the_demo_runs_from_a_fresh_start(nativedit):
    demo = ROOT / "example_workflows" / "api" / "nativedit_demo.json"
    called = nativedit("run", demo, "--set", "KSampler.steps=1")

    assert called.returncode == 0, called.stderr
    assert called.stdout.splitlines()[-1] == str(Path("output") / "nativedit_demo_00001_.png")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "gone.json"], "gone.json: no such workflow file"),
        (["inspect", "gone.safetensors"], "gone.safetensors: no such file or folder"),
        (["run", "workflow.json", "--set", "steps"], "--set steps: NODE.INPUT=VALUE was expected"),
        (["run", "workflow.json", "--models-dir", "nowhere"], "nowhere: no such models folder"),
        (["run", "workflow.json", "--server", "ftp://x"], "not the address of a server"),
    ],
)
def test_an_error_is_one_line_without_traceback(here, workflow: Path, arguments: list[str], expected: str):
    called = here(*arguments)

    assert (called.returncode, called.stdout) == (2, "")
    assert called.stderr.startswith("nativedit: error: ") and expected in called.stderr
    assert len(called.stderr.splitlines()) == 1


def test_every_problem_of_a_workflow_is_listed(here, workflow: Path, models: Path):
    called = here("run", workflow, "--models-dir", models, "--set", "sampler.steps=0", "--set", "vae.vae_name=x")

    assert called.returncode == 2
    assert "2 problems\n  - node " in called.stderr


@pytest.mark.parametrize("arguments", [["--debug", "inspect", "gone"], ["inspect", "gone", "--debug"]])
def test_debug_shows_where_an_error_came_from(arguments: list[str]):
    with pytest.raises(FileNotFoundError):
        main(*arguments)


def test_a_bug_is_told_from_a_mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    from nativedit import cli

    def broken(args: object) -> int:
        raise KeyError("x")

    monkeypatch.setattr(cli.Archs, "run", broken)
    assert main("archs") == 2
    assert capsys.readouterr().err == "nativedit: error: KeyError: 'x' (run with --debug to see where it came from)\n"


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    from nativedit import cli

    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.Archs, "run", interrupted)
    assert main("archs") == 130
    assert capsys.readouterr().err == "nativedit: interrupted\n"


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGTERM, vars(signal).get("SIGHUP")])
def test_who_is_told_to_end_cleans_up_as_after_ctrl_c(monkeypatch, capsys, number):
    from nativedit import cli

    cleaned = []

    def ended(args: object) -> int:
        try:
            signal.raise_signal(number)
        finally:
            cleaned.append(number)
        return 0

    monkeypatch.setattr(cli.Archs, "run", ended)
    assert main("archs") == 128 + number
    assert cleaned == [number]
    assert capsys.readouterr().err == "nativedit: interrupted\n"
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_ignored(monkeypatch, capsys):
    from nativedit import cli

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as under nohup
    try:
        monkeypatch.setattr(cli.Archs, "run", lambda args: signal.raise_signal(signal.SIGTERM) or 0)
        assert main("archs") == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture):
    assert main() == 2
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("archs", "inspect", "run"))


def test_the_help_of_every_command_can_be_shown(capsys: pytest.CaptureFixture):
    from nativedit.cli import COMMANDS

    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main(name, "--help")
        assert ended.value.code == 0
        assert f"nativedit {name}" in capsys.readouterr().out


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture):
    import nativedit as package

    with pytest.raises(SystemExit):
        main("--version")
    assert capsys.readouterr().out == f"nativedit {package.__version__}\n"


def test_a_console_that_lacks_a_character_shows_another(nativedit, tmp_path: Path):
    """Windows' consoles speak cp1252, and file names do not."""
    called = nativedit("inspect", "\u5199\u771f.safetensors", PYTHONIOENCODING="cp1252:strict", PYTHONUTF8="0")

    assert called.returncode == 2
    assert "??.safetensors" in called.stderr and "UnicodeEncodeError" not in called.stderr


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path):
    command = f'"{sys.executable}" -m nativedit archs | "{sys.executable}" -c "pass"'
    called = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)

    assert called.stderr == ""


@pytest.mark.parametrize("folder", ["ComfyUI-NativeDiT", "x"])
def test_the_folder_itself_runs_under_any_name(nativedit, models: Path, tmp_path: Path, folder: str):
    """`python path/to/the/pack ...`, as with ComfyUI's own Python: the pack's `nodes` must not come onto sys.path."""
    (tmp_path / folder).symlink_to(ROOT)
    file = models / "text_encoders" / "tiny_text.safetensors"
    called = nativedit("inspect", file, command=(sys.executable, tmp_path / folder))

    assert called.returncode == 0, called.stderr
    assert "a text encoder" in called.stdout


def test_run_as_a_folder_the_pack_is_nativedit_and_its_nodes_are_not_importable(tmp_path: Path):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['x', 'archs']; sys.path.insert(0, {str(ROOT)!r})\n"
        "try:\n    runpy.run_path(sys.path[0], run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        f"assert sys.modules['nativedit'].__path__ == [{str(ROOT)!r}]\n"
        "assert 'nodes' not in sys.modules\n"
        f"assert {str(ROOT)!r} not in sys.path\n"
    )
    called = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert called.returncode == 0, called.stderr


def test_a_command_loads_only_what_it_needs(tmp_path: Path):
    code = (
        "import sys\nfrom nativedit.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'numpy', 'safetensors', 'PIL', 'tqdm'} & set(sys.modules)"
    )
    called = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert called.returncode == 0, called.stderr


@pytest.mark.comfyui
def test_comfyuis_own_python_runs_the_pack(nativedit, comfyui_interpreter: Path, models: Path, workflow: Path):
    called = nativedit("run", workflow, "--models-dir", models, command=(comfyui_interpreter, ROOT))

    assert called.returncode == 0, called.stderr
    assert (workflow.parent / "output" / "test_00001_.png").is_file()


def test_as_a_program_garbage_is_looked_for_in_what_a_command_makes_not_in_modules():
    program = """if True:
        import gc, sys
        from nativedit import cli
        def run(args):
            print(gc.isenabled(), gc.get_freeze_count() > 0)
            return 0
        cli.Archs.run = staticmethod(run)
        sys.argv = ["nativedit", "archs"]
        sys.exit(cli.main())
    """
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "True"]
