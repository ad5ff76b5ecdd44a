"""Which file a name means, over trees of tiny files; what a workflow names; downloads from a server of our own."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import os
import re
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nativedit.checkpoints.download import WAITING, fetch
from nativedit.checkpoints.precision import precision_in_name, precision_of, rank, without_precision
from nativedit.checkpoints.resolve import Unresolved, resolve
from nativedit.checkpoints.workflow_files import check_workflow, model_files
from nativedit.files import FileError, OutputError
from nativedit.quant.convert import quantize

MARK = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
INT8 = torch.tensor(
    list(b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}'), dtype=torch.uint8
)


def write(path: Path, precision: str = "bf16") -> Path:
    """A tiny file in some precision."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weight = torch.zeros(256, 256)
    match precision:
        case "int8_convrot":
            state = {"a.weight": weight.to(torch.int8), "a.weight_scale": torch.ones(256, 1), "a.comfy_quant": INT8}
        case "fp8_mixed":
            state = {
                "a.weight": weight.to(torch.float8_e4m3fn),
                "a.weight_scale": torch.ones(()),
                "a.comfy_quant": MARK,
                "b.weight": weight.bfloat16(),
            }
        case "fp8":
            state = {
                "a.weight": weight.to(torch.float8_e4m3fn),
                "a.scale_weight": torch.ones(()),
                "scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn),
            }
        case "fp8_cast":
            state = {"a.weight": weight.to(torch.float8_e4m3fn)}
        case "fp16":
            state = {"a.weight": weight.half()}
        case "fp32":
            state = {"a.weight": weight}
        case _:
            state = {"a.weight": weight.bfloat16()}
    save_file(state, path)
    return path


@pytest.fixture
def models(tmp_path) -> Path:
    folder = tmp_path / "ComfyUI/models"
    for name in ("diffusion_models", "unet", "text_encoders", "clip", "vae", "loras", "checkpoints"):
        (folder / name).mkdir(parents=True)
    return folder


# ---- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "name"),
    [(p, p) for p in ("int8_convrot", "fp8_mixed", "fp8", "bf16", "fp16", "fp32")] + [("fp8_cast", "fp8")],
)
def test_the_header_tells_the_precision(stored, name, tmp_path):
    assert precision_of(write(tmp_path / "a.safetensors", stored)) == name


def test_what_we_quantize_to_nvfp4_is_nvfp4(tmp_path):
    write(tmp_path / "a.safetensors", "bf16")
    quantize(tmp_path / "a.safetensors", tmp_path / "b.safetensors", format="nvfp4", include=["*"], device="cpu")
    assert precision_of(tmp_path / "b.safetensors") == "nvfp4"


@pytest.mark.parametrize(
    ("name", "base", "precision"),
    [
        ("z_image_turbo_int8_convrot.safetensors", "z_image_turbo", "int8_convrot"),
        ("flux2_dev_fp8mixed.safetensors", "flux2_dev", "fp8_mixed"),
        ("qwen_image_edit_2511_fp8_e4m3fn.safetensors", "qwen_image_edit_2511", "fp8"),
        ("wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors", "wan2.2_t2v_high_noise_14b", "fp8"),
        ("umt5_xxl_fp8_e4m3fn_scaled.safetensors", "umt5_xxl", "fp8"),
        ("flux-2-klein-4b-fp8.safetensors", "flux-2-klein-4b", "fp8"),
        ("sub/wan2.1_t2v_1.3B_fp16.safetensors", "wan2.1_t2v_1.3b", "fp16"),
        ("flux1-dev.safetensors", "flux1-dev", "other"),
    ],
)
def test_what_published_names_say(name, base, precision):
    assert without_precision(name) == base and precision_in_name(name) == precision


def test_nvfp4_is_preferred_only_where_the_device_has_it_and_it_is_offered():
    order = ["int8_convrot", "fp8_mixed", "fp8", "bf16", "fp16", "nvfp4"]
    assert sorted(reversed(order), key=rank) == order
    assert rank("nvfp4", nvfp4=True) < rank("int8_convrot")


# ---- precedence ------------------------------------------------------------------------------------------------------


def found(name, models, **options) -> str:
    return resolve(name, models_dir=models, **options).path.relative_to(models).as_posix()


