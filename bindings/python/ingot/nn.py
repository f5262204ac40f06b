"""Modules. Each loads the state dict of the module that it replaces.

Inputs and parameters are float32, bfloat16 or float16, on a CPU float64 too. A constructor raises ValueError for a size or an option; the errors of a call
are those of ingot.functional.
"""
import math
import numbers
import re
from collections.abc import Iterable

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from . import _C, _gates, _mlp, _op, functional
from ._hf_parts import is_plain_linear

__all__ = ["RMSNorm", "FusedMLP", "SwiGLU", "WideMLP", "LinearCrossEntropy", "FusedMLPSoftplus", "FusedMLPSoftplusWN", "FusedMLP5Softplus", "FusedMLP5SoftplusWN",
           "MegaGemmTriton", "MegaGemmRMSNorm", "FusedSwiGLU"]


class _Direct(nn.Module):
    """A module whose call goes directly to forward where nn.Module's own call would do nothing else."""

    def __call__(self, *args, **kwargs):
        if not is_dynamo_compiling():
            y = _C.module_call(self, args, kwargs)
            if y is not None:
                return y
        return super().__call__(*args, **kwargs)


@torch.fx.wrap  # a node of torch.fx's graph, because a trace does not know whether there is a residual
def _norm_of_dimensions(x, residual, weight, normalized_shape, eps, unit_offset):
    """RMSNorm of the last dimensions of x as one row, or without a weight."""
    _op.expect_tensors("rms_norm", x=x)
    _op.expect_tensors_or_none("rms_norm", residual=residual)
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"rms_norm: residual: found shape {tuple(residual.shape)}, expected x's {tuple(x.shape)}")
    dimensions, shape = len(normalized_shape), x.shape
    if tuple(shape[-dimensions:]) != normalized_shape:
        raise ValueError(f"rms_norm: x: found last dimensions {tuple(shape[-dimensions:])}, expected {normalized_shape}")
    found = functional.rms_norm(x.flatten(-dimensions), None if weight is None else weight.flatten(), eps,
                                residual=None if residual is None else residual.flatten(-dimensions), unit_offset=unit_offset)
    return found.view(shape) if residual is None else tuple(t.view(shape) for t in found)


class RMSNorm(_Direct):
    """Has torch.nn.RMSNorm's arguments, parameters and results. Several normalized dimensions count as one row.

    unit_offset=True multiplies by 1 + weight (Gemma's form) and starts the weight at zero. forward(x, residual) returns
    (norm(x + residual), x + residual) from one kernel. x and residual: (..., *normalized_shape) of one dtype; the results have their shape and dtype.
    """

    def __init__(self, normalized_shape, eps=None, elementwise_affine=True, device=None, dtype=None, *, unit_offset=False):
        super().__init__()
        shape = list(normalized_shape) if isinstance(normalized_shape, Iterable) else [normalized_shape]
        if not all(isinstance(n, numbers.Integral) and n >= 0 for n in shape):
            raise ValueError(f"RMSNorm: normalized_shape: found {normalized_shape!r}, expected an integer or several, each at least 0")
        _op.expect_eps("RMSNorm", eps)
        _op.expect_bools("RMSNorm", elementwise_affine=elementwise_affine, unit_offset=unit_offset)
        self.normalized_shape = tuple(map(int, shape))
        self.eps, self.elementwise_affine, self.unit_offset = eps, elementwise_affine, unit_offset
        self._one_vector = elementwise_affine and len(self.normalized_shape) == 1
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self):
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 0.0 if self.unit_offset else 1.0)

    def forward(self, x, residual=None):
        if residual is None and not is_dynamo_compiling():
            y = _C.rms_norm_of_module(x, self.__dict__)
            if y is not None:
                return y
        if self._one_vector:
            return functional.rms_norm(x, self.weight, self.eps, residual=residual, unit_offset=self.unit_offset)
        return _norm_of_dimensions(x, residual, self.weight, self.normalized_shape, self.eps, self.unit_offset)

    def extra_repr(self):
        offset = ", unit_offset=True" if self.unit_offset else ""
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}{offset}"


