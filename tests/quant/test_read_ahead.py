"""Pieces are read ahead in order, into memory that is used again, and never more of them than promised."""

import random
import threading

import pytest
import torch

from nativedit.quant import stream
from nativedit.quant.stream import Meter, Task, run_tasks


class Watched:
    """Tasks that fill their room with their own number and look at it again when their turn comes."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.loaded, self.handled, self.most, self.rooms = [], [], 0, set()
        self._lock = threading.Lock()

    def tasks(self):
        for place, size in enumerate(self.sizes):
            yield Task(lambda room, p=place: self._load(p, room), self._handle, self.sizes[place], str(place), size)

    def _load(self, place, room):
        with self._lock:
            self.loaded.append(place)
            self.most = max(self.most, sum(self.sizes[p] for p in self.loaded[len(self.handled) :]))
        self.rooms.add(room.data_ptr())
        return place, room[: self.sizes[place]].fill_(place % 251)

    def _handle(self, loaded):
        place, piece = loaded
        assert piece.numel() == self.sizes[place] and bool((piece == place % 251).all())
        with self._lock:
            self.handled.append(place)


def test_every_piece_is_whole_when_its_turn_comes(monkeypatch):
    monkeypatch.setattr(stream, "_AHEAD", 5000)
    sizes = [random.Random(1).choice([10, 700, 3000, 9000]) for _ in range(300)]
    watched, seen = Watched(sizes), []
    run_tasks(watched.tasks(), Meter(sum(sizes), lambda done, total, label: seen.append((done, label))))
    assert watched.loaded == watched.handled == list(range(300))
    assert seen[-1] == (sum(sizes), "299")
    assert watched.most <= 9000 + max(5000, 9000)


def test_large_pieces_take_turns_in_two_rooms(monkeypatch):
    monkeypatch.setattr(stream, "_AHEAD", 1 << 20)
    watched = Watched([2 << 20] * 20)
    run_tasks(watched.tasks(), Meter(0, None))
    assert len(watched.rooms) == 2
    assert watched.most <= 2 * (2 << 20)


def test_many_small_pieces_are_read_while_one_is_worked_on():
    watched, ready = Watched([1] * 40), threading.Event()

    def slow(loaded):
        for _ in range(3000):
            if len(watched.loaded) > 20:
                break
            ready.wait(0.01)
        watched._handle(loaded)

    tasks = [Task(task.load, slow, 1, "", 1) for task in watched.tasks()]
    run_tasks(tasks, Meter(0, None))
    assert watched.handled == list(range(40))


def test_an_error_of_a_piece_comes_when_its_turn_comes():
    done = []

    def fail():
        raise ValueError("piece 2")

    tasks = [Task(lambda p=p: p, done.append, 1, "") for p in range(2)] + [Task(fail, done.append, 1, "")] * 3
    with pytest.raises(ValueError, match="piece 2"):
        run_tasks(tasks, Meter(0, None))
    assert done == [0, 1]


def test_a_task_without_a_room_makes_its_own_result():
    kept = []
    run_tasks([Task(lambda: torch.ones(3), kept.append, 12, "")] * 5, Meter(0, None))
    assert len(kept) == 5 and all(bool((piece == 1).all()) for piece in kept)