def test_an_override_wins_over_everything(models, tmp_path):
    write(models / "diffusion_models/a.safetensors")
    other = write(tmp_path / "elsewhere.safetensors")
    assert resolve("a.safetensors", models_dir=models, override=other).path == other
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors"):
        resolve("a.safetensors", models_dir=models, override=tmp_path / "gone.safetensors")


def test_a_path_of_its_own_is_that_file(models, tmp_path):
    other = write(tmp_path / "elsewhere.safetensors")
    assert resolve(other, models_dir=models).path == other


def test_the_place_is_asked_before_subfolders_and_those_before_variants(models):
    write(models / "diffusion_models/deep/a_bf16.safetensors")
    assert found("a_fp16.safetensors", models) == "diffusion_models/deep/a_bf16.safetensors"
    assert found("a_bf16.safetensors", models) == "diffusion_models/deep/a_bf16.safetensors"
    write(models / "diffusion_models/a_bf16.safetensors")
    assert found("a_bf16.safetensors", models) == "diffusion_models/a_bf16.safetensors"


@pytest.mark.parametrize("name", ["sub/a.safetensors", r"sub\a.safetensors", r".\sub\a.safetensors"])
def test_slashes_and_backslashes_are_alike(name, models):
    write(models / "loras/sub/a.safetensors")
    write(models / "loras/a.safetensors", "fp16")
    assert found(name, models) == "loras/sub/a.safetensors"


@pytest.mark.parametrize("name", ["unet/a.safetensors", "models/unet/a.safetensors", "diffusion_models/a.safetensors"])
def test_a_path_relative_to_the_models_folder_is_understood(name, models):
    write(models / "unet/a.safetensors")
    assert found(name, models) == "unet/a.safetensors"


def test_comfyuis_own_folder_is_as_good_as_its_models_folder(models):
    write(models / "vae/ae.safetensors")
    assert resolve("ae.safetensors", models_dir=models.parent).path == models / "vae/ae.safetensors"


def test_a_folder_limits_the_search(models):
    write(models / "vae/a.safetensors")
    write(models / "text_encoders/a.safetensors")
    assert found("a.safetensors", models, folder="vae") == "vae/a.safetensors"
    assert found("a.safetensors", models, folder="clip") == "text_encoders/a.safetensors"
    with pytest.raises(Unresolved):
        resolve("a.safetensors", models_dir=models, folder="loras")


def test_two_of_a_name_are_an_error_that_lists_them(models):
    write(models / "loras/x/a.safetensors")
    write(models / "loras/y/a.safetensors", "fp16")
    with pytest.raises(Unresolved, match=r"ambiguous: loras/x/a\.safetensors, loras/y/a\.safetensors"):
        resolve("a.safetensors", models_dir=models)
    assert found("y/a.safetensors", models) == "loras/y/a.safetensors"


def test_a_name_never_leaves_the_models_folder(models, tmp_path):
    write(tmp_path / "ComfyUI/secret.safetensors")
    with pytest.raises(Unresolved):
        resolve("../../secret.safetensors", models_dir=models)


# ---- variants --------------------------------------------------------------------------------------------------------

VARIANTS = ("fp16", "bf16", "fp8_cast", "fp8_mixed", "int8_convrot")


@pytest.mark.parametrize("best", range(len(VARIANTS)))
def test_the_best_precision_that_is_there_is_taken(best, models):
    for number, precision in enumerate(VARIANTS[: best + 1]):
        # names lie: the header decides
        write(
            models / f"diffusion_models/model_{('fp16', 'bf16', 'fp8', 'fp8mixed', 'fp32')[number]}.safetensors",
            precision,
        )
    answer = resolve("model", models_dir=models)
    assert answer.precision == VARIANTS[best].replace("_cast", "")


def test_an_architecture_means_its_best_file(models):
    write(models / "diffusion_models/z_image_turbo_bf16.safetensors")
    assert found("z_image", models) == "diffusion_models/z_image_turbo_bf16.safetensors"
    write(models / "diffusion_models/sub/z_image_turbo_int8_convrot.safetensors", "int8_convrot")
    assert found("z_image", models) == "diffusion_models/sub/z_image_turbo_int8_convrot.safetensors"


