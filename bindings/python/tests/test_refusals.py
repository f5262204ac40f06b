"""Every public function and module with one wrong argument at a time: the error names an argument, the value found and the value expected, in one line."""
import inspect
import re

import pytest
import torch
from conftest import on_cpu

from ingot import functional, hf, nn, optim

DTYPES = (torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)


def calls():
    """{name: (function of tensors by name, these tensors, names that an error may use)}."""
    r = torch.randn
    cos, sin = functional.rope_table(16, 8)
    offsets, cu = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 3, 6], dtype=torch.int32)
    x, heads, table = r(5, 8), r(2, 6, 4, 8), dict(cos=cos, sin=sin, positions=torch.arange(6))
    layers = dict(w0=r(16, 8), b0=r(16), g0=r(16), w1=r(8, 16), b1=r(8), g1=r(8))
    loss = dict(x=x, weight=r(12, 8), target=torch.randint(0, 12, (5,)), bias=r(12))
    mlp_names = ("x", "weights", "biases", "gains", "parameters")

    def mlp(x, w0, w1, b0, b1, g0, g1):
        return functional.fused_mlp(x, [w0, w1], [b0, b1], [g0, g1])

    found = {
        "rms_norm": (functional.rms_norm, dict(x=r(5, 64), weight=r(64))),
        "rms_norm with a residual": (functional.rms_norm, dict(x=r(5, 64), weight=r(64), residual=r(5, 64))),
        "fused_mlp": (mlp, dict(x=x, **layers), mlp_names),
        "swiglu": (functional.swiglu, dict(gate=x, up=r(5, 8))),
        "swiglu of a packed tensor": (functional.swiglu, dict(gate=x)),
        "gated_linear": (functional.gated_linear, dict(x=x, w=r(12, 8), bias=r(12), up=r(12, 8), up_bias=r(12), down=r(6, 12), down_bias=r(6))),
        "gated_linear of packed rows": (functional.gated_linear, dict(x=x, w=r(12, 8), bias=r(12))),
        "gated_linear of columns": (lambda **t: functional.gated_linear(columns=True, **t), dict(x=x, w=r(8, 12), bias=r(12))),
        "linear_cross_entropy": (functional.linear_cross_entropy, loss),
        "losses": (lambda **t: functional.linear_cross_entropy(reduction="none", **t), loss),
        "wide_mlp": (functional.wide_mlp, dict(x=x, w1=r(12, 8), w2=r(6, 12), b1=r(12), b2=r(6))),
        "grouped_linear": (functional.grouped_linear, dict(x=x, weight=r(2, 6, 8), offsets=offsets, bias=r(2, 6))),
        "rope": (functional.rope, dict(x=heads, **table)),
        "rope_": (functional.rope_, dict(x=heads, **table)),
        "qk_norm_rope": (functional.qk_norm_rope, dict(x=heads, gain=r(4), **table)),
        "activation": (lambda x: functional.activation(x, "silu"), dict(x=x)),
        "flash_attn_func": (functional.flash_attn_func, dict(q=heads, k=r(2, 6, 2, 8), v=r(2, 6, 2, 8), sinks=r(4))),
        "flash_attn_varlen_func": (functional.flash_attn_varlen_func,
                                   dict(q=r(6, 4, 8), k=r(6, 2, 8), v=r(6, 2, 8), cu_seqlens_q=cu, cu_seqlens_k=cu, sinks=r(4))),
        "RMSNorm": (nn.RMSNorm(64), dict(x=r(5, 64)), ("x", "weight")),
        "RMSNorm with a residual": (nn.RMSNorm(64), dict(x=r(5, 64), residual=r(5, 64)), ("x", "residual", "weight")),
        "FusedMLP": (nn.FusedMLP(8, 16, 8), dict(x=x), mlp_names),
        "RMSNorm of two dimensions": (nn.RMSNorm((4, 8)), dict(x=r(3, 4, 8), residual=r(3, 4, 8)), ("x", "residual", "weight")),
        "SwiGLU": (nn.SwiGLU(8, 12), dict(x=x)),
        "FusedSwiGLU": (nn.FusedSwiGLU(8, 12), dict(x=x)),
        "WideMLP": (nn.WideMLP(8, 12, 6), dict(x=x), ("x", "w1")),
        "LinearCrossEntropy": (nn.LinearCrossEntropy(8, 12), dict(x=x, target=loss["target"]), ("x", "target", "weight")),
    }
    return {name: (call[0], call[1], call[2] if len(call) > 2 else tuple(call[1])) for name, call in found.items()}


