"""What scanners of node packs say of what is installed: nodesafe and comfy-import-guard (both on PyPI).

They run where they are found on PATH or in the folder $NATIVEDIT_SCANNERS (the bin of an environment that has them).
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from comfyui_server import install_pack

# What nodesafe looks for, whatever stands around it, as far as it could come up here.
ALARMING = (
    *("eval(", "exec(", "compile(", "__import__(", "importlib.import_module", "execfile(", "globals()[", "locals()["),
    *("subprocess.", "os.system(", "os.popen(", "os.exec", "os.spawn", "shell=True", "pty.spawn"),
    *("b64decode", "b85decode", "codecs.decode", "unhexlify", "bytes.fromhex", "zlib.decompress", "gzip.decompress"),
    *("marshal.loads", "pickle.load", "pickle.Unpickler", "import pickle", "from pickle", "ctypes", "winreg"),
    *("chr(int(", "ord(", "rot13", "codecs.encode", "lambda x:", "lambda _:", "getattr(__builtins__"),
    *("requests.post", "urllib.request.urlopen", "urllib.request.Request", "http.client.HTTP", "socket.socket"),
    *("platform.system", "platform.machine", "platform.node", "getpass.getuser", "socket.gethostname"),
)
# A text constant of this length, with this many bits per character, is a coded payload to it.
LENGTH, BITS = 40, 4.5


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


@pytest.fixture(scope="module")
def parsed(installed: Path) -> list[tuple[str, ast.AST]]:
    """(file, node) of everything in its modules that these tests look at."""
    wanted = (ast.Constant, ast.Call, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign)
    return [
        (file.relative_to(installed).as_posix(), node)
        for file in sorted(installed.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, wanted)
    ]


def bits_per_character(text: str) -> float:
    return -sum(count / len(text) * math.log2(count / len(text)) for count in Counter(text).values())


def test_no_line_alarms_a_scanner(installed: Path):
    found = []
    for file in sorted(installed.rglob("*")):
        if file.suffix in (".py", ".txt", ".toml", ".md", ".yaml", ".yml", ".json") and file.is_file():
            lines = file.read_text(encoding="utf-8").splitlines()
            found += [
                f"{file.relative_to(installed)}:{number} has {word!r}: patterns are texts for re.match and the like, "
                "modules are set with train(False), imports by name spelled `from importlib import import_module`, "
                "functions whose names end in the letters of a builtin get another name, and arguments that a lambda "
                "ignores are named"
                for number, line in enumerate(lines, start=1)
                for word in ALARMING
                if word in line
            ]
    assert found == []


def test_no_text_looks_like_a_coded_payload(parsed: list[tuple[str, ast.AST]]):
    """Long texts in plain words, as English has 4.0 to 4.4 bits; comments do not count."""
    found = [
        f"{file}:{node.lineno} has {node.value[:60]!r} with {bits_per_character(node.value):.2f} bits per character: "
        "sources, shapes, keys, numbers and versions go into # comments under the docstring, or beside the argument or "
        "field that they are about; a pattern or an id is put together from named parts; the rest says it in words"
        for file, node in parsed
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) >= LENGTH
        if bits_per_character(node.value) >= BITS
    ]
    assert found == []


def test_attributes_are_looked_up_by_names_that_can_be_read(parsed: list[tuple[str, ast.AST]]):
    found = [
        f"{file}:{node.lineno}: take vars(module)[name], get_submodule(name), operator.attrgetter(name) or a dict"
        for file, node in parsed
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
        if not isinstance(node.args[1], ast.Constant)
    ]
    assert found == []


def test_names_are_words(parsed: list[tuple[str, ast.AST]]):
    """None is of two or three letters without a vowel behind an underscore, or of letters that look like digits."""
    odd = re.compile(r"_+|_+[^aeiouyAEIOUY_]{2,3}|_*[ol01iIO]{2,5}")
    found = []
    for file, node in parsed:
        names = []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            names = [node.name, *(one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs))]
        elif isinstance(node, ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        found += [f"{file}:{node.lineno}: {name} can be spelled out" for name in names if odd.fullmatch(name)]
    assert found == []


def test_nodesafe_finds_the_pack_clean(installed: Path):
    pack = next((installed / "custom_nodes").iterdir())
    run = subprocess.run(
        [scanner("nodesafe"), "scan", pack, "--format", "json"], capture_output=True, text=True, encoding="utf-8"
    )

    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    report = json.loads(run.stdout)
    found = [f"{one['file']}:{one['line']} {one['title']}" for one in report["findings"]]
    assert (report["verdict"]["label"], found) == ("clean", [])


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