def test_an_architecture_is_recognised_by_its_header_under_any_name(models):
    from key_layouts import layout

    small = {key: torch.zeros(()).expand(shape) for key, shape in layout("flux2_klein_4b.comfy").items()}
    header, data = {}, 0
    for key in small:  # the header of the real thing, and a body of holes
        size = 2 * small[key].numel()
        header[key] = {"dtype": "BF16", "shape": list(small[key].shape), "data_offsets": [data, data + size]}
        data += size
    text = json.dumps(header).encode()
    with open(models / "diffusion_models/my favourite.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + data)
    write(models / "diffusion_models/other.safetensors")
    assert found("flux2", models) == "diffusion_models/my favourite.safetensors"


def test_a_damaged_file_is_not_chosen(models):
    write(models / "diffusion_models/model_bf16.safetensors")
    (models / "diffusion_models/model_int8_convrot.safetensors").write_bytes(
        b"version https://git-lfs.github.com/spec/v1"
    )
    assert found("model", models) == "diffusion_models/model_bf16.safetensors"


# ---- links, permissions, extra paths ---------------------------------------------------------------------------------


def test_links_are_followed_once_and_broken_ones_named(models, tmp_path):
    store = tmp_path / "store"
    write(store / "a.safetensors")
    os.symlink(store, models / "loras/store")
    os.symlink(store, models / "loras/again")
    os.symlink(store, store / "loop")
    assert found("a.safetensors", models) in ("loras/store/a.safetensors", "loras/again/a.safetensors")
    os.symlink(tmp_path / "gone.safetensors", models / "vae/b.safetensors")
    with pytest.raises(Unresolved, match=r"vae/b\.safetensors is a link to a file that is gone"):
        resolve("b.safetensors", models_dir=models)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_folder_is_named(models):
    closed = models / "loras/closed"
    closed.mkdir()
    closed.chmod(0)
    try:
        with pytest.raises(Unresolved, match="closed can't be read"):
            resolve("a.safetensors", models_dir=models)
    finally:
        closed.chmod(0o755)


def test_a_folder_that_refuses_to_be_listed_is_named(models, monkeypatch):
    (models / "loras/closed").mkdir()
    listed = os.scandir

    def refusing(path="."):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(Unresolved, match=r"closed can't be read \(permissions"):
        resolve("a.safetensors", models_dir=models)


YAML = """
comfyui:
  base_path: {base}
  diffusion_models: |
    big/
    bigger/
  loras: adapters
empty:
other:
  vae: {vae}
  clip: texts
"""


def test_extra_model_paths_beside_the_models_folder_is_honoured(models, tmp_path):
    pytest.importorskip("yaml")
    (models.parent / "extra_model_paths.yaml").write_text(YAML.format(base=tmp_path / "disk", vae=tmp_path / "v"))
    places = {
        "a.safetensors": tmp_path / "disk/bigger",
        "l.safetensors": tmp_path / "disk/adapters",
        "v.safetensors": tmp_path / "v",
        "t.safetensors": models.parent / "texts",
    }
    for name, place in places.items():
        write(place / name)
        assert resolve(name, models_dir=models).path == place / name
    write(models / "vae/v.safetensors")
    assert resolve("v.safetensors", models_dir=models).path == models / "vae/v.safetensors"


def test_extra_paths_that_are_the_default_come_first(models, tmp_path):
    pytest.importorskip("yaml")
    file = tmp_path / "mine.yaml"
    file.write_text(f"a:\n  base_path: {tmp_path}\n  is_default: true\n  vae: first\n")
    write(tmp_path / "first/v.safetensors")
    write(models / "vae/v.safetensors")
    assert resolve("v.safetensors", models_dir=models, extra_paths=file).path == tmp_path / "first/v.safetensors"


@pytest.mark.parametrize("text", ["a: [", "- just\n- a list"])
def test_a_file_of_paths_that_is_none_is_an_error(text, models, tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(FileError, match=r"mine\.yaml"):
        resolve("a", models_dir=models, extra_paths=tmp_path / "mine.yaml")


def test_a_file_of_paths_in_another_encoding_is_named(models, tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "mine.yaml").write_bytes("a:\n  vae: x\n".encode("utf-16"))
    with pytest.raises(FileError, match=r"mine\.yaml: is not UTF-8"):
        resolve("a", models_dir=models, extra_paths=tmp_path / "mine.yaml")


def test_a_name_without_its_ending_means_that_file_before_a_better_one(models):
    write(models / "diffusion_models/z_bf16.safetensors", "bf16")
    write(models / "diffusion_models/z_fp8.safetensors", "fp8")
    assert found("z_bf16", models) == "diffusion_models/z_bf16.safetensors"
    assert found("z", models) == "diffusion_models/z_fp8.safetensors"


def test_nothing_found_says_where_was_looked_and_what_is_similar(models):
    write(models / "diffusion_models/z_image_turbo_bf16.safetensors")
    with pytest.raises(Unresolved) as error:
        resolve("z_imag_turbo.safetensors", models_dir=models)
    assert str(models) in str(error.value) and "similar: z_image_turbo_bf16.safetensors" in str(error.value)
    with pytest.raises(
        Unresolved, match=r"--download gets flux2_dev_fp8mixed\.safetensors from https://huggingface\.co"
    ):
        resolve("flux2", models_dir=models)


# ---- workflows -------------------------------------------------------------------------------------------------------


def test_a_workflow_is_answered_file_by_file(models, tmp_path):
    write(models / "diffusion_models/z_image_turbo_bf16.safetensors")
    write(models / "vae/sub/ae.safetensors")
    url = "https://huggingface.co/a/b/resolve/main/qwen_3_4b.safetensors"
    workflow = {
        "nodes": [
            {
                "id": 1,
                "type": "UNETLoader",
                "widgets_values": [r"sub\z_image_turbo_int8_convrot.safetensors", "default"],
                "properties": {"models": []},
            },
            {"id": 2, "type": "VAELoader", "widgets_values": ["ae.safetensors"]},
            {"id": 3, "type": "MarkdownNote", "widgets_values": ["get_me.safetensors"]},
        ],
        "definitions": {
            "subgraphs": [
                {
                    "nodes": [
                        {
                            "type": "CLIPLoader",
                            "widgets_values": ["qwen_3_4b.safetensors", "lumina2"],
                            "properties": {
                                "models": [{"name": "qwen_3_4b.safetensors", "url": url, "directory": "text_encoders"}]
                            },
                        }
                    ]
                }
            ]
        },
    }
    (tmp_path / "w.json").write_text(json.dumps(workflow))
    answers = {
        answer.wanted.name.rpartition("/")[2]: answer
        for answer in check_workflow(tmp_path / "w.json", models_dir=models)
    }
    assert {name: answer.state for name, answer in answers.items()} == {
        "z_image_turbo_int8_convrot.safetensors": "another precision",
        "ae.safetensors": "present",
        "qwen_3_4b.safetensors": "missing",
    }
    assert answers["qwen_3_4b.safetensors"].url == url
    assert "z_image_turbo_bf16" in str(answers["z_image_turbo_int8_convrot.safetensors"])


def test_the_api_form_of_a_workflow_is_understood(tmp_path, models):
    workflow = {"1": {"class_type": "UNETLoader", "inputs": {"unet_name": "a b.safetensors", "seed": 3}}}
    assert [wanted.name for wanted in model_files(workflow)] == ["a b.safetensors"]


@pytest.mark.parametrize("wrapper", ["prompt", "workflow"])
def test_a_workflow_inside_what_a_server_is_sent_is_understood(wrapper, tmp_path, models):
    inner = {"1": {"class_type": "UNETLoader", "inputs": {"unet_name": "a.safetensors"}}}
    (tmp_path / "w.json").write_text(json.dumps({wrapper: inner, "client_id": "x"}))
    assert [answer.wanted.name for answer in check_workflow(tmp_path / "w.json", models_dir=models)] == [
        "a.safetensors"
    ]


@pytest.mark.parametrize("content", ['{"_class_name": "X"}', "[1]", '"a"', "{}", '{"prompt": 3}'])
def test_other_json_is_no_workflow(content, tmp_path, models):
    (tmp_path / "w.json").write_text(content)
    with pytest.raises(FileError, match=r"w\.json: is JSON, but no workflow"):
        check_workflow(tmp_path / "w.json", models_dir=models)


def test_the_demo_workflows_files_are_named(root):
    names = {
        wanted.name
        for wanted in model_files(json.loads((root / "example_workflows/api/nativedit_demo.json").read_text()))
    }
    assert names == {"nativedit_demo_prx_pixel.safetensors", "nativedit_demo_qwen3.safetensors"}


# ---- downloads -------------------------------------------------------------------------------------------------------

CONTENT = os.urandom(300_000)


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of Hugging Face as a download of one file asks for."""

    protocol_version = "HTTP/1.1"
    etag = hashlib.sha256(CONTENT).hexdigest()
    cut: int | None = None  # bytes that an answer stops after
    limit: int = len(CONTENT)  # with ``cut``: nothing is sent beyond it
    requests: list[tuple[str, str, str | None]] = []  # noqa: RUF012

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def _answer(self, body: bool):
        start = int(re.match(r"bytes=(\d+)-", self.headers.get("Range") or "bytes=0-")[1])
        type(self).requests.append((self.command, self.path, self.headers.get("Range")))
        if not self.path.endswith("/resolve/main/folder/file.safetensors"):
            self.send_error(404)
            return
        rest = CONTENT[start:]
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("ETag", f'"{self.etag}"')
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if not body:
            return
        if self.cut is not None:
            self.wfile.write(rest[: max(0, min(self.cut, self.limit - start))])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(rest)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    handler = type("Handler", (Hub,), {"requests": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    handler.address = f"http://127.0.0.1:{server.server_address[1]}"
    yield handler
    server.shutdown()
    server.server_close()


URL = "https://huggingface.co/someone/model/resolve/main/folder/file.safetensors"


def test_a_download_arrives_whole_checked_and_alone(hub, models):
    target = models / "diffusion_models/file.safetensors"
    assert fetch(URL, target, endpoint=hub.address).read_bytes() == CONTENT
    assert os.listdir(models / "diffusion_models") == ["file.safetensors"]
    count = len(hub.requests)
    fetch(URL, target, endpoint=hub.address)
    assert len(hub.requests) == count


def test_a_download_goes_on_where_it_stopped(hub, models, monkeypatch):
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    target = models / "vae/file.safetensors"
    hub.cut, hub.limit = 40_000, 200_000
    with pytest.raises(FileError, match="goes on where it stopped"):
        fetch(URL, target, endpoint=hub.address)
    (partial,) = (models / "vae" / WAITING).iterdir()
    have = partial.stat().st_size
    assert not target.exists() and 0 < have < len(CONTENT)
    assert partial.read_bytes() == CONTENT[:have]
    hub.requests.clear()
    hub.cut = None
    assert fetch(URL, target, endpoint=hub.address).read_bytes() == CONTENT
    assert [asked for command, _, asked in hub.requests if command == "GET"] == [f"bytes={have}-"]
    assert os.listdir(models / "vae") == ["file.safetensors"]


def test_a_wrong_checksum_removes_the_file(hub, models):
    hub.etag = "0" * 64
    target = models / "vae/file.safetensors"
    with pytest.raises(FileError, match="wrong checksum and was removed"):
        fetch(URL, target, endpoint=hub.address)
    assert not target.exists() and not list((models / "vae").rglob("file.safetensors"))


def test_a_full_disk_is_one_sentence(hub, models, monkeypatch):
    from huggingface_hub import file_download

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_download, "http_get", full)
    with pytest.raises(OutputError, match="the disk is full"):
        fetch(URL, models / "vae/file.safetensors", endpoint=hub.address)


def test_no_network_is_one_sentence(models):
    pytest.importorskip("huggingface_hub")
    with pytest.raises(FileError, match=r"no connection|can't be downloaded"):
        fetch(URL, models / "vae/file.safetensors", endpoint="http://127.0.0.1:9")
    assert not (models / "vae/file.safetensors").exists()


def test_resolve_downloads_the_best_file_only_when_told_and_only_when_nothing_is_here(models, monkeypatch):
    from nativedit.checkpoints import resolve as module

    asked = []
    monkeypatch.setattr(module, "fetch", lambda url, target, **options: asked.append((url, target)) or target)
    with pytest.raises(Unresolved):
        resolve("krea2", models_dir=models)
    resolve("krea2", models_dir=models, download=True)
    (url, target) = asked.pop()
    assert target == models / "diffusion_models/krea2_turbo_int8_convrot.safetensors"
    assert (
        url
        == "https://huggingface.co/Comfy-Org/Krea-2/resolve/main/diffusion_models/krea2_turbo_int8_convrot.safetensors"
    )
    write(models / "diffusion_models/krea2_turbo_fp8_scaled.safetensors", "fp8")
    assert resolve("krea2", models_dir=models, download=True).precision == "fp8" and asked == []
    with pytest.raises(Unresolved, match="no address of it is known"):
        resolve("nobody_knows.safetensors", models_dir=models, download=True)
