"""Declared operators: from one declaration follow the operator with its fake kernel, its derivatives of any order, the function in
ingot.functional with its refusals and its docstring, the row of the table in docs/python.md, and the cases of the tests and of tools/fuzz_ops.py.

A declaration is a file in ingot/ops that calls `declare`. It serves operators over rows: the first argument x is (..., C), every other tensor
has x's shape, or (C) where it is among `columns`, and the result has x's shape and dtype. The kernels are _C.<name> and _C.<name>_backward,
which native/declared.cpp lists:

    <name>(x, other tensors, y, options)
    <name>_backward(dy, x, other tensors, dx, gradients of the other tensors, options)      gradients of (C) accumulate, in the type of sums

Operators of other shapes declare their native calls and kernels (_kernel.py), and their derivatives are written by hand (_rms_norm.py is an example).
"""
from dataclasses import dataclass, field
from typing import Callable

import torch
from torch.compiler import is_dynamo_compiling

from . import _C, _plain
from ._second_order import gradients, with_formula
from ._op import as_rows, dense, empty_rows, expect_tensors, fake_rows, register, sum_dtype

OPS = {}  # by name, in the order of declaration


@dataclass
class Declared:
    name: str
    signature: str  # "Tensor x, float cap=30.0"
    summary: str  # the formula in words or symbols: the first sentence of the docstring, and the text in the table
    formula: Callable  # takes the same arguments, with tensors in fp32 or fp64, and uses PyTorch's own operations
    columns: tuple = ()  # tensors of shape (C)
    native: Callable = lambda *options: options  # converts the options to the kernels' form; raises a ValueError for an unsupported option
    options: tuple = ({},)  # cases for tests: options by name
    jumps: tuple = ()  # indices of cases with a discontinuous derivative
    tensors: tuple = ()  # names of the tensors; x is the first
    operator: Callable = None
    backward: Callable = None
    function: Callable = None
    others: list = field(default_factory=list)  # names of the options

    def split(self, arguments):
        return arguments[: len(self.tensors)], arguments[len(self.tensors):]

    def check(self, arguments):
        tensors, options = self.split(arguments)
        x = tensors[0]
        for name, t in zip(self.tensors, tensors):
            expect_tensors(self.name, **{name: t})
        if x.dim() == 0:
            raise ValueError(f"{self.name}: {self.tensors[0]}: found a tensor without dimensions, expected at least one")
        for name, t in zip(self.tensors[1:], tensors[1:]):
            expected = x.shape[-1:] if name in self.columns else x.shape
            if t.shape != expected or (name not in self.columns and t.dtype is not x.dtype):
                raise ValueError(f"{self.name}: {name}: found {tuple(t.shape)} {t.dtype}, expected {tuple(expected)} {x.dtype}")
        self.native(*options)

    def run(self, *arguments):
        tensors, options = self.split(arguments)
        x, *others = self._laid_out(tensors)
        y = empty_rows(x)
        getattr(_C, self.name)(x, *others, y, *self.native(*options))
        return y

    def run_backward(self, dy, *arguments):
        tensors, options = self.split(arguments)
        tensors = self._laid_out(tensors)
        found = [torch.zeros(t.shape, dtype=sum_dtype(tensors[0].dtype), device=t.device) if name in self.columns else empty_rows(t)
                 for name, t in zip(self.tensors, tensors)]
        getattr(_C, f"{self.name}_backward")(as_rows(dy), *tensors, *found, *self.native(*options))
        return found[0] if len(found) == 1 else tuple(found)

    def _laid_out(self, tensors):
        return [dense(t) if name in self.columns else as_rows(t) for name, t in zip(self.tensors, tensors)]

    def fake_backward(self, dy, *arguments):
        tensors, _ = self.split(arguments)
        found = [t.new_empty(t.shape, dtype=sum_dtype(tensors[0].dtype)) if name in self.columns else fake_rows(t)
                 for name, t in zip(self.tensors, tensors)]
        return found[0] if len(found) == 1 else tuple(found)

    def plain(self, *arguments):
        """The formula, in the types in which the kernels compute; can be differentiated any number of times."""
        tensors, options = self.split(arguments)
        return self.formula(*map(_plain._wide, tensors), *options).to(tensors[0].dtype)

    def backward_formula(self, dy, *arguments):
        tensors, options = self.split(arguments)
        found = gradients(lambda *tensors: self.plain(*tensors, *options), tensors, (True,) * len(tensors), (dy,))
        return found[0] if len(found) == 1 else found

    def setup(self, ctx, inputs, output):
        tensors, ctx.options = self.split(inputs)
        ctx.save_for_backward(*tensors)

    def differentiate(self, ctx, dy):
        tensors = ctx.saved_tensors
        found = self.backward(dy, *tensors, *ctx.options)
        found = (found,) if isinstance(found, torch.Tensor) else found
        return *(g.to(t.dtype) if need else None for g, t, need in zip(found, tensors, ctx.needs_input_grad)), *(None,) * len(ctx.options)

    def call(self, *arguments):
        x = arguments[0]
        if not isinstance(x, torch.Tensor):
            if isinstance(x, torch.fx.Proxy):
                return x.tracer.create_proxy("call_function", self.function, arguments, {})
            raise TypeError(f"{self.name}: {self.tensors[0]}: found {type(x).__name__}, expected torch.Tensor")
        self.check(arguments)
        if not is_dynamo_compiling() and _C.route(*self.split(arguments)[0]) == _C.PLAIN:
            return self.run(*arguments)
        return self.plain(*arguments) if _plain.needed() else self.operator(*arguments)


