"""ingot.optim.Muon against Newton-Schulz in fp64, torch.optim.Muon and torch.optim.AdamW."""
import copy
import io
import math

import pytest
import torch

import ingot
from conftest import DEVICE, on_cpu
from ingot import optim

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# One step multiplies an error in X by at most the largest slope of the polynomial, which is its slope at 0.
SLOPE = COEFFICIENTS[0]
torch_muon = pytest.importorskip("torch.optim._muon", reason="this PyTorch has no Muon of its own") if hasattr(torch.optim, "Muon") else None


def factor(u, steps=5, coefficients=COEFFICIENTS):
    """The orthogonal factor as PyTorch forms it, but in u's own type."""
    a, b, c = coefficients
    x = u / u.norm().clamp(min=1e-7)
    x = x.mT if u.shape[0] > u.shape[1] else x
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if u.shape[0] > u.shape[1] else x


class Reference:
    """The formula of the class's documentation, in fp64, matrix by matrix."""

    def __init__(self, parameters, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, row_normalise=False, adjust_lr_fn=None, ns_steps=5):
        self.p = [p.detach().double().clone() for p in parameters]
        self.buffers = [torch.zeros_like(p) for p in self.p]
        self.options = lr, weight_decay, momentum, nesterov, row_normalise, adjust_lr_fn, ns_steps

    def step(self, gradients):
        lr, decay, mu, nesterov, row_normalise, adjust, steps = self.options
        for p, buffer, g in zip(self.p, self.buffers, gradients):
            buffer.mul_(mu).add_((1 - mu) * g.double())
            u = (1 - mu) * g.double() + mu * buffer if nesterov else buffer.clone()
            if row_normalise:
                u = u / u.norm(dim=-1, keepdim=True).clamp(min=1e-7)
            x = torch.stack([factor(m, steps) for m in u]) if u.dim() == 3 else factor(u, steps)
            rows, columns = p.shape[-2:]
            size = 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
            p.mul_(1 - lr * decay).sub_(lr * size * x)


SHAPES = [(8, 24), (24, 8), (16, 16), (8, 24), (3, 8, 24), (1, 7), (16, 16), (40, 24)]


def matrices(device, dtype=torch.float32):
    torch.manual_seed(3)
    return [torch.randn(s, device=device).to(dtype).requires_grad_() for s in SHAPES]


def gradients_of(step, parameters):
    generator = torch.Generator().manual_seed(100 + step)
    return [(torch.randn(p.shape, generator=generator) * 3).to(p.device, p.dtype) for p in parameters]


def train(optimizer, parameters, steps, first=0):
    for step in range(first, first + steps):
        for p, g in zip(parameters, gradients_of(step, parameters)):
            p.grad = g
        optimizer.step()
    return parameters


OPTIONS = [{}, {"nesterov": False, "weight_decay": 0.0}, {"row_normalise": True, "momentum": 0.0}, {"adjust_lr_fn": "match_rms_adamw"},
           {"adjust_lr_fn": "original", "ns_steps": 3}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_follows_newton_schulz_in_fp64(device, dtype, options):
    if device.type == "cuda" and dtype is torch.float64:
        pytest.skip("fp64 is computed on CPUs only")
    parameters, steps, lr = matrices(device, dtype), 3, 0.05
    reference = Reference(parameters, lr=lr, **options)
    optimizer = optim.Muon(parameters, lr=lr, products="fp32", **options)
    for step in range(steps):
        train(optimizer, parameters, 1, step)
        reference.step(gradients_of(step, parameters))
    for p, want in zip(parameters, reference.p):
        # fp64: the kernel adds 1e-7 to a norm of at least 0.3, and the reference takes a maximum instead, which differs by 3e-7 of X. fp32:
        # the bound of kernels/muon/muon.test.cpp, 3e-4 for an X whose entries are below 1.3. bf16: p and the momentum are rounded at every
        # step, the momentum to 2^-9 of itself; the iteration multiplies this error by at most SLOPE.
        size = 0.2 * math.sqrt(max(p.shape[-2:])) if "match_rms_adamw" in options.values() else math.sqrt(max(1, p.shape[-2] / p.shape[-1]))
        of_factor = {torch.float64: 3e-7 * 1.3, torch.float32: 3e-4, torch.bfloat16: 2.0**-9 * SLOPE**2}[dtype]
        of_value = {torch.float64: 2.0**-50, torch.float32: 2.0**-22, torch.bfloat16: 2.0**-9}[dtype]
        allowed = steps * (lr * size * of_factor + of_value * want.abs().max().item())
        assert (p.double() - want).abs().max().item() <= allowed, f"{tuple(p.shape)}"


@on_cpu
@pytest.mark.skipif(torch_muon is None, reason="this PyTorch has no Muon")
@pytest.mark.parametrize("options", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3, "momentum": 0.5}])
def test_is_torchs_muon(monkeypatch, options):
    """With PyTorch's products widened to fp64 the only difference between the two is 1e-7 added to a norm of more than 0.3."""
    monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", lambda g, coefficients, steps, eps: factor(g, steps, coefficients))
    ours, theirs = ([p for p in matrices("cpu", torch.float64) if p.dim() == 2] for _ in range(2))
    train(optim.Muon(ours, lr=0.05, **options), ours, 3)
    train(torch.optim.Muon(theirs, lr=0.05, **options), theirs, 3)
    for a, b in zip(ours, theirs):
        assert (a - b).abs().max() <= 3 * 0.05 * 1.5 * 3e-7 * SLOPE**5


