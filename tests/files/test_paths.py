"""Paths from workflows and text fields stay inside their folder."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nativedit.files import UnsafePath, contained

ESCAPES = [
    "../x",
    "a/../../x",
    "..\\x",
    "a\\..\\..\\x",
    "/etc/passwd",
    "\\windows\\x",
    "\\\\server\\share\\x",
    "//server/share",
    "C:\\x",
    "c:x",
    "C:/x",
    "a\0b",
    "a\nb",
    "NUL",
    "nul.safetensors",
    "sub/CON.txt",
    "COM1",
    "LPT\u00b9.x",
    "name.",
    "name ",
    "stream:alt",
    "what?",
    "",
    " ",
    ".",
    "./",
]


@pytest.mark.parametrize("path", ESCAPES, ids=repr)
def test_refuses_what_leaves_the_folder_on_any_system(tmp_path, path):
    with pytest.raises(UnsafePath):
        contained(tmp_path, path)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("a:b", "an absolute path; 'a:' names a drive of Windows; give one relative to"),
        ("/etc/x", "an absolute path; give one relative to"),
        ("x/take 2: red", "'take 2: red' is not a file name on every operating system: it holds ':'"),
        ("what?", "'what?' is not a file name on every operating system: it holds '?'"),
        ("x.", "'x.' ends with a dot or a space, which Windows leaves off a file name"),
        ("x/Con.y", "'Con.y' is the name of a device on Windows"),
    ],
)
def test_says_what_is_wrong_with_a_name(tmp_path, path: str, says: str):
    with pytest.raises(UnsafePath) as caught:
        contained(tmp_path, path)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "path", ["a.safetensors", "sub/a.safetensors", "sub\\a.safetensors", "sub/./b", "a..b", "...x"]
)
def test_accepts_names_and_subfolders(tmp_path, path):
    target = contained(tmp_path, path)
    assert os.path.commonpath([target, tmp_path.resolve()]) == str(tmp_path.resolve())


def test_a_link_that_leads_out_is_refused(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "root"
    root.mkdir()
    os.symlink(outside, root / "link")
    with pytest.raises(UnsafePath, match="link"):
        contained(root, "link/x.safetensors")
    os.symlink("/etc/passwd", root / "file")
    with pytest.raises(UnsafePath, match="link"):
        contained(root, "file")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.text(alphabet=st.sampled_from(list("./\\:aC~\0 ")), max_size=12))
def test_the_result_is_always_inside(tmp_path, path):
    try:
        target = contained(tmp_path, path)
    except UnsafePath:
        return
    assert str(target).startswith(str(tmp_path.resolve()) + os.sep)