_FUNCTION = """def {name}({parameters}):
    return OPS[{name!r}].call({arguments})
"""


def declare(schema, summary, formula, *, details="", columns=(), native=None, options=({},), jumps=()):
    """Registers the operator of `schema`, "name(Tensor x, ..., float option=1.0) -> Tensor", and its backward operator; returns its Declared."""
    parsed = torch._C.parse_schema(f"ingot::{schema}")
    name, arguments = parsed.name.removeprefix("ingot::"), parsed.arguments
    tensors = [a.name for a in arguments if str(a.type) == "Tensor"]
    op = Declared(name, schema[schema.index("(") + 1 : schema.index(") ->")], summary, formula, tuple(columns), options=options, jumps=jumps,
                  tensors=tuple(tensors), others=[a.name for a in arguments[len(tensors):]])
    if native is not None:
        op.native = native
    without_defaults = ", ".join(part.split("=")[0] for part in op.signature.split(", "))
    results = "Tensor" if len(tensors) == 1 else f"({', '.join(['Tensor'] * len(tensors))})"
    op.backward = register(f"{name}_backward(Tensor dy, {without_defaults}) -> {results}", op.run_backward, op.fake_backward, **with_formula(op.backward_formula))
    op.operator = register(f"{name}({without_defaults}) -> Tensor", op.run,  # PyTorch omits arguments that equal their defaults
                           lambda x, *_: fake_rows(x), op.differentiate, op.setup)
    parameters = ", ".join(f"{a.name}={a.default_value!r}" if a.has_default_value() else a.name for a in arguments)
    made = {}
    exec(_FUNCTION.format(name=name, parameters=parameters, arguments=", ".join(a.name for a in arguments)), globals(), made)
    op.function = made[name]
    op.function.__module__ = "ingot.functional"  # the function's public module
    shapes = "".join(f" {t}: {'(C)' if t in columns else 'as ' + tensors[0]}." for t in tensors[1:])
    op.function.__doc__ = (f"{summary}\n\n    {tensors[0]}: (..., C), float32, bfloat16 or float16, on a CPU float64 too.{shapes} {details}\n"
                           f"    Returns a tensor of {tensors[0]}'s shape and dtype. Errors are those of ingot.functional.\n    ")
    OPS[name] = op
    return op


def table():
    """The table of docs/python.md: one row for each declared function."""
    lines = ["| function of `ingot.functional` | result |", "|---|---|"]
    return "\n".join(lines + [f"| `{op.name}({', '.join([*op.tensors, *op.others])})` | {op.summary} |" for op in OPS.values()])