@pytest.mark.skipif(torch_muon is None, reason="this PyTorch has no Muon")
def test_is_within_torchs_own_rounding_of_torchs_muon(device):
    """PyTorch iterates in bf16, as the kernel does with products="bf16". The terms b A X and c A A X of a step have three and five factors X,
    each rounded by 2^-9, so a step errs by (3 |b| + 5 |c|) 2^-9 of X. Near the result the slope of a step is about 1, so the errors of the five
    steps add up."""
    narrow = 5 * (3 * abs(COEFFICIENTS[1]) + 5 * abs(COEFFICIENTS[2])) * 2.0**-9
    start = [p.detach() for p in matrices(device) if p.dim() == 2]
    exact = Reference(start, lr=1.0, weight_decay=0.0)
    exact.step(gradients_of(0, start))
    found = {}
    for name, make in (("torch", torch.optim.Muon), ("fp32", lambda *a, **k: optim.Muon(*a, products="fp32", **k)),
                       ("bf16", lambda *a, **k: optim.Muon(*a, products="bf16", **k))):
        found[name] = [p.clone().requires_grad_() for p in start]
        train(make(found[name], lr=1.0, weight_decay=0.0), found[name], 1)
    for i, p in enumerate(start):
        size = (exact.p[i] - p.double()).norm()
        error = {name: ((ps[i].double() - exact.p[i]).norm() / size).item() for name, ps in found.items()}
        assert error["torch"] <= narrow and error["bf16"] <= narrow and error["fp32"] <= 1e-3, (tuple(p.shape), error)
        assert (found["fp32"][i] - found["torch"][i]).norm() / size <= error["torch"] + 1e-3


def test_where_matrices_lie_changes_no_bit(device):
    apart = [p for p in matrices(device) if p.shape == (8, 24)]
    memory = torch.zeros(2, 9, 24, device=device)  # evenly in one memory, with a row between
    together = [memory[i, :8].copy_(p.detach()).requires_grad_() for i, p in enumerate(apart)]
    turned = [p.detach().t().contiguous().t().requires_grad_() for p in apart]
    as_bank = [torch.stack([p.detach() for p in apart]).requires_grad_()]
    for parameters in (apart, together, turned):
        train(optim.Muon(parameters, lr=0.1), parameters, 2)
    optimizer = optim.Muon(as_bank, lr=0.1)
    for step in range(2):
        as_bank[0].grad = torch.stack(gradients_of(step, apart))
        optimizer.step()
    for i, p in enumerate(apart):
        assert torch.equal(p, together[i]) and torch.equal(p, turned[i]) and torch.equal(p, as_bank[0][i])
    assert not memory[:, 8].any()
    assert optim._Bank([p.detach() for p in together], (8, 24), torch.float32).all.data_ptr() == memory.data_ptr()  # and no copy was made
    lone = optim._Bank([together[1].detach(), together[0].detach()], (8, 24), torch.float32)  # the other way round
    assert lone.all.data_ptr() not in (memory.data_ptr(), together[1].data_ptr())