# --- FusedMLP ---------------------------------------------------------------------------------------------------------


class _Layer(nn.Module):
    """The parameters of one layer; FusedMLP computes with them."""

    def __init__(self, in_features, out_features, bias, weight_norm, device, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.gain = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if weight_norm else None

    def extra_repr(self):
        return ", ".join(f"{name} {tuple(p.shape)}" for name, p in self.named_parameters())


class FusedMLP(_Direct):
    """num_layers linear layers with an activation between them, forward and backward in fused kernels.

    in_features, hidden_features and out_features are independent; on a GPU multiples of 8 up to 512. activation is a name of
    functional.ACTIVATIONS or a module such as nn.SiLU(). The last layer is linear unless activate_last. weight_norm: W[n] = gain[n] weight[n] / |weight[n]|. recompute keeps no activations for the backward pass.

    forward(x): x is (..., in_features), the result (..., out_features); both have the parameters' dtype, or under autocast autocast's.
    Parameters are layers.<i>.weight (out, in), layers.<i>.bias, layers.<i>.gain. load_state_dict also takes the state dict of an
    nn.Sequential of Linears, plain or with weight_norm (torch.nn.utils.parametrizations or the older weight_g and weight_v), and the
    packed v_all, g_all of mlp-megakernel. Where only one side is weight-normalised, the weights are converted.
    """

    def __init__(self, in_features, hidden_features, out_features, num_layers=3, activation="softplus", bias=True, weight_norm=False, *,
                 activate_last=False, recompute=False, device=None, dtype=None):
        super().__init__()
        _op.expect_integers("FusedMLP", 1, in_features=in_features, hidden_features=hidden_features, out_features=out_features, num_layers=num_layers)
        in_features, hidden_features, out_features, num_layers = map(int, (in_features, hidden_features, out_features, num_layers))
        activation = _named("FusedMLP", activation)
        act = _op.activation_number("FusedMLP", activation)
        _op.expect_bools("FusedMLP", bias=bias, weight_norm=weight_norm, activate_last=activate_last, recompute=recompute)
        self.in_features, self.hidden_features, self.out_features = in_features, hidden_features, out_features
        self.num_layers = num_layers
        self._options = _mlp.mlp_options(bias, weight_norm, act, activate_last, recompute)
        self._edge = _C.Edge()
        widths = [in_features] + [hidden_features] * (num_layers - 1) + [out_features]
        self.layers = nn.ModuleList(_Layer(k, n, bias, weight_norm, device, dtype) for k, n in zip(widths, widths[1:]))
        self.reset_parameters()

    # The options cannot be changed afterwards: the call takes them as one number.
    bias = property(lambda self: bool(self._options & _C.BIAS))
    weight_norm = property(lambda self: bool(self._options & _C.WEIGHT_NORM))
    activate_last = property(lambda self: bool(self._options & _C.ACTIVATE_LAST))
    recompute = property(lambda self: not self._options & _C.SAVE)
    activation = property(lambda self: functional.ACTIVATIONS[self._options & 0xFF])

    def reset_parameters(self):
        """nn.Linear's initialisation; gains are the norms of the initial rows, so that weight norm changes nothing at first."""
        for layer in self.layers:
            nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5))
            if layer.bias is not None:
                bound = 1 / math.sqrt(layer.weight.shape[1])
                nn.init.uniform_(layer.bias, -bound, bound)
            if layer.gain is not None:
                with torch.no_grad():
                    layer.gain.copy_(torch.linalg.vector_norm(layer.weight, dim=1))

    def forward(self, x):
        if not is_dynamo_compiling():
            y = _C.mlp_of_module(x, self.__dict__)
            if y is not None:
                return y
        parameters = []
        for layer in self.layers:
            parameters.append(layer.weight)
            if self.bias:
                parameters.append(layer.bias)
            if self.weight_norm:
                parameters.append(layer.gain)
        return functional.mlp_of_parameters(x, parameters, self.bias, self.weight_norm, self.activation, self.activate_last,
                                            self.recompute)

    def extra_repr(self):
        return (f"{self.in_features}, {self.hidden_features}, {self.out_features}, num_layers={self.num_layers}, "
                f"activation={self.activation!r}, bias={self.bias}, weight_norm={self.weight_norm}")

    @classmethod
    def from_sequential(cls, model, **options):
        """A FusedMLP with the weights of an nn.Sequential of Linears (plain, or with weight_norm) and one kind of activation.

        Parameters keep their requires_grad flags, and the module keeps its mode (training or evaluation). The weights are copies. Raises ValueError for
        layers that do not alternate, differ in width, bias, dtype or device, or have several activations.
        """
        if not isinstance(model, nn.Sequential):
            raise TypeError(f"FusedMLP.from_sequential: model: found {type(model).__name__}, expected nn.Sequential")
        linears = [m for m in model if isinstance(m, nn.Linear)]
        others = [m for m in model if not isinstance(m, nn.Linear)]
        if not linears or not isinstance(model[0], nn.Linear):
            raise ValueError("FusedMLP.from_sequential: model: found no nn.Linear in front, expected Linear, activation, Linear, ...")
        names = {activation_name(m, f"FusedMLP.from_sequential: model[{i}]") for i, m in enumerate(model) if not isinstance(m, nn.Linear)}
        if len(names) > 1:
            raise ValueError(f"FusedMLP.from_sequential: model: found activations {sorted(names)}, expected one kind")
        alternate = all(isinstance(m, nn.Linear) == (i % 2 == 0) for i, m in enumerate(model))
        widths = {m.out_features for m in linears[:-1]}
        if not alternate or len(widths) > 1:
            raise ValueError("FusedMLP.from_sequential: model: found layers that do not alternate or differ in width, expected Linear, "
                             "activation, Linear, ... with one hidden width")
        if len({m.bias is None for m in linears}) > 1:
            raise ValueError("FusedMLP.from_sequential: model: found layers with a bias and without, expected one or the other")
        state = model.state_dict()
        weight = next(iter(state.values()))
        for kind in ("dtype", "device"):
            found = {getattr(t, kind) for t in state.values()}
            if len(found) > 1:
                raise ValueError(f"FusedMLP.from_sequential: model: found {' and '.join(sorted(map(str, found)))}, expected one {kind}")
        self = cls(linears[0].in_features, widths.pop() if widths else linears[0].out_features, linears[-1].out_features, len(linears),
                   names.pop() if names else "identity", linears[0].bias is not None,
                   any(re.search(r"original1$|weight_v$", k) for k in state), activate_last=len(others) == len(linears),
                   device=weight.device, dtype=weight.dtype, **options)
        self.load_state_dict(state)
        for layer, linear in zip(self.layers, linears):
            trains = {name.split(".")[-1]: p.requires_grad for name, p in linear.named_parameters()}
            for name, p in layer.named_parameters():
                p.requires_grad_(any(trains.get(source, False) for source in _SOURCES[name]))
        return self.train(model.training)

    def to_sequential(self):
        """The reverse of from_sequential: an nn.Sequential of Linears and activations with copies of the weights, where a weight norm is folded into the
        weights."""
        make = _MODULE_OF_ACTIVATION.get(self.activation)
        if make is None:
            raise ValueError(f"FusedMLP.to_sequential: activation: found {self.activation!r}, expected one that torch.nn has")
        modules = []
        for layer in self.layers:
            state = {name: p.detach() for name, p in layer.named_parameters()}
            _match_weight_norm(state, "", False)
            out_features, in_features = state["weight"].shape
            linear = nn.Linear(in_features, out_features, bias=self.bias, device=state["weight"].device, dtype=state["weight"].dtype)
            linear.load_state_dict(state)
            for name, p in linear.named_parameters():
                p.requires_grad_(getattr(layer, name).requires_grad)
            modules += [linear, make()]
        return nn.Sequential(*(modules if self.activate_last else modules[:-1])).train(self.training)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        own = f"{prefix}layers."
        keys = [k for k in state_dict if k.startswith(prefix)]
        if not any(k.startswith(own) for k in keys):
            names = self._parameters.keys() | self._buffers.keys() | self._modules.keys()  # parameters and buffers that a subclass has added
            foreign = {k[len(prefix):]: state_dict.pop(k) for k in keys if k[len(prefix):].split(".")[0] not in names}
            layers = _packed_layers(self, foreign) or _named_layers(foreign)  # take their entries out of `foreign`
            state_dict.update({prefix + name: t for name, t in foreign.items()})  # PyTorch reports these, or with strict=False ignores these
            for i, layer in enumerate(layers):
                state_dict.update({f"{own}{i}.{name}": t for name, t in layer.items()})
        for i in range(self.num_layers):
            _match_weight_norm(state_dict, f"{own}{i}.", self.weight_norm)
        super()._load_from_state_dict(state_dict, prefix, *rest)


