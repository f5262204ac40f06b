"""The declared operators, one file each (see _declare.py)."""
import importlib
import pkgutil

for _found in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
    importlib.import_module(f"{__name__}.{_found.name}")
