"""Muon's step on a bank of matrices as an operator that writes the parameters and the momentum."""
import torch

from . import _C
from ._op import library, on_one_device

PRODUCTS = {"fp32": 0, "bf16": 1, "tf32": 2}


def run_muon(p, g, momentum, rates, lr, mu, weight_decay, grad_scale, nesterov, row_normalise, steps, coefficients, products):
    """p, g, momentum: (B, R, C), rows dense. See kernels/muon/muon.h."""
    _C.muon(p, g, momentum, rates, lr, mu, weight_decay, grad_scale, nesterov, row_normalise, steps, *coefficients, products)


_SCHEMA = ("muon_(Tensor(a!) p, Tensor g, Tensor(b!) momentum, Tensor? rates, float lr, float mu, float weight_decay, float grad_scale, "
           "bool nesterov, bool row_normalise, int steps, float[3] coefficients, int products) -> ()")
library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    library.impl("muon_", run_muon, _key)
torch.library.register_fake("ingot::muon_", on_one_device(_SCHEMA, lambda *arguments: None), lib=library)
muon_op = torch.ops.ingot.muon_.default