def test_matrices_at_uneven_places_of_one_memory(device):
    memory = torch.zeros(1000, device=device)
    for starts in ((0, 200, 500), (0, 300, 600), (600, 0, 300)):
        memory.copy_(torch.linspace(-1, 1, 1000))
        uneven = [memory[at:at + 192].view(8, 24).requires_grad_() for at in starts]
        apart = [p.detach().clone().requires_grad_() for p in uneven]
        between = torch.ones(1000, dtype=torch.bool)
        for at in starts:
            between[at:at + 192] = False
        before = memory[between.to(device)].clone()
        for parameters in (uneven, apart):
            train(optim.Muon(parameters, lr=0.1), parameters, 2)
        for p, q in zip(uneven, apart):
            assert torch.equal(p, q), starts
        assert torch.equal(memory[between.to(device)], before), starts


def test_one_call_for_a_shape(device, monkeypatch):
    seen, op = [], optim.muon_op
    monkeypatch.setattr(optim, "muon_op", lambda p, *a: (seen.append(tuple(p.shape)), op(p, *a)))
    parameters = matrices(device)
    optimizer = optim.Muon(parameters)
    train(optimizer, parameters, 1)
    assert sorted(seen) == [(1, 1, 7), (1, 24, 8), (1, 40, 24), (2, 16, 16), (5, 8, 24)]
    buffers = [optimizer.state[p]["momentum_buffer"] for p in parameters if p.shape[-2:] == (8, 24)]
    assert len({b.untyped_storage().data_ptr() for b in buffers}) == 1


def test_banks_of_more_than_a_call_are_several(device, monkeypatch):
    whole, cut = matrices(device), matrices(device)
    train(optim.Muon(whole, lr=0.1), whole, 2)
    monkeypatch.setattr(optim, "_CALL_BYTES", 2 * 8 * 24 * 4)
    seen, op = [], optim.muon_op
    monkeypatch.setattr(optim, "muon_op", lambda p, *a: (seen.append(tuple(p.shape)), op(p, *a)))
    train(optim.Muon(cut, lr=0.1), cut, 2)
    assert [n for n, *shape in seen if shape == [8, 24]] == [2, 2, 1] * 2 and (1, 40, 24) in seen
    assert all(torch.equal(a, b) for a, b in zip(whole, cut))


def test_parameters_without_a_gradient_wait(device):
    parameters, twins = matrices(device), matrices(device)
    optimizer, others = optim.Muon(parameters, lr=0.1), [optim.Muon([p], lr=0.1) for p in twins]
    for step in range(4):
        for i, (p, q, g) in enumerate(zip(parameters, twins, gradients_of(step, parameters))):
            p.grad, q.grad = (None, None) if (i + step) % 3 == 0 else (g, g.clone())
        optimizer.step()
        for o in others:
            o.step()
    assert all(torch.equal(p, q) for p, q in zip(parameters, twins))


def test_the_rest_is_torchs_adamw(device):
    def everything():
        torch.manual_seed(5)
        return [torch.randn(s, device=device, requires_grad=True) for s in ((16, 16), (33,), (5, 4, 3, 2), ())]

    ours, theirs = everything(), everything()
    options = dict(lr=0.01, betas=(0.8, 0.99), weight_decay=0.2)
    both = optim.Muon([{"params": ours[:1], "lr": 0.1}, {"params": ours[1:], "use_muon": False, "adam_eps": 1e-7, **options}])
    train(both, ours, 4)
    train(torch.optim.AdamW(theirs[1:], eps=1e-7, **options), theirs[1:], 0)
    adamw = torch.optim.AdamW(theirs[1:], eps=1e-7, **options)
    for step in range(4):
        for p, g in zip(theirs, gradients_of(step, theirs)):
            p.grad = g
        adamw.step()
    assert all(torch.equal(a, b) for a, b in zip(ours[1:], theirs[1:]))
    assert not torch.equal(ours[0], theirs[0])
    for p, q in zip(ours[1:], theirs[1:]):
        assert set(both.state[p]) == set(adamw.state[q])


