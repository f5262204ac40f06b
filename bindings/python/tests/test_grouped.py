"""functional.grouped_linear beside a loop over the experts."""
import pytest
import torch

from conftest import on_cpu, on_gpu
from ingot import functional

OFFSETS = [0, 0, 5, 5, 17, 18]  # of five experts, two without rows; four rows behind the last expert


def loop(x, weight, offsets, bias):
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for e, (begin, end) in enumerate(zip(offsets[:-1], offsets[1:])):
        y[begin:end] = x[begin:end] @ weight[e].T + (0 if bias is None else bias[e])
    return y


def operands(dtype, bias=True, device="cpu"):
    x, w, b = torch.randn(22, 24), torch.randn(5, 16, 24) * 0.2, torch.randn(5, 16)
    return [t.to(device, dtype).requires_grad_() for t in (x, w, b)[:3 if bias else 2]]


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
def test_outputs_and_gradients_are_those_of_a_loop(dtype, bias, device):
    if dtype is torch.float64 and device.type != "cpu":
        pytest.skip("no kernel in float64 on a GPU")
    inputs = operands(dtype, bias, device)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    y = functional.grouped_linear(inputs[0], inputs[1], torch.tensor(OFFSETS, device=device), *inputs[2:])
    expected = loop(exact[0], exact[1], OFFSETS, exact[2] if bias else None)
    dy = torch.randn(22, 16).to(device, dtype)
    y.backward(dy)
    expected.backward(dy.double())
    assert y.dtype is dtype and not y[18:].any() and not inputs[0].grad[18:].any() and not inputs[1].grad[0].any()
    for found, want in [(y, expected), *((a.grad, b.grad) for a, b in zip(inputs, exact))]:
        # One rounding of a sum in fp32 (fp64 for fp64) of at most 24 products.
        assert (found.double() - want).abs().max() <= 8 * torch.finfo(dtype).eps * want.abs().max()


@on_cpu
def test_only_needed_gradients_are_formed_and_strides_do_not_matter():
    x, w, b = operands(torch.float64)
    frozen = functional.grouped_linear(x.detach(), w, torch.tensor(OFFSETS, dtype=torch.int32), b.detach())
    frozen.sum().backward()
    dw, w.grad = w.grad, None
    wide = torch.randn(22, 48, dtype=torch.float64)
    wide[:, ::2] = x.detach()
    functional.grouped_linear(wide[:, ::2], w.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(), torch.tensor(OFFSETS), b)
    functional.grouped_linear(x, w, torch.tensor(OFFSETS), b).sum().backward()
    torch.testing.assert_close(w.grad, dw, rtol=0, atol=0)


@on_cpu
def test_first_and_second_derivatives_agree_with_differences():
    x, w, b = (t[..., :6].detach().requires_grad_() if t.dim() != 2 or t.shape[1] != 16 else t for t in operands(torch.float64))
    call = lambda *a: functional.grouped_linear(a[0], a[1], torch.tensor(OFFSETS), a[2])  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, w, b))
    assert torch.autograd.gradgradcheck(call, (x, w, b))


@on_cpu
def test_autocast_runs_in_its_dtype_and_gradients_keep_theirs():
    x, w, b = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.grouped_linear(x, w, torch.tensor(OFFSETS), b)
    y.sum().backward()
    assert y.dtype is torch.bfloat16 and x.grad.dtype is torch.float32 and w.grad.dtype is torch.float32


@on_cpu
def test_wrong_operands_are_refused_by_name():
    x, w, b = operands(torch.float32)
    at = torch.tensor(OFFSETS)
    for call, message in ((lambda: functional.grouped_linear(x[0], w, at), "expected \\(R, K\\)"),
                          (lambda: functional.grouped_linear(x, w.transpose(1, 2), at), "expected \\(R, K\\)"),
                          (lambda: functional.grouped_linear(x, w, at, b[:4]), "and \\(E, N\\)"),
                          (lambda: functional.grouped_linear(x, w, at[1:]), "offsets: found"),
                          (lambda: functional.grouped_linear(x, w, at.float()), "offsets: found"),
                          (lambda: functional.grouped_linear(x, w, at + 1), r"grouped_linear: offsets: found \(1, .*\), expected numbers that ascend from 0 to at most 22"),
                          (lambda: functional.grouped_linear(x, w, at.flip(0) - 18 + at[-1] * 0), "offset"),
                          (lambda: functional.grouped_linear(x, w, at * 2), "offsets: found"),
                          (lambda: functional.grouped_linear(x, w.double(), at), "weight: found dtype")):
        with pytest.raises(ValueError, match=message):
            call()


@on_gpu
def test_a_graph_is_replayed_with_other_offsets(device):
    x, w = (t.detach() for t in operands(torch.bfloat16, False, device))
    at = torch.tensor(OFFSETS, dtype=torch.int32, device=device)
    functional.grouped_linear(x, w, at)  # the first call loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = functional.grouped_linear(x, w, at)
    others = [0, 3, 3, 20, 20, 22]
    at.copy_(torch.tensor(others))
    graph.replay()
    want = loop(x.double(), w.double(), others, None)
    assert (y.double() - want).abs().max() <= 8 * torch.finfo(torch.bfloat16).eps * want.abs().max()


@on_gpu
def test_types_without_a_kernel_are_refused_by_name(device):
    x, w = (t.detach() for t in operands(torch.float64, False, device))
    with pytest.raises(NotImplementedError, match="expected torch.float32, torch.bfloat16 or torch.float16"):
        functional.grouped_linear(x, w, torch.tensor(OFFSETS, device=device))