def wrong_values(t):
    yield from (None, 3, [1.0])
    for d in range(t.dim()):
        yield t.narrow(d, 0, t.shape[d] - 1).clone()
        yield torch.cat([t, t.narrow(d, 0, 1)], d)
    yield from (t.flatten() if t.dim() > 1 else t.repeat(2, 1), t[None], t.flatten()[0], t.new_empty(0), t.to("meta"), t.to_sparse())
    yield from (t.to(dtype) for dtype in DTYPES if dtype is not t.dtype)


def described(t):
    return f"{t.dtype} {tuple(t.shape)} {t.layout} {t.device}" if isinstance(t, torch.Tensor) else repr(t)


@on_cpu
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", list(calls()))
def test_a_wrong_argument_is_refused_by_its_name(name, recorded):
    function, given, names = calls()[name]

    def prepared(t):
        dense = isinstance(t, torch.Tensor) and t.layout is torch.strided and t.is_floating_point() and t.device.type == "cpu"
        return t.detach().clone().requires_grad_(recorded) if dense else t.clone() if isinstance(t, torch.Tensor) else t

    if name == "rope_" and recorded:
        pytest.skip("rope_ refuses recorded calls")
    refused = 0
    with torch.set_grad_enabled(recorded):
        function(**{key: prepared(t) for key, t in given.items()})
        for key, right in given.items():
            for wrong in wrong_values(right):
                case = f"{key}: {described(wrong)}"
                try:
                    function(**{k: prepared(wrong if k == key else t) for k, t in given.items()})
                    continue
                except (ValueError, TypeError, NotImplementedError) as e:
                    text = str(e)
                refused += 1
                if "found a call that autograd, torch.compile or torch.func follows" in text:
                    continue  # rope_ with a tensor that is not on a device
                assert re.match(r"\w+: .*found .*, expected ", text) and "\n" not in text, f"{case}: {text}"
                assert not re.search(r"expected (==|<=?|>=?) | = |\w\(\)|\b(f64|f32|bf16|f16|i64|i32|u8)\b", text.replace("expected ()", "").replace("of ()", "")), f"{case}: {text}"
                assert any(re.search(rf"\b{n}\b", text) for n in names), f"{case}: {text}"
                assert not name.startswith("swiglu") or text.startswith("swiglu: "), f"{case}: {text}"  # and not the name of its operator
    assert refused >= 10