def groups(device):
    parameters = matrices(device) + [torch.ones(9, device=device, requires_grad=True)]
    return parameters, optim.Muon([{"params": parameters[:-1], "lr": 0.1}, {"params": parameters[-1:], "use_muon": False, "lr": 0.01}], momentum=0.9)


def test_an_optimizer_continues_from_its_state_dict(device):
    straight, optimizer = groups(device)
    train(optimizer, straight, 4)
    parameters, first = groups(device)
    train(first, parameters, 2)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    _, second = groups(device)
    second.param_groups[0]["lr"] = 7.0  # the saved rate is in force
    fresh = [p for g in second.param_groups for p in g["params"]]
    with torch.no_grad():
        for p, saved in zip(fresh, parameters):
            p.copy_(saved)
    second.load_state_dict(torch.load(file, weights_only=True))
    train(second, fresh, 2, first=2)
    assert all(torch.equal(a, b) for a, b in zip(fresh, straight))
    twin = copy.deepcopy(second)
    assert twin.param_groups[0]["lr"] == 0.1 and len(twin.state) == len(second.state)


@on_cpu
@pytest.mark.skipif(torch_muon is None, reason="this PyTorch has no Muon")
def test_state_dicts_are_torchs(monkeypatch):
    monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", lambda g, coefficients, steps, eps: factor(g, steps, coefficients))
    makers = [lambda p: optim.Muon(p, lr=0.1), lambda p: torch.optim.Muon(p, lr=0.1)]
    ends = []
    for before in makers:
        for after in makers:
            parameters = [p for p in matrices("cpu", torch.float64) if p.dim() == 2]
            optimizer = before(parameters)
            train(optimizer, parameters, 2)
            other = after(parameters)
            other.load_state_dict(optimizer.state_dict())
            train(other, parameters, 2, first=2)
            ends.append(parameters)
    for end in ends[1:]:
        assert all((a - b).abs().max() <= 4 * 0.1 * 1.5 * 3e-7 * SLOPE**5 for a, b in zip(end, ends[0]))


def test_lr_may_be_a_tensor_and_follow_a_schedule(device):
    by_number, by_tensor = matrices(device), matrices(device)
    a, b = optim.Muon(by_number, lr=0.1), optim.Muon(by_tensor, lr=torch.tensor(0.1, dtype=torch.float64, device=device))
    schedules = [torch.optim.lr_scheduler.LambdaLR(a, lambda step: 1 / (1 + step))]
    for step in range(3):
        b.param_groups[0]["lr"].fill_(0.1 / (1 + step))
        train(a, by_number, 1, step)
        train(b, by_tensor, 1, step)
        schedules[0].step()
    assert all(torch.allclose(p, q, rtol=1e-6, atol=1e-6) for p, q in zip(by_number, by_tensor))
    assert a.step(lambda: 3.5) == 3.5


def test_zero_gradients_and_empty_matrices(device):
    parameters = [torch.randn(6, 4, device=device, requires_grad=True), torch.zeros(0, 4, device=device, requires_grad=True)]
    before = parameters[0].detach().clone()
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optim.Muon(parameters, weight_decay=0.0).step()
    assert torch.equal(parameters[0], before)


def test_opcheck(device):
    p, g, m = (torch.randn(2, 8, 24, device=device) for _ in range(3))
    rates = torch.tensor([0.1, 0.9, 0.0], dtype=torch.float64, device=device)
    for given in (None, rates):
        report = torch.library.opcheck(torch.ops.ingot.muon_.default, (p, g, m, given, 0.1, 0.9, 0.1, 1.0, True, False, 5, list(COEFFICIENTS), 0),
                                       raise_exception=False)
        assert all(v == "SUCCESS" for v in report.values()), report
    compiled = torch.compile(lambda p, g, m: torch.ops.ingot.muon_(p, g, m, None, 0.1, 0.9, 0.1, 1.0, True, False, 5, COEFFICIENTS, 0),
                             fullgraph=True, backend="aot_eager")
    twins = [t.clone() for t in (p, g, m)]
    torch.ops.ingot.muon_(*twins, None, 0.1, 0.9, 0.1, 1.0, True, False, 5, COEFFICIENTS, 0)
    compiled(p, g, m)
    assert torch.equal(p, twins[0]) and torch.equal(m, twins[2])


