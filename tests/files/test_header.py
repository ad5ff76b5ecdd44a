"""Reading a header: what is accepted, and what is refused quickly with a sentence that says what the file is."""

from __future__ import annotations

import json
import os
import resource
import struct
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from nativedit.files import DamagedFile, FileError, NotSafetensors, read_header


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_agrees_with_the_safetensors_library(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3, 5), "b.weight": torch.zeros(2, dtype=torch.bfloat16)}, path, {"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert header.shapes() == {"a": (3, 5), "b.weight": (2,)}
    assert header.tensors["b.weight"].dtype == "BF16"
    assert header.data_start + max(info.end for info in header.tensors.values()) == header.file_size


def test_accepts_empty_tensors_scalars_and_a_file_without_tensors(tmp_path):
    save_file({"empty": torch.zeros(0, 4), "scalar": torch.tensor(1.0)}, tmp_path / "a.safetensors")
    assert read_header(tmp_path / "a.safetensors").shapes() == {"empty": (0, 4), "scalar": ()}
    raw_file(tmp_path / "b.safetensors", {"__metadata__": {"a": "b"}})
    assert read_header(tmp_path / "b.safetensors").tensors == {}


BROKEN = {
    "length beyond the file": (dict(header={"a": entry([1], 0, 4)}, data=b"1234", length=10**12), "claims"),
    "negative length": (dict(header={"a": entry([1], 0, 4)}, data=b"1234", length=2**64 - 1), "claims"),
    "truncated data": (dict(header={"a": entry([2], 0, 8)}, data=b"1234"), "4 bytes are missing"),
    "trailing bytes": (dict(header={"a": entry([1], 0, 4)}, data=b"12345678"), "4 bytes follow"),
    "overlap": (dict(header={"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, data=b"0" * 12), "overlaps"),
    "gap": (dict(header={"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, data=b"0" * 12), "gap"),
    "out of range": (dict(header={"a": entry([1], 2**62, 2**62 + 4)}, data=b"1234"), "gap|missing"),
    "negative offsets": (dict(header={"a": entry([1], -4, 0)}, data=b""), "invalid data_offsets"),
    "reversed offsets": (dict(header={"a": entry([1], 4, 0)}, data=b"1234"), "data_offsets span"),
    "size and shape differ": (dict(header={"a": entry([3], 0, 4)}, data=b"1234"), "needs 12 bytes"),
    "huge shape": (dict(header={"a": entry([2**62, 2**62], 0, 4)}, data=b"1234"), "needs"),
    "boolean size": (dict(header={"a": entry([True], 0, 4)}, data=b"1234"), "invalid shape"),
    "unknown dtype": (dict(header={"a": entry([1], 0, 4, "Q4")}, data=b"1234"), "unknown element type"),
    "entry is no object": (dict(header={"a": 3}), "not described"),
    "header is a list": (dict(header=b'{"a":[}'), "not valid JSON"),
    "metadata is no map of texts": (dict(header={"__metadata__": {"a": 1}}), "__metadata__"),
    "duplicate keys": (dict(header=b'{"a":1,"a":2}'), "twice"),
    "not UTF-8": (dict(header=b'{"\xff":1}'), "UTF-8"),
    "deep nesting": (dict(header=b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested|not valid"),
    "many brackets": (dict(header=b'{"a":[' + b"[]," * 1_600_000 + b"[]]}"), "unreasonably large"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_refuses_a_header_that_lies(tmp_path, case):
    arguments, message = BROKEN[case]
    path = raw_file(tmp_path / "bad.safetensors", **arguments)
    started = time.monotonic()
    with pytest.raises(FileError, match=message) as error:
        read_header(path)
    assert time.monotonic() - started < 5
    assert str(path) in str(error.value)


FOREIGN = {
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + b"\0" * 64, "GGUF"),
    "torch zip": (b"PK\x03\x04" + b"\0" * 64, "pickle"),
    "torch legacy": (b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19." + b"\0" * 64, "pickle"),
    "web page": (b"<!DOCTYPE html><html><body>Sign in</body></html>", "web page"),
    "json": (b'{"nodes": [], "links": []}', "JSON"),
    "text": (b"hello, this is a text about models and nothing else", "not a safetensors file"),
    "short": (b"abc", "only 3 bytes"),
    "empty": (b"", "empty file"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_says_what_another_kind_of_file_is(tmp_path, case):
    content, message = FOREIGN[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(NotSafetensors, match=message):
        read_header(tmp_path / "model.safetensors")


def test_a_folder_and_a_device_are_refused(tmp_path):
    with pytest.raises(NotSafetensors, match="a folder"):
        read_header(tmp_path)
    if os.path.exists("/dev/zero"):
        with pytest.raises(NotSafetensors, match="not a regular file"):
            read_header("/dev/zero")
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "absent.safetensors")


def test_a_hundred_megabytes_of_json_are_refused_without_reading_them(tmp_path):
    path = tmp_path / "bomb.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 100_000_000) + b'{"a":')
        file.truncate(8 + 100_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedFile, match="claims 100,000,000 bytes"):
        read_header(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_a_sparse_file_of_40_gigabytes_costs_its_header_only(tmp_path, monkeypatch):
    size = 40 * 10**9
    path = raw_file(tmp_path / "huge.safetensors", {"a": entry([size], 0, size, "U8")})
    os.truncate(path, path.stat().st_size + size)
    header_size = path.stat().st_size - size
    counted = []

    def counting(file, *arguments, _open=open, **keywords):
        opened = _open(file, *arguments, **keywords)
        if os.fspath(file) == str(path):
            read = opened.read
            proxy = type("Counting", (), {"__enter__": lambda s: s, "__exit__": lambda s, *a: opened.close()})()
            proxy.read = lambda count=-1: (lambda data: (counted.append(len(data)), data)[1])(read(count))
            proxy.seek, proxy.fileno = opened.seek, opened.fileno
            return proxy
        return opened

    monkeypatch.setattr("builtins.open", counting)
    assert read_header(path).tensors["a"].shape == (size,)
    assert 0 < sum(counted) <= header_size + 64


@settings(max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), length=st.one_of(st.none(), st.integers(0, 2**64 - 1)))
def test_any_bytes_are_read_or_refused_never_crash(tmp_path, content, length):
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(content if length is None else struct.pack("<Q", length) + content)
    try:
        read_header(path)
    except FileError as error:
        assert str(path) in str(error)


_json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "x"]), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), _json, max_size=3))
def test_any_json_header_is_read_or_refused_never_crashes(tmp_path, header):
    path = raw_file(tmp_path / "fuzz.safetensors", header, b"\0" * 16)
    try:
        read_header(path)
    except FileError as error:
        assert str(path) in str(error)