def test_a_wrong_option_is_refused_by_its_name():
    x = torch.ones(3, 4)
    heads, classes, target = torch.ones(1, 3, 2, 4), torch.ones(5, 4), torch.zeros(3, dtype=torch.int64)
    for call, message in ((lambda: functional.linear_cross_entropy(x, classes, target, ignore_index="a"), "linear_cross_entropy: ignore_index: found 'a', expected an integer of 32 bits"),
                          (lambda: functional.linear_cross_entropy(x, classes, target, ignore_index=None), "linear_cross_entropy: ignore_index: found None, expected an integer"),
                          (lambda: functional.linear_cross_entropy(x, classes, target, softcap="a"), "linear_cross_entropy: softcap: found 'a', expected a number"),
                          (lambda: functional.linear_cross_entropy(x, classes, target, z_loss=None), "linear_cross_entropy: z_loss: found None, expected a number"),
                          (lambda: nn.LinearCrossEntropy(4, 5, reduction="avg"), "LinearCrossEntropy: reduction: found 'avg', expected 'mean', 'sum' or 'none'"),
                          (lambda: functional.flash_attn_func(heads, heads, heads, softmax_scale="a"), "flash_attn_func: softmax_scale: found 'a', expected a number or None"),
                          (lambda: functional.flash_attn_func(heads, heads, heads, softcap=None), "flash_attn_func: softcap: found None, expected a number"),
                          (lambda: functional.flash_attn_func(heads, heads, heads, window_size=(1.5, 0)), r"flash_attn_func: window_size: found \(1.5, 0\), expected two integers"),
                          (lambda: functional.flash_attn_func(*[heads[..., :0]] * 3), r"flash_attn_func: q: found shape \(3, 2, 0\), expected a head size from 1"),
                          (lambda: functional.rope_table("4", 4), "rope_table: positions: found '4', expected an integer from 0"),
                          (lambda: functional.rope_table(4, 4.0), "rope_table: dim: found 4.0, expected an even number from 2"),
                          (lambda: functional.rope_table(4, 4, dtype=torch.bfloat16), "rope_table: dtype: found torch.bfloat16, expected torch.float32, or torch.float64"),
                          (lambda: functional.rope_table(4, 4, "much"), "rope_table: base: found 'much', expected a number"),
                          (lambda: functional.rope_table(4, 4, scaling="ntk", factor=None), "rope_table: factor: found None, expected a number"),
                          # One table for each sequence, as transformers makes them.
                          (lambda: functional.rope(heads, *(t[None] for t in functional.rope_table(3, 4))), r"rope: cos: found shape \(1, 3, 2\), expected \(positions, R / 2\)"),
                          (lambda: functional.qk_norm_rope(heads, *(t[0] for t in functional.rope_table(3, 4))), r"qk_norm_rope: cos: found shape \(2,\), expected \(positions"),
                          (lambda: functional.grouped_linear(x, torch.ones(2, 5, 4), torch.tensor([0, 1, 2**32 + 3])),
                           r"grouped_linear: offsets: found \(0, 1, 2147483647\), expected numbers that ascend from 0 to at most 3"),
                          (lambda: functional.swiglu(x, order=[1]), r"swiglu: order: found \[1\], expected one of gate_first"),
                          (lambda: nn.SwiGLU(4, 4, order=[1]), r"SwiGLU: order: found \[1\], expected one of gate_first"),
                          (lambda: functional.swiglu(x, alpha="a", activation="gelu_tanh"), "swiglu: alpha: found 'a', expected a number"),
                          (lambda: functional.gated_linear(x, torch.ones(6, 4), torch.ones(2, 3)), r"gated_linear: bias: found shape \(2, 3\), expected \(6,\)"),
                          (lambda: functional.rope(heads, *(t.requires_grad_() for t in functional.rope_table(3, 4)), torch.tensor([0, -1, 1])),
                           "rope: positions: found -1, expected 0 to 2, the rows of the table"),
                          (lambda: functional.rope(heads, *(t.requires_grad_() for t in functional.rope_table(3, 4)), torch.tensor([0, 3, 1])),
                           "rope: positions: found 3, expected 0 to 2, the rows of the table"),
                          (lambda: nn.LinearCrossEntropy(4, 5, label_smoothing=5), "LinearCrossEntropy: label_smoothing: found 5, expected a number from 0 to 1"),
                          (lambda: nn.LinearCrossEntropy(4, 5, softcap=None), "LinearCrossEntropy: softcap: found None, expected a number"),
                          (lambda: optim.Muon([torch.ones(3, 3).requires_grad_()], ns_coefficients=1), "Muon: ns_coefficients: found 1, expected three numbers"),
                          (lambda: optim.Muon([torch.ones(3, 3).requires_grad_()]).load_state_dict({"state": {}, "param_groups": [{}]}),
                           "Muon: state dict: found a group without params"),
                          (lambda: functional.swiglu(x, limit="much"), "swiglu: limit: found 'much', expected a number"),
                          (lambda: functional.rope(torch.ones(1, 3, 2, 4), *functional.rope_table(4, 4), interleaved="no"), "rope: interleaved: found 'no', expected a bool"),
                          (lambda: optim.Muon([torch.ones(3, 3).to_sparse().requires_grad_()]), "Muon: found a parameter of layout torch.sparse_coo on cpu, expected a dense one"),
                          (lambda: optim.Muon([torch.ones(3, 3).to(torch.float8_e4m3fn).requires_grad_()]),
                           r"Muon: found a parameter of shape \(3, 3\) and torch.float8_e4m3fn, expected a matrix, a bank")):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()