def test_errors_name_the_value_found(device):
    w = torch.randn(4, 8, device=device, requires_grad=True)
    for arguments, message in [
        (dict(lr=-1), "Muon: lr: found -1, expected 0 or more"),
        (dict(lr=torch.ones(2)), "Muon: lr: found tensor"),
        (dict(momentum=1.0), "Muon: momentum: found 1.0, expected a number from 0 to below 1"),
        (dict(weight_decay=math.nan), "Muon: weight_decay: found nan, expected 0 or more"),
        (dict(eps=1e-8), "Muon: eps: found 1e-08, expected 1e-07"),
        (dict(ns_steps=100), "Muon: ns_steps: found 100, expected an integer from 0 to 99"),
        (dict(ns_coefficients=(1, 2)), r"Muon: ns_coefficients: found \(1, 2\), expected three numbers"),
        (dict(ns_coefficients=("1", 2, 3)), r"Muon: ns_coefficients: found \('1', 2, 3\), expected three numbers"),
        (dict(use_muon=False, betas=0.9), "Muon: betas: found 0.9, expected two numbers"),
        (dict(adjust_lr_fn="rms"), "Muon: adjust_lr_fn: found 'rms', expected 'original' or 'match_rms_adamw'"),
        (dict(products="fp8"), "Muon: products: found 'fp8', expected None or one of fp32, bf16, tf32"),
        (dict(use_muon=False, betas=(1.0, 0.9)), r"Muon: betas: found \(1.0, 0.9\), expected two numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            optim.Muon([w], **arguments)
    optimizer = optim.Muon([w])
    with pytest.raises(ValueError, match=r"Muon: found a parameter of shape \(4,\) and torch.float32, expected a matrix, a bank"):
        optimizer.add_param_group({"params": [torch.zeros(4, device=device)]})
    assert len(optimizer.param_groups) == 1
    state = optimizer.state_dict()
    state["param_groups"][0]["eps"] = 1e-3
    with pytest.raises(ValueError, match="Muon: eps: found 0.001"):
        optimizer.load_state_dict(state)
    w.grad = torch.sparse_coo_tensor(torch.tensor([[0], [0]], device=device), torch.ones(1, device=device), (4, 8), check_invariants=True)
    with pytest.raises(ValueError, match=r"Muon: found a sparse gradient of a parameter of \(4, 8\), expected a dense one"):
        optimizer.step()
    other = torch.ones(4, 4, device=device, requires_grad=True)
    other.grad = torch.ones_like(other)
    with pytest.raises(ValueError, match="Muon: found a sparse gradient"):
        optim.Muon([{"params": [other]}, {"params": [w], "use_muon": False}]).step()
    assert (other == 1).all()  # nothing has been stepped
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match=r"muon: g: found \(1, 8, 4\), expected \(1, 4, 8\)"):
            torch.ops.ingot.muon_(torch.zeros(1, 4, 8), torch.zeros(1, 8, 4), torch.zeros(1, 4, 8), None, 0.1, 0.9, 0.0, 1.0, True, False, 5, COEFFICIENTS, 0)
        with pytest.raises(ValueError, match=r"muon: p: found shape \(4, 8\), expected \(matrices, rows, columns\)"):
            torch.ops.ingot.muon_(torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(4, 8), None, 0.1, 0.9, 0.0, 1.0, True, False, 5, COEFFICIENTS, 0)
    assert ingot.optim is optim


def cycling(kind, optimizer):
    if kind == "OneCycleLR":
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=10)
    return torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.02, step_size_up=3, cycle_momentum=True)