_C.attach_modules(RMSNorm.forward, FusedMLP.forward)

_ACTIVATION_MODULES = {
    nn.Identity: "identity", nn.ReLU: "relu", nn.SiLU: "silu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid", nn.Softplus: "softplus",
    nn.LeakyReLU: "leaky_relu", nn.GELU: "gelu",
}


_MODULE_OF_ACTIVATION = {name: module for module, name in _ACTIVATION_MODULES.items()} | {"gelu_tanh": lambda: nn.GELU("tanh")}


def activation_name(module, place="activation"):
    """The name of the activation that an nn module computes; raises a ValueError, which begins with `place`, if the kernels have no such activation."""
    name = _ACTIVATION_MODULES.get(type(module))
    if isinstance(module, nn.GELU) and module.approximate == "tanh":
        return "gelu_tanh"
    if isinstance(module, nn.Softplus) and (module.beta != 1 or module.threshold < 20):
        name = None
    if isinstance(module, nn.LeakyReLU) and module.negative_slope != 0.01:
        name = None
    if name is None:
        raise ValueError(f"{place}: found {module}, expected one of {', '.join(_op.ACTIVATIONS)}")
    return name


def _named(op, activation):
    """The name of an activation that is given by its name or as a module."""
    return activation_name(activation, f"{op}: activation") if isinstance(activation, nn.Module) else activation


