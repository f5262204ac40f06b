"""The packages that the parity tests compare with: PyTorch, transformers, tiktoken and others. A test without its packages is skipped or fails.

    with parity_peers.required():
        import torch
    ...
    parser = parity_peers.parser(__doc__)
"""
import argparse
import contextlib
import sys

SKIP_OPTION = "--skip-without-peers"
SKIPPED = 77  # SKIP_RETURN_CODE in tests/tests.cmake


@contextlib.contextmanager
def required():
    """Ends the program with status SKIPPED if an import in the block fails and the command line has SKIP_OPTION; otherwise the import's error remains."""
    try:
        yield
    except ImportError as error:
        if SKIP_OPTION not in sys.argv:
            raise
        print(f"skipped: {error}")
        sys.exit(SKIPPED)


def parser(description):
    """A parser of arguments that accepts SKIP_OPTION."""
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(SKIP_OPTION, action="store_true", help=f"exit with status {SKIPPED} where a package is not installed")
    return arguments