@pytest.mark.skipif(torch_muon is None, reason="this PyTorch has no Muon")
@pytest.mark.parametrize("kind", ["OneCycleLR", "CyclicLR"])
def test_a_schedule_cycles_the_momentum_as_it_does_torchs(device, kind):
    ours, theirs = ([torch.randn(8, 4, device=device, requires_grad=True)] for _ in range(2))
    vector = torch.zeros(4, device=device, requires_grad=True)
    vector.grad = torch.zeros_like(vector)
    a = optim.Muon([{"params": ours}, {"params": [vector], "use_muon": False, "betas": (0.8, 0.9)}], lr=0.02)
    b = torch.optim.Muon(theirs, lr=0.02)
    schedules = cycling(kind, a), cycling(kind, b)
    seen = set()
    for step in range(8):
        assert a.param_groups[0]["momentum"] == b.param_groups[0]["momentum"] and a.param_groups[1]["betas"] == (0.8, 0.9)
        seen.add(a.param_groups[0]["momentum"])
        train(a, ours, 1, step), train(b, theirs, 1, step)
        for schedule in schedules:
            schedule.step()
    assert len(seen) > 2


def test_a_copy_of_the_optimizer_adds_groups_with_its_own_betas(device):
    optimizer = copy.deepcopy(optim.Muon([torch.zeros(4, 4, device=device, requires_grad=True)], betas=(0.5, 0.6), adam_eps=1e-3))
    optimizer.add_param_group({"params": [torch.zeros(4, device=device, requires_grad=True)], "use_muon": False})
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.6) and optimizer.param_groups[1]["adam_eps"] == 1e-3


def kellerjordans(steps=3):
    """The state dict of KellerJordan/Muon's SingleDeviceMuonWithAuxAdam after some steps."""
    state = {0: {"momentum_buffer": torch.full((8, 4), 0.25)}, 1: {"exp_avg": torch.full((5,), 0.5), "exp_avg_sq": torch.full((5,), 0.3), "step": steps}}
    return {"state": state, "param_groups": [
        {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.0, "use_muon": True, "params": [0]},
        {"lr": 3e-4, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0, "use_muon": False, "params": [1]}]}


def muon_and_adamw(device):
    parameters = [torch.ones(8, 4, device=device, requires_grad=True), torch.ones(5, device=device, requires_grad=True)]
    return parameters, optim.Muon([{"params": parameters[:1]}, {"params": parameters[1:], "use_muon": False}])


def test_kellerjordans_state_dict_goes_on_here(device):
    parameters, optimizer = muon_and_adamw(device)
    given = kellerjordans()
    optimizer.load_state_dict(given)
    assert given["state"][1]["step"] == 3, "the caller's dict has changed"
    assert optimizer.param_groups[1]["adam_eps"] == 1e-10 and optimizer.param_groups[0]["momentum"] == 0.9
    for p in parameters:
        p.grad = torch.full_like(p, 0.1)
    optimizer.step()
    m, v = 0.8 * 0.5 + 0.2 * 0.1, 0.95 * 0.3 + 0.05 * 0.01
    expected = 1 - 3e-4 * (m / (1 - 0.8**4)) / math.sqrt(v / (1 - 0.95**4))
    torch.testing.assert_close(parameters[1], torch.full((5,), expected, device=device))
    torch.testing.assert_close(optimizer.state[parameters[0]]["momentum_buffer"], torch.full((8, 4), 0.9 * 0.25 + 0.1 * 0.1, device=device))


def test_torchs_adamw_state_dict_goes_on_in_a_group_of_adamw(device):
    ours, theirs = ([torch.ones(5, device=device, requires_grad=True)] for _ in range(2))
    a = optim.Muon([{"params": ours, "use_muon": False}])
    b = torch.optim.AdamW(theirs, lr=0.1, betas=(0.7, 0.8), eps=1e-3, weight_decay=0.2)
    train(b, theirs, 2)
    with torch.no_grad():
        ours[0].copy_(theirs[0])
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    train(a, ours, 2, 2), train(b, theirs, 2, 2)
    torch.testing.assert_close(ours[0], theirs[0])


def changed(change):
    given = kellerjordans()
    change(given)
    return given