_FOREIGN = re.compile(r"^(?P<layer>.*?)\.?(?P<name>weight|bias|weight_g|weight_v|parametrizations\.weight\.original[01])$")
_SOURCES = {"weight": ("weight", "weight_v", "original1"), "bias": ("bias",), "gain": ("weight_g", "original0")}
_OWN_NAMES = {"weight": "weight", "bias": "bias", "weight_g": "gain", "weight_v": "weight", "parametrizations.weight.original0": "gain",
              "parametrizations.weight.original1": "weight"}


def _named_layers(state):
    """[{weight, bias, gain}] of the Linears in `state`, in the order of their names' numbers; takes their entries out of `state`."""
    layers = {}
    for key, match in [(key, _FOREIGN.match(key)) for key in state]:
        if match is None:
            continue
        t, name = state.pop(key), _OWN_NAMES[match["name"]]
        layers.setdefault(match["layer"], {})[name] = t.flatten() if name == "gain" else t
    order = sorted(layers, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])
    return [layers[name] for name in order]


def _packed_layers(module, state):
    """The same for mlp-megakernel's v_all (all rows, columns padded to the widest layer) and g_all."""
    if "v_all" not in state or "g_all" not in state:
        return None
    if state["v_all"].dim() != 2:
        raise RuntimeError(f"FusedMLP: v_all: found shape {tuple(state['v_all'].shape)}, expected two dimensions")
    weights, gains = state.pop("v_all"), state.pop("g_all")
    out, at = [], 0
    for layer in module.layers:
        rows, columns = layer.weight.shape
        out.append({"weight": weights[at : at + rows, :columns], "gain": gains[at : at + rows].flatten()})
        at += rows
    if at != weights.shape[0]:
        raise RuntimeError(f"FusedMLP: v_all: found {weights.shape[0]} rows, expected {at}")
    return out


