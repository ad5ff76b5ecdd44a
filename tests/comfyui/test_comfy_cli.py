"""comfy-cli, the tool that ComfyUI's makers give its users, runs the demo and accepts the pack.

It is a program of its own, not a package of this suite: $COMFY_CLI names it, else `comfy` on the path is used.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from comfyui_server import Server, environment, install_pack

pytestmark = pytest.mark.comfyui

COMFY = os.environ.get("COMFY_CLI") or shutil.which("comfy")


@pytest.fixture
def comfy(tmp_path: Path):
    if COMFY is None:
        pytest.skip("comfy-cli is not installed; put it into an environment of its own and set COMFY_CLI")
    # Its settings and job files go to the home folder.
    home = tmp_path / "home"
    home.mkdir()

    def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
        return subprocess.run(
            [COMFY, "--skip-prompt", *map(str, arguments)],
            cwd=cwd,
            env={**environment(), "HOME": str(home), "DO_NOT_TRACK": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.mark.parametrize("workflow", ["api/nativedit_demo.json", "nativedit_demo.json"])
def test_comfy_run_runs_the_demo_in_both_formats(server: Server, comfy, root: Path, tmp_path: Path, workflow: str):
    file = root / "example_workflows" / workflow
    host, port = server.url.removeprefix("http://").split(":")

    done = comfy("run", "--workflow", file, "--wait", "--timeout", 240, "--host", host, "--port", port, cwd=tmp_path)

    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["ok"], done.stdout + done.stderr
    [picture] = report["data"]["outputs"]
    assert server.get(picture.removeprefix(server.url)).startswith(b"\x89PNG")


def test_comfy_node_validate_accepts_the_pack(comfy, tmp_path: Path):
    pack = install_pack(tmp_path)

    done = comfy("node", "validate", cwd=pack)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout + done.stderr
