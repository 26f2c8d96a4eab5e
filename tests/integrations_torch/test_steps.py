"""What counts as a write to what is published."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from deltarefit.integrations.torch import write_guard  # noqa: E402

pytestmark = pytest.mark.torch


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.BatchNorm1d(4)
        self.layer.register_buffer("table", torch.zeros(2), persistent=False)


def set_weight(model):
    model.layer.weight.data = torch.zeros(4)


def add_to_weight(model):
    with torch.no_grad():
        model.layer.weight.add_(1.0)


def count_batch(model):
    model.layer.num_batches_tracked.add_(1)


def rebind_mean(model):
    model.layer.running_mean = torch.ones(4)


@pytest.mark.parametrize("write", [set_weight, add_to_weight, count_batch, rebind_mean])
def test_writes_to_what_is_published_count(write):
    model = Model()
    guard = write_guard(model)
    before = guard.count_writes()
    assert guard.count_writes() == before
    write(model)
    assert guard.count_writes() != before


def rebind_table(model):
    model.layer.table = torch.ones(2)


def write_table(model):
    model.layer.table.add_(1.0)


def sparse_table(model):
    model.layer.table = torch.zeros(4, 4).to_sparse()  # which has no address


@pytest.mark.parametrize("write", [rebind_table, write_table, sparse_table])
def test_buffers_that_are_in_no_checkpoint_do_not_count(write):
    model = Model()
    guard = write_guard(model)
    before = guard.count_writes()
    write(model)
    assert guard.count_writes() == before


def test_every_model_of_a_list_counts():
    models = [Model(), Model()]
    guard = write_guard(models)
    before = guard.count_writes()
    add_to_weight(models[1])
    assert guard.count_writes() != before
