"""Writing: the same bytes as the safetensors library, complete or not at all."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from nativedit.files import OutputError, SafetensorsWriter, open_source, read_header, write_safetensors
from nativedit.files import atomic as atomic_module

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    raw = torch.randint(0, 2 if dtype == torch.bool else 100, (count * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    entries=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
        max_size=6,
    ),
    metadata=st.one_of(st.none(), st.just({"format": "pt"})),
)
def test_writes_the_bytes_that_the_safetensors_library_writes(tmp_path, entries, metadata):
    tensors = {name: random_tensor(dtype, tuple(shape)) for name, (dtype, shape) in entries.items()}
    save_file(tensors, tmp_path / "theirs.safetensors", metadata)
    write_safetensors(tmp_path / "ours.safetensors", tensors, metadata)
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_rows_may_come_in_any_order(tmp_path):
    whole = torch.arange(40, dtype=torch.bfloat16).reshape(10, 4)
    with SafetensorsWriter(tmp_path / "m.safetensors", [("w", "BF16", (10, 4)), ("s", "F32", ())]) as writer:
        writer.write("s", torch.tensor(2.0))
        writer.write_rows("w", 6, whole[6:])
        writer.write_rows("w", 0, whole[:6])
    with open_source(tmp_path / "m.safetensors") as source:
        assert torch.equal(source.read("w"), whole) and source.read("s").item() == 2.0


@pytest.mark.parametrize("failure", [RuntimeError("x"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, failure):
    target = tmp_path / "m.safetensors"
    save_file({"old": torch.ones(3)}, target)
    before = target.read_bytes()
    with pytest.raises(type(failure)), SafetensorsWriter(target, [("w", "F32", (1000,))]) as writer:
        writer.write_rows("w", 0, torch.zeros(10))
        raise failure
    assert target.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_an_incomplete_file_is_refused(tmp_path):
    with (
        pytest.raises(OutputError, match="1 tensors were not written, the first is 'b'"),
        SafetensorsWriter(tmp_path / "m.safetensors", [("a", "F32", (2,)), ("b", "F32", (2,))]) as writer,
    ):
        writer.write("a", torch.zeros(2))
    assert os.listdir(tmp_path) == []


def test_wrong_dtype_shape_and_too_many_bytes_are_refused(tmp_path):
    with SafetensorsWriter(tmp_path / "m.safetensors", [("a", "F32", (2,))]) as writer:
        with pytest.raises(OutputError, match="announced was F32"):
            writer.write("a", torch.zeros(2, dtype=torch.float16))
        writer.write("a", torch.zeros(2))
        with pytest.raises(OutputError, match="more bytes"):
            writer.write("a", torch.zeros(2))


def test_placeholders_without_data_are_refused_before_they_become_zeros(tmp_path):
    with pytest.raises(OutputError, match="meta device"):
        write_safetensors(tmp_path / "m.safetensors", {"a": torch.empty(2, device="meta")})
    assert os.listdir(tmp_path) == []


def test_tied_tensors_are_written_under_both_names(tmp_path):
    tied = torch.arange(4.0)
    write_safetensors(tmp_path / "m.safetensors", {"embed": tied, "head": tied, "view": tied[1:3]})
    with open_source(tmp_path / "m.safetensors") as source:
        assert torch.equal(source.read("head"), tied) and source.read("view").tolist() == [1, 2]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG])
@pytest.mark.parametrize("unnamed", [True, False])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch, code, unnamed):
    if not unnamed:
        monkeypatch.setattr(atomic_module, "_offers_unnamed_files", lambda *a: False)

    def full(fd, data, offset):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match=r"disk is full|file this large"):
        write_safetensors(tmp_path / "m.safetensors", {"a": torch.zeros(2)})
    assert os.listdir(tmp_path) == []


def test_too_little_space_is_noticed_before_the_work_begins(tmp_path):
    with (
        pytest.raises(OutputError, match=r"needs .* GB but its disk has"),
        SafetensorsWriter(tmp_path / "m.safetensors", [("a", "U8", (10**17,))]),
    ):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_target_in_use_is_one_sentence(tmp_path, monkeypatch, unnamed):
    if not unnamed:
        monkeypatch.setattr(atomic_module, "_offers_unnamed_files", lambda *a: False)
    target = tmp_path / "m.safetensors"
    save_file({"old": torch.ones(3)}, target)

    def held(source, destination):
        raise PermissionError(errno.EACCES, "being used by another process")

    monkeypatch.setattr(os, "replace", held)
    with pytest.raises(OutputError, match="another program"):
        write_safetensors(target, {"a": torch.zeros(2)})
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_a_file_that_is_held_for_a_moment_is_replaced_all_the_same(tmp_path, monkeypatch):
    """Virus scanners of Windows look into every new file."""
    replace, refusals = os.replace, [PermissionError(errno.EACCES, "being used by another process")] * 2

    def held_at_first(source, destination):
        if refusals:
            raise refusals.pop()
        replace(source, destination)

    monkeypatch.setattr(os, "replace", held_at_first)
    write_safetensors(tmp_path / "m.safetensors", {"a": torch.zeros(2)})
    assert refusals == [] and os.listdir(tmp_path) == ["m.safetensors"]


def test_what_windows_lacks_is_done_without(tmp_path, monkeypatch):
    entries = {"a": torch.arange(5), "b": torch.ones(3, 2)}
    write_safetensors(tmp_path / "posix.safetensors", entries)
    for name in ("pwrite", "preadv", "fchmod", "O_TMPFILE"):
        monkeypatch.delattr(os, name)
    for _ in range(2):  # a new file, then one in place of the old
        write_safetensors(tmp_path / "windows.safetensors", entries)
    with open_source(tmp_path / "windows.safetensors") as source:
        assert all(torch.equal(source.read(name), value) for name, value in entries.items())
        assert torch.equal(source.read_rows("b", 1, 3), entries["b"][1:3])
    assert (tmp_path / "windows.safetensors").read_bytes() == (tmp_path / "posix.safetensors").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["posix.safetensors", "windows.safetensors"]


def test_source_and_target_may_not_be_one_file(tmp_path):
    source = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(3)}, source)
    os.symlink(source, tmp_path / "link.safetensors")
    os.link(source, tmp_path / "hard.safetensors")
    for target in (
        source,
        tmp_path / "link.safetensors",
        tmp_path / "hard.safetensors",
        tmp_path / "x/../m.safetensors",
    ):
        with pytest.raises(OutputError, match="the source itself"):
            SafetensorsWriter(target, [("a", "F32", (3,))], sources=[source])


def test_a_link_is_kept_and_its_target_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    save_file({"a": torch.ones(3)}, tmp_path / "disk/m.safetensors")
    os.symlink(tmp_path / "disk/m.safetensors", tmp_path / "m.safetensors")
    write_safetensors(tmp_path / "m.safetensors", {"b": torch.zeros(1)})
    assert os.path.islink(tmp_path / "m.safetensors")
    assert set(read_header(tmp_path / "disk/m.safetensors").tensors) == {"b"}


def test_the_mode_follows_the_umask_or_the_old_file(tmp_path):
    write_safetensors(tmp_path / "m.safetensors", {"b": torch.zeros(1)})
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "m.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
    os.chmod(tmp_path / "m.safetensors", 0o640)
    write_safetensors(tmp_path / "m.safetensors", {"b": torch.zeros(1)})
    assert (tmp_path / "m.safetensors").stat().st_mode & 0o777 == 0o640


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(OutputError, match="does not exist"):
        write_safetensors(tmp_path / "no/m.safetensors", {"b": torch.zeros(1)})
    with pytest.raises(OutputError, match="is a folder"):
        write_safetensors(tmp_path, {"b": torch.zeros(1)})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="unnamed files are Linux's")
def test_a_killed_writer_leaves_nothing_behind(tmp_path):
    target = tmp_path / "m.safetensors"
    save_file({"old": torch.ones(3)}, target)
    before = target.read_bytes()
    if not atomic_module._offers_unnamed_files(str(tmp_path), str(tmp_path / "trial")):
        pytest.skip("this file system has no unnamed files")
    script = f"""
        import time, torch
        from nativedit.files import SafetensorsWriter
        with SafetensorsWriter({str(target)!r}, [("w", "F32", (1000,))]) as writer:
            writer.write_rows("w", 0, torch.zeros(500))
            print("half", flush=True)
            time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"half\n"
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    time.sleep(0.05)
    assert os.listdir(tmp_path) == ["m.safetensors"] and target.read_bytes() == before