def _match_weight_norm(state, prefix, weight_norm):
    """Converts one layer's entries of a state dict to the parameters of the module: with a gain, or without."""
    weight, gain = state.get(prefix + "weight"), state.get(prefix + "gain")
    if weight is None or weight_norm == (gain is not None):
        return
    norm = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32 if weight.dtype.itemsize < 4 else None)
    if weight_norm:
        state[prefix + "gain"] = norm.to(weight.dtype)
    else:
        state[prefix + "weight"] = (weight * (gain / norm).unsqueeze(1)).to(weight.dtype)
        del state[prefix + "gain"]


def _softplus_alias(name, num_layers, weight_norm):
    def __init__(self, in_features=None, hidden_features=None, out_features=None, *, D=None, H=None, device=None, dtype=None):
        in_features = D if in_features is None else in_features
        hidden_features = H if hidden_features is None else hidden_features
        out_features = hidden_features if out_features is None else out_features
        FusedMLP.__init__(self, in_features, hidden_features, out_features, num_layers, "softplus", bias=False, weight_norm=weight_norm,
                          device=device, dtype=dtype)

    doc = f"mlp-megakernel's {num_layers}-layer softplus MLP without biases{', weight-normalised' if weight_norm else ''}; D and H are the " \
          "widths of input and hidden layers."
    return type(name, (FusedMLP,), {"__init__": __init__, "__doc__": doc, "__module__": __name__})


FusedMLPSoftplus = _softplus_alias("FusedMLPSoftplus", 3, False)
FusedMLPSoftplusWN = _softplus_alias("FusedMLPSoftplusWN", 3, True)
FusedMLP5Softplus = _softplus_alias("FusedMLP5Softplus", 5, False)
FusedMLP5SoftplusWN = _softplus_alias("FusedMLP5SoftplusWN", 5, True)


# --- gated MLP --------------------------------------------------------------------------------------------------------


def _fuses(x, w, *parameters):
    """Whether functional.gated_linear has a fused kernel for these operands that computes the same as PyTorch: on Hopper, in 16 bits, without autocast."""
    return (isinstance(x, torch.Tensor) and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
            and all(t.dtype is x.dtype and t.device == x.device for t in (w, *parameters) if t is not None)
            and not torch.is_autocast_enabled("cuda") and torch.cuda.get_device_capability(x.device)[0] == 9)


def _expect_input(module, x, weight, columns):
    """Refuses an x that does not fit the first product of a module, because the errors of that product do not name x."""
    if isinstance(x, torch.fx.Proxy):
        return
    _op.expect_tensors(module, x=x)
    if x.dim() == 0 or x.shape[-1] != columns:
        raise ValueError(f"{module}: x: found shape {tuple(x.shape)}, expected (..., {columns})")
    if x.dtype is not weight.dtype and functional._autocast_to(x) is None:
        raise ValueError(f"{module}: x: found dtype {x.dtype}, expected the weights' {weight.dtype} (or autocast)")


def _expect_sizes(module, in_features, hidden_features, out_features):
    _op.expect_integers(module, 0, in_features=in_features, hidden_features=hidden_features,
                        out_features=in_features if out_features is None else out_features)


