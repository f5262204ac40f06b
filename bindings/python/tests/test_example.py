"""The examples at sizes that take a second, and the PNG reader on every row filter."""
import importlib.util
import json
import pathlib
import struct
import sys
import zlib

import pytest
import torch

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example():
    return loaded("neural_image")


def test_the_page_on_functions_runs_and_states_their_layouts():
    page = (EXAMPLES.parent / "docs" / "python.md").read_text(encoding="utf-8")
    code, = (block.split("```")[0] for block in page.split("```python\n") if block.startswith("import torch\n"))
    names = {}
    exec(code, names)
    x, w = names["x"], names["w"]
    torch.testing.assert_close(names["y"], torch.nn.functional.rms_norm(x, (256,), w, 1e-6))
    gate, up = (x @ half.T for half in names["w12"].chunk(2))
    torch.testing.assert_close(names["h"], torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-3)
    assert (names["o"].shape, names["h"].shape, names["loss"].shape) == ((1, 512, 8, 64), (4, 512), ())


def test_fits_a_made_image_and_writes_picture_and_plot(example, device, tmp_path, monkeypatch, capsys):
    arguments = ["--size", "32", "--steps", "120", "--batch", "512", "--width", "32", "--no-compile"]
    monkeypatch.setattr(sys, "argv", ["neural_image.py", "--device", device.type, "--out", str(tmp_path), *arguments])
    example.main()
    decibels = float(capsys.readouterr().out.split("PSNR ")[1].split()[0])
    assert decibels > 14  # one grey for the whole image: 10
    assert example.read_png(tmp_path / "neural_image.png").shape == (32, 64, 3)
    assert "<polyline" in (tmp_path / "neural_image.svg").read_text(encoding="utf-8")


def filtered(pixels, kind):
    """Rows of a PNG (bytes of shape (H, stride)) under one filter, straight from the definition."""
    height, stride = pixels.shape
    step, out = 3, b""
    for r in range(height):
        row = []
        for i in range(stride):
            left = int(pixels[r, i - step]) if i >= step else 0
            up = int(pixels[r - 1, i]) if r else 0
            corner = int(pixels[r - 1, i - step]) if r and i >= step else 0
            p = left + up - corner
            paeth = min((abs(p - left), 0, left), (abs(p - up), 1, up), (abs(p - corner), 2, corner))[2]
            row.append((int(pixels[r, i]) - (0, left, up, (left + up) // 2, paeth)[kind]) % 256)
        out += bytes([kind, *row])
    return out


@pytest.mark.parametrize("kind", range(5))
def test_reads_every_row_filter(example, tmp_path, kind):
    pixels = torch.randint(0, 256, (5, 4, 3), dtype=torch.uint8)

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    path = tmp_path / "in.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 5, 8, 2, 0, 0, 0))
                     + chunk(b"IDAT", zlib.compress(filtered(pixels.view(5, 12), kind))) + chunk(b"IEND", b""))
    assert torch.equal((example.read_png(path) * 255).round().to(torch.uint8), pixels)


@pytest.mark.parametrize("content", [None, b"", b"GIF89a", b"\x89PNG\r\n\x1a\n", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0", "cut"])
def test_an_image_that_cannot_be_read_is_one_line(example, tmp_path, content):
    path = tmp_path / "in.png"
    if content == "cut":
        example.write_png(path, torch.rand(8, 8, 3))
        content = path.read_bytes()[:-30]
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        example.read_png(path)
    assert str(path) in str(stopped.value) and "\n" not in str(stopped.value)


@pytest.mark.parametrize("arguments", [["--device", "nonsense"], ["--batch", "0"], ["--depth", "9"], ["--steps", "-1"]])
def test_options_are_checked_before_anything_is_fitted(example, tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["neural_image.py", "--device", "cpu", "--out", str(tmp_path), *arguments])
    with pytest.raises(SystemExit):
        example.main()
    assert f"{arguments[0]}: found {arguments[1]}, expected" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon of its own")
def test_a_llama_learns_the_same_from_both_parts(device, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text"
    text.write_text("one two three four five six seven eight nine ten " * 400, encoding="utf-8")
    sizes = {"steps": 12, "batch": 2, "context": 32, "width": 32, "layers": 2, "heads": 2, "hidden": 64, "vocab": 64}
    arguments = [word for name, n in sizes.items() for word in (f"--{name}", str(n))]
    monkeypatch.setattr(sys, "argv", ["llama.py", "--device", device.type, "--text", str(text), "--out", str(tmp_path), "--no-compile", *arguments])
    loaded("llama").main()
    result = json.loads((tmp_path / "llama.json").read_text(encoding="utf-8"))
    assert [run["name"] for run in result["runs"]] == ["PyTorch", "Ingot"]
    assert all(run["losses"][-1] < run["losses"][0] - 0.3 for run in result["runs"])
    # On a GPU both runs are in bf16. On a CPU PyTorch's Muon iterates in bf16 and Ingot's in fp32, so their updates differ by 2^-8.
    assert result["most_apart"] < 0.05
    assert "<polyline" in (tmp_path / "llama.svg").read_text(encoding="utf-8")
    assert "tokens/s" in capsys.readouterr().out
