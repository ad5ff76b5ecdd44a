"""Work spread over threads: results in order, errors through, torch's own settings untouched."""

import threading

import pytest
import torch

from nativedit.quant.workers import spread


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_items_order():
    assert list(spread(lambda item: item * item, range(50))) == [item * item for item in range(50)]


def test_two_pieces_are_worked_on_at_once():
    together = threading.Barrier(2)
    assert len(list(spread(lambda _: together.wait(30), range(4)))) == 4


def test_an_error_comes_through():
    def fail(item):
        if item == 3:
            raise ValueError("piece 3")
        return item

    with pytest.raises(ValueError, match="piece 3"):
        list(spread(fail, range(10)))


def test_torch_keeps_its_threads_elsewhere():
    assert set(spread(lambda _: torch.get_num_threads(), range(4))) == {1}
    assert torch.get_num_threads() == 2
    counts = []
    thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert counts == [2]
