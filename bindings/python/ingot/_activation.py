"""Activations as PyTorch sees them (see _op)."""
import torch

from . import _C, _plain
from ._again import again, gradients
from ._op import activation_number, as_rows, empty_rows, fake_rows, register


def run_activation(x, name):
    x = as_rows(x)
    y = empty_rows(x)
    _C.activation(x, y, activation_number("activation", name))
    return y


def run_activation_backward(dy, x, name):
    dy, x = as_rows(dy), as_rows(x)
    dx = empty_rows(x)
    _C.activation_backward(dy, x, dx, activation_number("activation", name))
    return dx


def _activation_backward_formula(dy, x, name):
    return gradients(lambda x: _plain.activation(x, name), (x,), (True,), (dy,))


activation_backward_op = register(
    "activation_backward(Tensor dy, Tensor x, str name) -> Tensor",
    run_activation_backward,
    lambda dy, x, name: fake_rows(x),
    **again(_activation_backward_formula),
)


def _setup_activation(ctx, inputs, output):
    x, ctx.name = inputs
    ctx.save_for_backward(x)


activation_op = register(
    "activation(Tensor x, str name) -> Tensor",
    run_activation,
    lambda x, name: fake_rows(x),
    lambda ctx, dy: (activation_backward_op(dy, *ctx.saved_tensors, ctx.name), None),
    _setup_activation,
)