@pytest.mark.parametrize("how", ("plain", "recorded", "forward mode"))
def test_a_wrong_number_of_a_gate_is_refused_by_its_name_on_every_path(how):
    x, w = (torch.ones(4, 4, requires_grad=how == "recorded") for _ in range(2))
    wrong = [({name: value}, f"{name}: found {value!r}, expected a number") for name in ("limit", "alpha", "up_offset") for value in ("much", None)]
    wrong += [(dict(limit=value), f"limit: found {value}, expected 0 (no clamp) or more") for value in (-1.0, float("nan"))]
    wrong += [(dict(alpha=-1.0, activation="gelu_tanh"), "alpha: found -1.0, expected 0 or more beside activation='gelu_tanh'")]
    for options, message in wrong:
        for name, call in (("swiglu", lambda: functional.swiglu(x, **options)), ("swiglu", lambda: functional.swiglu(x, w, **options)),  # noqa: B023
                           ("gated_linear", lambda: functional.gated_linear(x, w, **options)), ("SwiGLU", lambda: nn.SwiGLU(4, 4, **options))):  # noqa: B023
            with torch.autograd.forward_ad.dual_level() if how == "forward mode" else torch.set_grad_enabled(how == "recorded"):
                with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: {message}')}$"):
                    call()


def flags(function):
    """The names of the parameters of `function` whose default is True or False."""
    return [p.name for p in inspect.signature(function).parameters.values() if isinstance(p.default, bool)]


def functions_with_flags():
    """{name: (function, arguments)} of every public function and class with a flag."""
    r = torch.randn
    x, heads = r(3, 4), r(1, 3, 2, 4)
    table, cu = functional.rope_table(3, 4), torch.tensor([0, 3], dtype=torch.int32)
    return {"rms_norm": (functional.rms_norm, (x,)), "mlp": (functional.fused_mlp, (x, [r(4, 4)])), "gated_linear": (functional.gated_linear, (x, r(4, 4))),
            "wide_mlp": (functional.wide_mlp, (x, r(4, 4), r(4, 4))), "rope": (functional.rope, (heads, *table)), "rope_": (functional.rope_, (heads, *table)),
            "qk_norm_rope": (functional.qk_norm_rope, (heads, *table)), "rope_table": (functional.rope_table, (3, 4)),
            "flash_attn_func": (functional.flash_attn_func, [heads] * 3), "flash_attn_varlen_func": (functional.flash_attn_varlen_func, (*[heads[0]] * 3, cu, cu)),
            "RMSNorm": (nn.RMSNorm, (4,)), "FusedMLP": (nn.FusedMLP, (4, 4, 4)), "SwiGLU": (nn.SwiGLU, (4, 4)), "WideMLP": (nn.WideMLP, (4, 4)),
            "LinearCrossEntropy": (nn.LinearCrossEntropy, (4, 5)), "Muon": (optim.Muon, ([r(3, 3).requires_grad_()],)),
            "hf.patch": (hf.patch, (torch.nn.Linear(2, 2),))}


@on_cpu
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", list(functions_with_flags()))
def test_a_flag_that_is_no_bool_is_refused_by_its_name(name, recorded):
    function, arguments = functions_with_flags()[name]
    if recorded and name != "rope_":  # rope_ refuses recorded calls
        arguments = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
    assert flags(function)
    for flag in flags(function):
        for wrong in ("no", "", None, 1, 0.0, [True], torch.tensor(True)):
            with pytest.raises(ValueError, match=f"^{name}: {flag}: found {re.escape(repr(wrong))}, expected a bool$"):
                function(*arguments, **{flag: wrong})
        for right in (True, False):
            function(*arguments, **{flag: right})


