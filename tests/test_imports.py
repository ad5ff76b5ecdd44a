"""The arrows of the design point down, importing the pack costs nothing, nothing in it is refused by a registry."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from import_walk import LEVEL, Module, modules, wrong_arrows

HEAVY = ("torch", "numpy", "safetensors", "comfy", "comfy_api", "folder_paths", "comfy_kitchen")
HEAVY += ("diffusers", "transformers", "tokenizers", "PIL")


def test_every_import_of_the_pack_points_down(root: Path):
    assert wrong_arrows(root) == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("files/a.py", "from ..quant import formats", "files imports quant, which lies above it"),
        ("quant/a.py", "from .. import api", "quant imports api, which lies above it"),
        ("quant/a.py", "from .. import something", "quant imports __init__, which lies above it"),
        ("ldm/prx/a.py", "from ...supported_models import prx", "ldm imports supported_models, which lies above it"),
        ("checkpoints/a.py", "def f():\n    from ..engine import run", "checkpoints imports engine"),
        ("nodes/a.py", "from ..bridge import host", "side by side"),
        ("engine/a.py", "from ..nodes import NODES", "side by side"),
        ("quant/a.py", "import importlib\nimportlib.import_module('..api', __package__)", "quant imports api"),
        ("quant/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..api import x", "imports api"),
        ("engine/a.py", "import comfy.sd", "engine imports comfy"),
        ("ldm/a.py", "def f():\n    import folder_paths", "ldm imports folder_paths"),
        ("nodes/a.py", "from comfy_api.latest import io", "nodes imports comfy_api"),
        ("parity/a.py", "import diffusers", "parity imports diffusers"),
        ("ldm/a.py", "from einops import rearrange", "ldm imports einops"),
        ("text_encoders/a.py", "import tokenizers", "tokenizers at import time"),
        ("supported_models/a.py", "import torch", "cards are data"),
        ("api.py", "import nativedit", "import relatively"),
        ("newfolder/a.py", "x = 1", "newfolder has no layer"),
        ("files/a.py", "from ....x import y", "(above the package)"),
    ],
)
def test_a_wrong_arrow_is_seen(tmp_path: Path, file: str, source: str, complaint: str):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(source)

    problems = wrong_arrows(tmp_path)

    assert any(complaint in problem and problem.startswith(file) for problem in problems), problems


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("quant/a.py", "from .. import __version__\nfrom ..files import header\nimport torch, json"),
        ("bridge/a.py", "import comfy.sd\nimport folder_paths\nfrom ..host import Host"),
        ("nodes/io.py", "from comfy_api.latest import io"),
        ("engine/a.py", "def f():\n    import diffusers"),
        ("text_encoders/a.py", "def f():\n    import tokenizers"),
        ("supported_models/a.py", "def f():\n    import torch"),
        ("tests/a.py", "import nativedit, comfy"),
        ("__init__.py", "def f():\n    from .bridge import extension"),
    ],
)
def test_a_right_arrow_is_left_alone(tmp_path: Path, file: str, source: str):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(source)

    assert wrong_arrows(tmp_path) == []


def test_the_walk_reaches_every_part_that_exists(root: Path):
    parts = {module.part for module in modules(root)}

    assert {"files", "quant", "ldm", "text_encoders", "bridge", "nodes", "engine", "__init__"} <= parts <= set(LEVEL)


def loaded_by(statements: str, cwd: Path) -> set[str]:
    """Top-level modules that a fresh interpreter holds after these statements."""
    code = statements + "\nimport json, sys\nprint(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    run = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_importing_nativedit_loads_nothing_heavy(tmp_path: Path):
    loaded = loaded_by("import nativedit\nassert nativedit.__version__\ndir(nativedit)", tmp_path)

    assert "nativedit" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_nodes_and_cards_need_no_optional_package(tmp_path: Path):
    """Their nodes appear; what a node itself needs is said when it runs."""
    optional = ("comfy_kitchen", "diffusers", "transformers", "tokenizers", "sentencepiece", "ftfy", "huggingface_hub")
    optional += ("yaml", "tqdm", "torchsde", "PIL", "einops", "scipy")
    statements = f"""
import sys
sys.modules |= dict.fromkeys({optional!r})
import nativedit
from nativedit.nodes import NODES
from nativedit.engine.declare import node_classes
assert len(NODES) > 10 and all(node_classes()[cls.__name__] is cls for cls in NODES)
assert all(card.title for card in nativedit.architectures())
"""
    loaded_by(statements, tmp_path)


def test_the_root_imports_under_the_name_comfyui_gives_it(root: Path, tmp_path: Path):
    """ComfyUI names a pack after its path; nothing may depend on the name `nativedit`."""
    name = "/opt/ComfyUI/custom_nodes/ComfyUI-NativeDiT"
    statements = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location({name!r}, {str(root / "__init__.py")!r})
module = importlib.util.module_from_spec(spec)
sys.modules[{name!r}] = module
spec.loader.exec_module(module)
assert callable(module.comfy_entrypoint) and module.WEB_DIRECTORY == "./web"
"""
    loaded = loaded_by(statements, tmp_path)

    assert "nativedit" not in loaded
    assert loaded.isdisjoint(HEAVY)


def test_no_model_computes_in_float64(root: Path):
    found = [
        f"{module.name}:{node.lineno}"
        for module in modules(root)
        if module.part in {"ldm", "text_encoders", "autoencoders"}
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr in {"float64", "double"}
    ]
    assert found == []


def refused_by_the_registry(module: Module) -> list[str]:
    """What ComfyUI's registry standards forbid or its scan flags: code from text, installers, unchecked unpickling."""
    found = []
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                found += [
                    f"{module.name}:{node.lineno}: import {name}"
                    for name in names
                    if name.split(".")[0] in {"pip", "ensurepip", "marshal", "dill"}
                ]
            continue
        function = ast.unparse(node.func)
        constants = {
            word for part in ast.walk(node) if isinstance(part, ast.Constant) for word in str(part.value).split()
        }
        weights_only = any(k.arg == "weights_only" and getattr(k.value, "value", None) is True for k in node.keywords)
        if (
            function in {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
            or (function.startswith("subprocess.") and {"pip", "install"} & constants)
            or function in {"pickle.load", "pickle.loads", "pickle.Unpickler"}
            or (function == "torch.load" and not weights_only)
        ):
            found.append(f"{module.name}:{node.lineno}: {function}(...)")
    return found


def test_nothing_the_registry_refuses(root: Path):
    assert [problem for module in modules(root) for problem in refused_by_the_registry(module)] == []


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')",
        "exec(text)",
        "import pip",
        "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'pip', 'install', 'x'])",
        "import os\nos.system('ls')",
        "import torch\ntorch.load('x.pth')",
        "import torch\ntorch.load('x.pth', weights_only=False)",
        "import pickle\npickle.load(file)",
    ],
)
def test_what_the_registry_refuses_is_seen(tmp_path: Path, source: str):
    (tmp_path / "api.py").write_text(source)

    assert len(refused_by_the_registry(Module(tmp_path, tmp_path / "api.py"))) == 1


def test_what_only_looks_like_it_is_left_alone(tmp_path: Path):
    (tmp_path / "api.py").write_text(
        "import re, torch\nmodel.eval()\nre.compile('x')\ntorch.compile(f)\ntorch.load(p, weights_only=True)"
    )
    assert refused_by_the_registry(Module(tmp_path, tmp_path / "api.py")) == []