class SwiGLU(nn.Module):
    """w3(silu(gate) * up), [gate | up] = w12(x). On Hopper, in 16-bit types, w12 and the gate are one kernel; elsewhere only the gate is fused.

    x is (..., in_features), the result (..., out_features) in the parameters' dtype, or under autocast in autocast's.
    w12: Linear(in_features, 2 hidden_features), w3: Linear(hidden_features, out_features). order: the order of w12's rows. For all options see
    functional.swiglu.
    """

    def __init__(self, in_features, hidden_features, out_features=None, bias=False, *, order="gate_first", limit=0.0, alpha=1.0,
                 up_offset=0.0, activation="silu", device=None, dtype=None):
        super().__init__()
        if not isinstance(order, str) or order not in _gates.GATE_ORDERS:
            raise ValueError(f"SwiGLU: order: found {order!r}, expected one of {', '.join(_gates.GATE_ORDERS)}")
        functional.gate_numbers("SwiGLU", activation, limit, alpha, up_offset)
        _op.expect_bools("SwiGLU", bias=bias)
        _expect_sizes("SwiGLU", in_features, hidden_features, out_features)
        self.order, self.limit, self.alpha, self.up_offset, self.activation = order, limit, alpha, up_offset, activation
        self.w12 = nn.Linear(in_features, 2 * hidden_features, bias=bias, device=device, dtype=dtype)
        self.w3 = nn.Linear(hidden_features, in_features if out_features is None else out_features, bias=bias, device=device, dtype=dtype)

    def forward(self, x):
        options = {"order": self.order, "limit": self.limit, "alpha": self.alpha, "up_offset": self.up_offset,
                   "activation": self.activation}
        if self._is_plain_linear() and _fuses(x, self.w12.weight, self.w12.bias):
            if is_plain_linear(self.w3) and _fuses(x, self.w3.weight, self.w3.bias):
                return functional.gated_linear(x, self.w12.weight, self.w12.bias, down=self.w3.weight, down_bias=self.w3.bias, **options)
            return self.w3(functional.gated_linear(x, self.w12.weight, self.w12.bias, **options))
        if self._is_plain_linear():
            _expect_input("SwiGLU", x, self.w12.weight, self.w12.in_features)
        return self.w3(functional.swiglu(self.w12(x), **options))

    def _is_plain_linear(self):
        """Whether w12 has not been replaced, hooked or parametrised, and its bias consists of the halves of gate and up."""
        return is_plain_linear(self.w12) and (self.w12.bias is None or self.order != "interleaved")

    def extra_repr(self):
        return f"order={self.order!r}"


