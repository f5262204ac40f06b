"""A module's parameters as one edge of the graph (native/edge.h)."""
import sys

import pytest
import torch

import ingot
from cases import assert_same, direct, has_edge, mlp_with_edge, parameter_gradients
from ingot import _C


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_through_an_edge_are_the_same(device, recompute):
    mlp, x = mlp_with_edge(device, recompute=recompute)
    z = torch.randn(5, 16, device=device, requires_grad=True)
    found = parameter_gradients(mlp, mlp(x).square().sum() + mlp(z).sum())
    dz, z.grad = z.grad, None
    expected = parameter_gradients(mlp, direct(mlp, x).square().sum() + direct(mlp, z).sum())
    assert_same(found + [dz], expected + [z.grad])
    w = mlp.layers[1].weight
    assert_same(torch.autograd.grad(mlp(x).sum(), [w]), torch.autograd.grad(direct(mlp, x).sum(), [w]))
    y = mlp(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_an_edge_follows_changes_of_its_parameters(device):
    mlp, x = mlp_with_edge(device)
    w = mlp.layers[0].weight
    w.requires_grad_(False)
    y = mlp(x)
    w.requires_grad_(True)  # too late for y
    assert not has_edge(y) and [g is None for g in parameter_gradients(mlp, y.sum())] == [True] + [False] * 5
    mlp, x = mlp_with_edge(device)
    w = mlp.layers[0].weight
    w.data = torch.randn(24, 8, device=device)
    assert [g.shape for g in parameter_gradients(mlp, mlp(x[:, :8]).sum())] == [p.shape for p in mlp.parameters()]
    mlp, x = mlp_with_edge(device)
    old, mlp.layers[0].weight = mlp.layers[0].weight, torch.nn.Parameter(torch.randn(24, 16, device=device))
    assert all(g is not None for g in parameter_gradients(mlp, mlp(x).sum())) and old.grad is None
    mlp, x = mlp_with_edge(device)
    source, w = torch.ones(24, 1, device=device, requires_grad=True), mlp.layers[0].weight
    w.requires_grad_(False)
    w.mul_(source)  # no leaf any more
    mlp(x).sum().backward()
    assert source.grad is not None and w.grad_fn is not None
    if device.type == "cpu":
        mlp, x = mlp_with_edge(device)
        assert all(g.dtype == torch.float64 for g in parameter_gradients(mlp.double(), mlp(x.double()).sum()))


def test_parameters_may_be_swapped_behind_an_edge(device):
    mlp, x = mlp_with_edge(device)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        mlp.load_state_dict(ingot.nn.FusedMLP(16, 24, 8, device=device).state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_same(parameter_gradients(mlp, mlp(x).sum()), parameter_gradients(mlp, direct(mlp, x).sum()))


def test_an_edge_has_no_memory(device):
    mlp = ingot.nn.FusedMLP(16, 24, 8, device=device)
    edge = ingot._mlp._make_edge(*mlp.parameters())
    assert edge.numel() == sum(p.numel() for p in mlp.parameters()) and edge.untyped_storage().nbytes() == 0


def test_gradients_through_an_edge_arrive_as_early_as_possible(device):
    mlp, _ = mlp_with_edge(device)
    before, seen = torch.nn.Linear(16, 16, device=device), []
    for name, p in (("mlp", mlp.layers[0].weight), ("linear", before.weight)):
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    y = mlp(before(torch.randn(3, 16, device=device)))
    assert has_edge(y) or not _C.has_symbols()
    y.sum().backward()
    assert seen == ["mlp", "linear"]


def test_a_call_goes_on_where_no_edge_can_be_made(device, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no memory")

    mlp, x = ingot.nn.FusedMLP(16, 24, 8, device=device), torch.randn(3, 16, device=device)
    with monkeypatch.context() as m:
        m.setattr(torch, "cat", fail)
        for _ in range(4):
            y = mlp(x)
            assert not has_edge(y)
        assert_same(parameter_gradients(mlp, y.sum()), parameter_gradients(mlp, direct(mlp, x).sum()))
    for _ in range(3):
        y = mlp(x)
    assert has_edge(y) or not _C.has_symbols()


def test_an_edge_outlives_collections_of_young_objects(device):
    import gc

    mlp, x = mlp_with_edge(device)
    gc.collect()
    for _ in range(3):
        y = mlp(x)
    for generation in range(2 if sys.version_info < (3, 14) else 1):
        gc.collect(generation)
        assert has_edge(mlp(x)) or not _C.has_symbols()
    gc.collect()
    assert not has_edge(mlp(x))


def test_an_edge_keeps_no_module_alive(device):
    import copy
    import gc
    import weakref

    mlp, x = mlp_with_edge(device)
    assert torch.equal(copy.deepcopy(mlp)(x), mlp(x)) and torch.equal(copy.copy(mlp)(x), mlp(x))
    mlp.layers[0].weight.register_hook(lambda g, mlp=mlp: None)  # a cycle
    alive = weakref.ref(mlp)
    del mlp
    gc.collect()
    assert alive() is None