def test_every_function_with_flags_is_tested():
    public = [getattr(module, name) for module in (functional, nn, optim, hf) for name in module.__all__]
    assert {f for f in public if callable(f) and f is not hf.Report and flags(f)} == {f for f, _ in functions_with_flags().values()}


@on_cpu
@pytest.mark.parametrize("recorded", [False, True])
def test_an_eps_that_is_no_number_is_refused_by_its_name(recorded):
    x, weight = torch.ones(3, 4, requires_grad=recorded), torch.ones(4)
    for eps in ("much", [1e-6], {}, 1j):
        message = re.escape(f"rms_norm: eps: found {eps!r}, expected a number or None")
        module = nn.RMSNorm(4)
        module.eps = eps
        for call in (lambda: functional.rms_norm(x, weight, eps), lambda: functional.rms_norm(x, None, eps), lambda: functional.rms_norm(x[:, ::2], None, eps),
                     lambda: functional.rms_norm(x, weight, eps, residual=x), lambda: module(x), lambda: module(x, x)):
            with pytest.raises(ValueError, match=f"^{message}$"):
                call()
        with pytest.raises(ValueError, match=f"^{message.replace('rms_norm', 'RMSNorm', 1)}$"):
            nn.RMSNorm(4, eps)
        with pytest.raises(Exception, match=message):
            torch.compile(lambda x: functional.rms_norm(x, weight, eps), backend="eager")(x)  # noqa: B023
    y = functional.rms_norm(x, weight, 1)
    assert torch.equal(y, functional.rms_norm(x, weight, torch.tensor(1.0))) and torch.equal(y, nn.RMSNorm(4, 1.0)(x))


def test_sizes_that_a_module_cannot_have_are_refused_by_their_names():
    for made, message in ((lambda: nn.FusedMLP(8, "8", 8), "FusedMLP: hidden_features: found '8', expected an integer from 1"),
                          (lambda: nn.SwiGLU(8, -1), "SwiGLU: hidden_features: found -1, expected an integer from 0"),
                          (lambda: nn.SwiGLU(8, 2, 2.5), "SwiGLU: out_features: found 2.5, expected an integer from 0"),
                          (lambda: nn.WideMLP(8, None), "WideMLP: hidden_features: found None, expected an integer from 0"),
                          (lambda: nn.LinearCrossEntropy(8, -1), "LinearCrossEntropy: num_classes: found -1, expected an integer from 0"),
                          (lambda: nn.FusedSwiGLU(8, 2.5), "FusedSwiGLU: hidden_dim: found 2.5, expected an integer from 0"),
                          (lambda: nn.MegaGemmTriton(8, 0), "MegaGemmTriton: multiple_of: found 0, expected an integer from 1")):
        with pytest.raises(ValueError, match=f"^{message}$"):
            made()
    with pytest.raises(TypeError, match="^mlp: weights: found NoneType, expected a list of tensors$"):
        functional.fused_mlp(torch.ones(3, 4), None)


def test_a_shape_that_rms_norm_cannot_have_is_refused_by_its_name():
    for shape in (-1, (8, -1), "8", 8.0, (8.0,), None, [None]):
        message = re.escape(f"RMSNorm: normalized_shape: found {shape!r}, expected an integer or several, each at least 0")
        with pytest.raises(ValueError, match=f"^{message}$"):
            nn.RMSNorm(shape)
    assert nn.RMSNorm([3, 4]).normalized_shape == nn.RMSNorm(torch.Size([3, 4])).normalized_shape == (3, 4)


def test_a_comparison_of_a_kernel_has_no_expressions():
    """Comparisons that only the kernels make report the two values and no expression of C++."""
    from ingot import _C

    x = torch.ones(5, 64)
    with pytest.raises(ValueError, match="^rmsnorm: .*found 4, expected 5$"):
        _C.rms_norm(x, None, None, None, torch.empty(5, 64), torch.empty(4), 1e-6, False)
