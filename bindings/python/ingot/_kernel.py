"""Operators around one kernel call. From one declaration follow the function that lays out the operands, allocates the results and runs the kernel, the
operator with its fake kernel, and the refusal of operands. Operators over rows with one result need less: _declare.py.

    gate = kernel("swiglu_gate(Tensor packed, Tensor? up, ...) -> Tensor",
                  results=lambda packed, up, *options: (new tensors, None for a result that these arguments do not ask for),
                  call=lambda packed, up, ..., h: runs the kernel on operands that are laid out and on the results)

Both the function and the fake kernel call `results`, so their shapes agree. For a result that is None in `results`, gate.run returns None, and
gate.operator, whose results must be tensors, returns an empty tensor.
"""
from dataclasses import dataclass
from typing import Callable

import torch

from ._op import as_rows, copy_apart, dense, or_nothing, register

_NARROW = (torch.bfloat16, torch.float16)

_RUN = """def run({names}):
    check({names})
{widen}{layout}    found = results({names})
    call({names}, *found)
    return {value}
"""
_WIDEN = """    if {first}.dtype in NARROW and not {first}.is_cuda:
        return widened(run, ({names}))
"""


@dataclass
class Kernel:
    run: Callable
    operator: Callable


def _widened(run, arguments):
    found = run(*(a.float() if isinstance(a, torch.Tensor) and a.dtype in _NARROW else a for a in arguments))
    dtype = arguments[0].dtype
    return found.to(dtype) if isinstance(found, torch.Tensor) else tuple(None if t is None else t.to(dtype) for t in found)


def kernel(schema, results, call, *, rows=(), strides=1, apart=(), widens=False, check=lambda *arguments: None, backward=None, setup=None):
    """rows: names of the tensors (..., C) whose rows may lie apart, with up to `strides` strides; the other tensors are made contiguous. apart: those of them
    whose copies have no neighbours in memory. widens: on a CPU, 16-bit operands are computed in fp32, and the results are rounded. check: raises for unsupported arguments, before anything is allocated."""
    parsed = torch._C.parse_schema(f"ingot::{schema}")
    names = [a.name for a in parsed.arguments]
    tensors = [a.name for a in parsed.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]
    single = len(parsed.returns) == 1
    copy = {t: "copy_apart" if t in apart else "Tensor.contiguous" for t in tensors}
    layout = "".join(f"    {t} = {f'as_rows({t}, {strides}, {copy[t]})' if t in rows else f'dense({t})'}\n" for t in tensors)
    fill = {"names": ", ".join(names), "first": names[0]}
    scope = {"as_rows": as_rows, "copy_apart": copy_apart, "Tensor": torch.Tensor, "dense": dense, "check": check, "results": results, "call": call,
             "NARROW": _NARROW, "widened": _widened}
    exec(_RUN.format(**fill, layout=layout, widen=_WIDEN.format(**fill) if widens else "", value="found[0]" if single else "found"), scope)
    run = scope["run"]

    def all_tensors(found, like):
        return found[0] if single else tuple(or_nothing(t, like) for t in found)

    def run_operator(*arguments):
        found = run(*arguments)
        return all_tensors((found,) if single else found, arguments[0])

    def fake(*arguments):
        return all_tensors(results(*arguments), arguments[0])

    return Kernel(run, register(schema, run_operator, fake, backward, setup))
