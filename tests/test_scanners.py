"""What scanners of node packs say of what is installed: nodesafe and comfy-import-guard (both on PyPI).

They run where they are found on PATH or in the folder $NATIVEDIT_SCANNERS (the bin of an environment that has them).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from comfyui_server import install_pack

# What nodesafe counts as high, whatever stands around it, as far as it could come up here.
ALARMING = (
    *("eval(", "exec(", "compile(", "__import__(", "importlib.import_module", "execfile(", "globals()[", "locals()["),
    *("subprocess.", "os.system(", "os.popen(", "os.exec", "os.spawn", "shell=True", "pty.spawn"),
    *("b64decode", "b85decode", "codecs.decode", "unhexlify", "bytes.fromhex", "zlib.decompress", "gzip.decompress"),
    *("marshal.loads", "pickle.load", "pickle.Unpickler", "ctypes", "winreg"),
)
# What it finds of lower rank, and why each is there. Docstrings and messages of 40 letters or more are "high-entropy
# literals" when they use many different letters, as those of ComfyUI's own nodes are.
EXPLAINED = {
    ("code_obfuscation_high_entropy", ""),
    ("code_obfuscation_suspicious_ident", ""),  # _cfg, _t5, io
    ("obfuscation_chains", ""),  # "ord(" is in "record(", "lambda _:" in a callback
    ("dynamic_attribute_access", ""),  # a torch dtype by its name, a layout of comfy_kitchen by its name
    ("network_call", "engine/remote.py"),  # a graph is sent to a ComfyUI server that the user names
    ("unsafe_deserialization", "checkpoints/pickles.py"),  # imports the name of the error; torch loads weights only
}


def scanner(name: str) -> str:
    places = os.pathsep.join(filter(None, (os.environ.get("NATIVEDIT_SCANNERS"), os.environ.get("PATH"))))
    found = shutil.which(name, path=places)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install {name}, in an environment of its own if you like")
    return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ComfyUI folder with nothing but the pack in it, as it is installed."""
    custom_nodes = tmp_path_factory.mktemp("comfyui") / "custom_nodes"
    custom_nodes.mkdir()
    install_pack(custom_nodes)
    return custom_nodes.parent


def test_no_line_alarms_a_scanner(installed: Path):
    found = []
    for file in sorted(installed.rglob("*")):
        if file.suffix in (".py", ".txt", ".toml", ".md", ".yaml", ".yml", ".json") and file.is_file():
            lines = file.read_text(encoding="utf-8").splitlines()
            found += [
                f"{file.relative_to(installed)}:{number} has {word!r}: patterns are texts for re.match and the like, "
                "modules are set with train(False), imports by name spelled `from importlib import import_module`"
                for number, line in enumerate(lines, start=1)
                for word in ALARMING
                if word in line
            ]
    assert found == []


def test_nodesafe_finds_nothing_of_high_rank_and_nothing_unexplained(installed: Path):
    pack = next((installed / "custom_nodes").iterdir())
    command = [scanner("nodesafe"), "scan", pack, "--format", "json", "--fail-on", "malicious"]
    run = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")

    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    findings = json.loads(run.stdout)["findings"]
    assert [one for one in findings if one["severity"] in ("high", "critical")] == []
    unexplained = [
        f"{one['file']}:{one['line']} {one['title']}"
        for one in findings
        if not {(one["category"], ""), (one["category"], one["file"])} & EXPLAINED
    ]
    assert unexplained == []


@pytest.mark.comfyui
def test_comfy_import_guard_finds_the_pack_safe(installed: Path, comfyui_path: Path, tmp_path: Path):
    """On the ComfyUI at hand, of which it wants a git clone: every name exists, every call and wrapper fits."""
    guard = scanner("comfy-import-guard")
    clone = tmp_path / "ComfyUI"
    for file in comfyui_path.rglob("*.py"):
        inner = file.relative_to(comfyui_path)
        if not {".venv", "venv", "custom_nodes"} & set(inner.parts):
            (clone / inner).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, clone / inner)
    for command in (
        ["init", "-q"],
        ["add", "-A", "-f"],
        ["-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "-q", "-m", "as it is"],
        ["update-ref", "refs/remotes/origin/master", "HEAD"],
    ):
        subprocess.run(["git", *command], cwd=clone, check=True)
    command = [guard, "--cache-dir", tmp_path, "--offline", "check", "--comfy-dir", installed, "--no-update"]
    run = subprocess.run([*command, "--target", "HEAD", "--strict"], capture_output=True, text=True)

    assert run.returncode == 0 and "SAFE" in run.stdout, run.stdout + run.stderr
