"""The files .pyi, from which editors and type checkers read the types of the package, against the modules."""
import ast
import inspect
import pathlib

import pytest
import torch

import ingot
from conftest import on_cpu

PACKAGE = pathlib.Path(ingot.__file__).parent
MODULES = [name for name in ("functional", "nn", "optim", "hf", "engine") if hasattr(ingot, name)]


def declared(name):
    """(__all__, {name: definitions}) of a file .pyi; several definitions of a name are overloads."""
    tree = ast.parse((PACKAGE / f"{name}.pyi").read_text(encoding="utf-8"))
    everything = next(ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "__all__")
    return everything, definitions(tree.body)


def definitions(body):
    found = {}
    for node in body:
        names = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else [node.target.id] if isinstance(node, ast.AnnAssign) else []
        names = [t.id for t in node.targets] if isinstance(node, ast.Assign) else names
        for name in names:
            found.setdefault(name, []).append(node)
    return found


def parameters(function):
    """{name: (kind, default)} of a definition, as inspect states them; a parameter without a default has inspect.Parameter.empty."""
    a, kinds, empty = function.args, inspect._ParameterKind, inspect.Parameter.empty
    plain = a.posonlyargs + a.args
    defaults = [empty] * (len(plain) - len(a.defaults)) + [value(d) for d in a.defaults]
    found = {p.arg: (kinds.POSITIONAL_OR_KEYWORD, d) for p, d in zip(plain, defaults)}
    if a.vararg:
        found[a.vararg.arg] = kinds.VAR_POSITIONAL, empty
    found |= {p.arg: (kinds.KEYWORD_ONLY, empty if d is None else value(d)) for p, d in zip(a.kwonlyargs, a.kw_defaults)}
    return found | ({a.kwarg.arg: (kinds.VAR_KEYWORD, empty)} if a.kwarg else {})


def value(node):
    return torch.float32 if ast.unparse(node) == "torch.float32" else ast.literal_eval(node)


def expect_same(where, nodes, function):
    real = {p.name: (p.kind, p.default) for p in inspect.signature(function).parameters.values()}
    overloaded = len(nodes) > 1
    for node in nodes:
        found = parameters(node)
        assert found.keys() == real.keys(), where
        for name, (kind, default) in found.items():
            # An overload that is chosen by a parameter states this parameter without its default, after a * where defaults precede it.
            chosen = overloaded and default is inspect.Parameter.empty and real[name][1] is not inspect.Parameter.empty
            if not chosen:
                assert default == real[name][1], f"{where}: {name}"
                behind = overloaded and kind is inspect.Parameter.KEYWORD_ONLY
                assert kind == real[name][0] or behind, f"{where}: {name}"
        if not overloaded:
            assert list(found) == list(real), where


@on_cpu
@pytest.mark.parametrize("module", MODULES)
def test_types_state_the_names_parameters_and_defaults_of_the_module(module):
    real = getattr(ingot, module)
    everything, found = declared(module)
    assert sorted(everything) == sorted(real.__all__)
    for name in everything:
        nodes, thing = found[name], getattr(real, name)
        if isinstance(nodes[0], ast.FunctionDef):
            expect_same(name, nodes, thing)
        elif isinstance(nodes[0], ast.ClassDef):
            members = definitions(nodes[0].body)
            for member, nodes in members.items():
                if isinstance(nodes[0], ast.FunctionDef) and member != "__call__":
                    own = inspect.getattr_static(thing, member)
                    if isinstance(own, property):
                        assert ast.unparse(nodes[0].decorator_list[0]) == "property", f"{name}.{member}"
                    else:
                        function = own.__func__ if isinstance(own, classmethod) else own
                        expect_same(f"{name}.{member}", nodes, function)
            public = {m for m in vars(thing) if not m.startswith("_") and callable(getattr(thing, m)) and m != "extra_repr"}
            assert public <= members.keys() | {"load_state_dict"}, f"{name}: {public - members.keys()}"


@on_cpu
def test_attributes_that_types_state_exist():
    made = [ingot.nn.RMSNorm(8), ingot.nn.FusedMLP(8, 8, 8), ingot.nn.SwiGLU(8, 8), ingot.nn.WideMLP(8, 8), ingot.nn.LinearCrossEntropy(8, 4),
            ingot.nn.FusedSwiGLU(8, 8), ingot.hf.Report()]
    for thing in made:
        _, found = declared("hf" if isinstance(thing, ingot.hf.Report) else "nn")
        for name in definitions(found[type(thing).__name__][0].body):
            assert hasattr(thing, name), f"{type(thing).__name__}.{name}"
    assert (PACKAGE / "py.typed").exists()