def _computes_a_linear(module):
    """Whether a call of the module does nothing but multiply by its weight, which may be parametrised, and add its bias."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and "forward" not in module.__dict__ and not any(hooks)


class WideMLP(nn.Module):
    """w2(f(w1(x))) of two Linears of any width, forward and backward by functional.wide_mlp; w1: (in, hidden), w2: (hidden, out).

    x is (..., in_features), the result (..., out_features). For activation and recompute see functional.wide_mlp. Where w1 or w2 has hooks, or another module
    such as a LoRA adapter in its place, both are called, and only the activation is Ingot's.

    load_state_dict also takes the state dict of an nn.Sequential of two Linears with an activation between them.
    """

    def __init__(self, in_features, hidden_features, out_features=None, activation="leaky_relu_squared", bias=False, *, recompute=False, device=None,
                 dtype=None):
        super().__init__()
        activation = _named("WideMLP", activation)
        _op.activation_number("WideMLP", activation)
        _op.expect_bools("WideMLP", bias=bias, recompute=recompute)
        _expect_sizes("WideMLP", in_features, hidden_features, out_features)
        self.activation, self.recompute = activation, recompute
        self.w1 = nn.Linear(in_features, hidden_features, bias=bias, device=device, dtype=dtype)
        self.w2 = nn.Linear(hidden_features, in_features if out_features is None else out_features, bias=bias, device=device, dtype=dtype)

    def forward(self, x):
        if _computes_a_linear(self.w1) and _computes_a_linear(self.w2):
            return functional.wide_mlp(x, self.w1.weight, self.w2.weight, self.w1.bias, self.w2.bias, activation=self.activation, recompute=self.recompute)
        return self.w2(functional.activation(self.w1(x), self.activation))  # adapters in place of a Linear, or hooks on it

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        for own, other in (("w1.", "0."), ("w2.", "2.")):
            for name in ("weight", "bias"):
                if prefix + other + name in state_dict:
                    state_dict[prefix + own + name] = state_dict.pop(prefix + other + name)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self):
        return f"activation={self.activation!r}, recompute={self.recompute}"


class LinearCrossEntropy(nn.Linear):
    """The last Linear of a model and its loss: forward(x, target) is functional.linear_cross_entropy of its weight, whose logits are never in memory as a
    whole. x: (..., in_features). target: integers of x's leading shape, from 0 to num_classes - 1, or ignore_index. Parameters, state dict and initialisation
    are those of nn.Linear; `logits(x)` computes the logits (..., num_classes) for inference."""

    def __init__(self, in_features, num_classes, bias=False, device=None, dtype=None, *, reduction="mean", ignore_index=-100, label_smoothing=0.0,
                 softcap=0.0, z_loss=0.0):
        _op.expect_integers("LinearCrossEntropy", 0, in_features=in_features, num_classes=num_classes)
        _op.expect_bools("LinearCrossEntropy", bias=bias)
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"LinearCrossEntropy: reduction: found {reduction!r}, expected 'mean', 'sum' or 'none'")
        for name, n, most in (("softcap", softcap, 1e30), ("z_loss", z_loss, float("inf")), ("label_smoothing", label_smoothing, 1)):
            if not 0 <= _op.number("LinearCrossEntropy", name, n) <= most:
                raise ValueError(f"LinearCrossEntropy: {name}: found {n!r}, expected a number from 0" + (f" to {most:g}" if most < float("inf") else ""))
        super().__init__(in_features, num_classes, bias, device, dtype)
        self.reduction, self.ignore_index, self.label_smoothing = reduction, ignore_index, label_smoothing
        self.softcap, self.z_loss = softcap, z_loss

    def forward(self, x, target):
        return functional.linear_cross_entropy(x, self.weight, target, self.bias, reduction=self.reduction, ignore_index=self.ignore_index,
                                               label_smoothing=self.label_smoothing, softcap=self.softcap, z_loss=self.z_loss)

    def logits(self, x):
        found = super().forward(x)
        return self.softcap * torch.tanh(found / self.softcap) if self.softcap else found

    def extra_repr(self):
        return (f"{super().extra_repr()}, reduction={self.reduction!r}, ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, "
                f"softcap={self.softcap}, z_loss={self.z_loss}")


class MegaGemmTriton(SwiGLU):
    """The gated MLP of MGRrmsnorm: hidden = hidden_multiple * d_model, rounded up to a multiple of multiple_of."""

    def __init__(self, d_model, multiple_of=256, hidden_multiple=5 / 3, device=None, dtype=None):
        _op.expect_integers("MegaGemmTriton", 0, d_model=d_model)
        _op.expect_integers("MegaGemmTriton", 1, multiple_of=multiple_of)
        hidden = multiple_of * -(-int(hidden_multiple * d_model) // multiple_of)
        super().__init__(d_model, hidden, device=device, dtype=dtype)


class FusedSwiGLU(nn.Module):
    """The layer of fused-swiglu: value * silu(gate), [value | gate] = x Wf with Wf (in_features, 2 hidden_dim). x is (..., in_features), the result
    (..., hidden_dim). `block`, the size of fused-swiglu's tiles, has no effect."""

    def __init__(self, in_features, hidden_dim, block=64, device=None, dtype=None):
        super().__init__()
        _op.expect_integers("FusedSwiGLU", 0, in_features=in_features, hidden_dim=hidden_dim)
        self.Wf = nn.Parameter(torch.randn(in_features, 2 * hidden_dim, device=device, dtype=dtype))

    def forward(self, x):
        if _fuses(x, self.Wf):
            return functional.gated_linear(x, self.Wf, order="gate_second", columns=True)
        _expect_input("FusedSwiGLU", x, self.Wf, self.Wf.shape[0])
        return functional.swiglu(x @ self.Wf, order="gate_second")

    def extra_repr(self):
        return f"{self.Wf.shape[0]}, {self.Wf.shape[1] // 2}"


class MegaGemmRMSNorm(RMSNorm):
    """The RMSNorm of MGRrmsnorm, with its argument names and its default epsilon."""

    def __init__(self, hidden_size, epsilon=1e-5, device=None, dtype=None):
        super().__init__(hidden_size, eps=epsilon, device=device, dtype=dtype)
