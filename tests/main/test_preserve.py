"""A model that is run and left bit for bit as it was."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from workloads import Conv

from compilecache.errors import CompileFailed
from compilecache.preserve import preserving

CPU = torch.device("cpu")


@pytest.fixture
def net() -> nn.Module:
    """Convolution and batch norm, with gradients, in a mixture of modes."""
    torch.manual_seed(1)
    net = nn.Sequential(Conv(), nn.Dropout(0.5))
    net(torch.ones(2, 1, 6, 6)).sum().backward()
    net[1].eval()
    return net


def run(net: nn.Module) -> None:
    """What a warm-up does to a model."""
    net.train()
    net(torch.rand(2, 1, 6, 6)).sum().backward()
    net.eval()


def test_tensors_are_the_same_objects_with_the_same_bits(net: nn.Module) -> None:
    """Parameters, buffers and gradients; a gradient that was None is None again."""
    net[0].conv.bias.grad = None
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    objects = {name: id(tensor) for name, tensor in net.named_buffers()}
    gradients = {name: p.grad for name, p in net.named_parameters()}
    values = {name: g.clone() for name, g in gradients.items() if g is not None}
    with preserving(net, CPU):
        run(net)
        assert net[0].norm.num_batches_tracked == 2
        assert net[0].conv.bias.grad is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert {name: id(tensor) for name, tensor in net.named_buffers()} == objects
    for name, parameter in net.named_parameters():
        assert parameter.grad is gradients[name]
    assert all(torch.equal(gradients[name], value) for name, value in values.items())
    assert net[0].conv.bias.grad is None


def test_buffers_that_the_step_replaces_come_back(net: nn.Module) -> None:
    """A module may assign a new tensor instead of writing into the old one."""
    old = net[0].norm.running_mean
    value = old.clone()
    with preserving(net, CPU):
        net[0].norm.running_mean = torch.ones(2)
    assert net[0].norm.running_mean is old
    assert torch.equal(old, value)


def test_every_submodule_keeps_its_mode(net: nn.Module) -> None:
    """Also a mixture of train and eval."""
    modes = [module.training for module in net.modules()]
    assert len(set(modes)) == 2
    with preserving(net, CPU):
        run(net)
    assert [module.training for module in net.modules()] == modes


def test_random_numbers_go_on(net: nn.Module) -> None:
    """torch's, Python's and NumPy's."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with preserving(net, CPU):
        run(net)
        random.random()
        np.random.rand()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def test_hooks_that_take_gradients_do_not_run(net: nn.Module) -> None:
    """An optimizer that steps in backward would learn from the warm-up; later it works again."""
    weight, seen = net[0].conv.weight, []
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.shape))
    with preserving(net, CPU):
        run(net)
    assert seen == []
    run(net)
    assert seen == [weight.shape]


def test_a_changed_parameter_is_an_error(net: nn.Module) -> None:
    """It is named; everything else is put back all the same."""
    gradient = net[0].conv.weight.grad
    with pytest.raises(CompileFailed, match=r"0\.conv\.weight") as caught, preserving(net, CPU):
        run(net)
        torch.optim.SGD(net.parameters(), lr=1.0).step()
    assert caught.value.target == "0.conv.weight"
    assert net[0].conv.weight.grad is gradient


def test_a_step_that_fails_changes_nothing(net: nn.Module) -> None:
    """Its own error comes through."""
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    with pytest.raises(KeyError, match="mine"), preserving(net, CPU):
        run(net)
        raise KeyError("mine")
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert [module.training for module in net.modules()] == modes


def test_shared_parameters_are_kept_once() -> None:
    """Tied weights have one gradient."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    net(torch.ones(1, 4)).sum().backward()
    gradient = net[0].weight.grad
    with preserving(net, CPU):
        net(torch.ones(1, 4)).sum().backward()
    assert net[1].weight.grad is gradient
