"""bench/peers/gpu_models.py on a CPU, with small models: every variant trains, and a row of its report has the required fields."""
import importlib.util
import pathlib
import sys

import pytest
import torch

from conftest import on_cpu

pytest.importorskip("transformers", minversion="5.0")
PROGRAM = pathlib.Path(__file__).resolve().parents[3] / "bench" / "peers" / "gpu_models.py"


@pytest.fixture(scope="module")
def models():
    sys.path.insert(0, str(PROGRAM.parent))
    try:
        spec = importlib.util.spec_from_file_location("gpu_models", PROGRAM)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(PROGRAM.parent))


@on_cpu
@pytest.mark.parametrize("model", ("Llama-3.2-1B", "Qwen3-4B"))
def test_patched_models_train_with_the_losses_of_the_model_as_it_is(models, model):
    found = {variant: models.measure_variant(model, variant, True, "cpu", 5, 2) for variant in ("torch_eager", "patch", "patch_attention")}
    found |= {"torch_compile": "ran past its time", "patch_compile": "ended", "patch_attention_compile": "ended", "liger": "not installed, and not given by path"}
    assert torch.get_default_dtype() is torch.float32
    rows = list(models.results_of(model, models.OURS, found, 1.0))
    assert [r["name"] for r in rows] == [f"{model}, training step", f"{model}, training step, attention too"]
    for r in rows:
        assert r["error"] <= r["tolerance"] and r["ours_us"] > 0 and r["limit_us"] > 0 and r["peers"].keys() == {"torch_eager"}
        assert r["absent"] == {"torch_compile": "ran past its time", "liger": "not installed, and not given by path"}
    report = {"suite": "models", "tree": "0" * 16, "gpu": "GPU", "driver": "1", "cuda": "13.0", "date": "2026-01-01", "command": "x",
              "ceilings": {"copy_TBps": 4.0, "read_TBps": 4.5, "bf16_TFLOPs": 700.0}, "results": rows}
    assert sys.modules["reports"].problems_of(report) == []  # of the folder tools
    losses = found["patch"]["losses"]
    assert losses[4] < losses[0]  # the fifth step sees the first batch again


@on_cpu
def test_operations_are_those_of_the_published_shapes(models):
    # 1.24 and 4.02 billion weights, of which the embedding counts once, as the head.
    assert models.flops("Llama-3.2-1B", 1_235_814_400, False) == pytest.approx(6 * 1.2358144e9 * 8192 + 12 * 4 * 2048 * 2049 / 2 * 32 * 64 * 16)
    assert models.flops("Qwen3-4B", 1, True) == 6 * 32 + 12 * 2 * 16 * 17 // 2 * 4 * 8 * 2
