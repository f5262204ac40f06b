"""The declared operators, one file each (see _declare.py)."""
import importlib
import pkgutil

from .._declare import OPS

__all__ = ["OPS"]

for _found in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
    importlib.import_module(f"{__name__}.{_found.name}")