@pytest.mark.parametrize("change, message", [
    (lambda d: d["param_groups"][0].update(wd=0.1), "found option wd, expected the options of"),  # Moonlight's
    (lambda d: d["param_groups"][0].update(nesterov=True, ns_steps=5), "found ns_steps without ns_coefficients"),  # KellerJordan's of 2024
    (lambda d: d["param_groups"][1].update(amsgrad=True), "found amsgrad=True, expected False"),
    (lambda d: d["param_groups"][1].update(decoupled_weight_decay=False), "found decoupled_weight_decay=False, expected True"),
    (lambda d: d["param_groups"][0].update(use_muon=False), "found use_muon=False, expected the group's own, True"),
    (lambda d: d["state"][0].update(second_momentum_buffer=torch.zeros(8, 1)), r"found momentum_buffer, second_momentum_buffer for a parameter of \(8, 4\)"),  # NorMuon's
    (lambda d: d["state"].update({0: {"momentum": torch.zeros(8, 4)}}), "found momentum for a parameter"),  # Dion's
    (lambda d: d["state"].update({0: {"momentum_buffer": torch.zeros(4, 8)}}), r"momentum_buffer: found \(4, 8\), expected \(8, 4\)"),
])
def test_the_state_of_another_package_is_refused_on_loading(device, change, message):
    parameters, optimizer = muon_and_adamw(device)
    with pytest.raises(ValueError, match=f"Muon: state dict: {message}"):
        optimizer.load_state_dict(changed(change))
    assert not optimizer.state


TORCHS = sorted(name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name not in ("Optimizer", "Muon"))


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("name", TORCHS)
def test_the_fresh_state_of_torchs_other_optimizers_is_refused_on_loading(name, use_muon):
    given = getattr(torch.optim, name)([torch.ones(4, 4, requires_grad=True)], lr=0.5).state_dict()
    optimizer = optim.Muon([torch.ones(4, 4, requires_grad=True)], use_muon=use_muon)
    before = copy.deepcopy(optimizer.state_dict())
    if name == "AdamW" and not use_muon:
        return optimizer.load_state_dict(given)
    with pytest.raises(ValueError, match="^Muon: state dict: found .*, expected .*$"):
        optimizer.load_state_dict(given)
    assert optimizer.state_dict() == before


def test_a_dict_that_is_no_state_dict_and_torchs_muon_for_a_group_of_adamw_are_refused():
    optimizer = optim.Muon([torch.ones(4, 4, requires_grad=True)], use_muon=False)
    for given, found in (({}, "an empty dict"), ([], "list"), ({"state": {}}, "state")):
        with pytest.raises(ValueError, match=f"^Muon: state dict: found {found}, expected a dict with state and param_groups$"):
            optimizer.load_state_dict(given)
    options = {"lr": 0.1, "ns_coefficients": (1, 2, 3), "ns_steps": 5, "params": [0]}
    with pytest.raises(ValueError, match="found ns_coefficients for a group with use_muon=False, expected the options of torch.optim.AdamW"):
        optimizer.load_state_dict({"state": {}, "param_groups": [options]})


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(16, 3, 3, 3), (4, 8, 3, 1), (6, 2, 1, 1), (2, 40, 5, 5)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_weight_of_a_convolution_is_one_flattened_matrix(device, shape, adjust, channels_last):
    """As in KellerJordan/Muon, the matrix is (N, C H W), and the factor of lr follows from the height and width of the window."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    weight = torch.randn(shape, device=device).to(memory_format=layout).requires_grad_()
    flat = weight.detach().flatten(1).double()
    window = math.sqrt(max(1, shape[2] / shape[3]))
    wanted = 0.2 * math.sqrt(max(flat.shape)) if adjust else window
    optimizer = optim.Muon([weight], lr=0.1, products="fp32", adjust_lr_fn=adjust)
    buffer = torch.zeros_like(flat)
    for step in range(2):
        (g,) = gradients_of(step, [weight])
        weight.grad = g.to(memory_format=layout)
        optimizer.step()
        g = g.flatten(1).double()
        buffer.mul_(0.95).add_(0.05 * g)
        flat.mul_(1 - 0.1 * 0.1).sub_(0.1 * wanted * factor(0.05 * g + 0.95 * buffer))
    assert weight.is_contiguous(memory_format=layout) and optimizer.state[weight]["momentum_buffer"].shape == weight.shape
    torch.testing.assert_close(weight.detach().flatten(1).double(), flat, rtol=0, atol=2 * 0.1 * wanted * 3e-4 + 1e-6)  # 3e-4: kernels/muon/muon.test.cpp
