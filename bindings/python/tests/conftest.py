"""`device` runs every test on INGOT_TEST_DEVICE (cpu by default; cuda on a GPU machine)."""
import os

import pytest
import torch

DEVICE = os.environ.get("INGOT_TEST_DEVICE", "cpu")


@pytest.fixture
def device():
    return torch.device(DEVICE)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def pytest_report_header():
    import ingot

    return f"ingot {ingot.__version__} from {os.path.dirname(ingot.__file__)}, device {DEVICE}, torch {torch.__version__}"


on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="the oracle's types run on CPUs")
on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")


def has_loss(device, **options):
    """Whether this build and machine have linear_cross_entropy, with these options, on the device."""
    from ingot import functional

    try:
        target = torch.zeros(1, dtype=torch.int64, device=device)
        functional.linear_cross_entropy(torch.ones(1, 8, device=device), torch.ones(2, 8, device=device), target, **options)
    except NotImplementedError:
        return False
    return True
