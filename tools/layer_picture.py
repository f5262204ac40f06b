"""docs/gpt-oss-megakernel.svg: a layer of the decode megakernel, each stage's work and wait on one block, beside the time of its bytes at memory speed.

    ingot bench decode --phases --json > token.json && python3 tools/layer_picture.py token.json > docs/gpt-oss-megakernel.svg
"""
import json
import sys

LAYERS, HEAD = {"gpt-oss-120b": 36, "gpt-oss-20b": 24}, 201088 * 2880
BYTES = {"bf16": 2, "fp8": 1, "mxfp4": 17 / 32}  # bytes per number of the head
LEFT, WIDTH, WORK, WAIT, MEMORY = 110, 730, "#3b6ea5", "#d9c8a5", "#5a9367"


def picture(found):
    stages = {name: (s["work_us"], s["wait_us"]) for name, s in found["stages"].items()}
    layer = sum(map(sum, stages.values()))
    layers, token_ms = LAYERS[found["model"]], found["token"]["megakernel"]["mean_ms"]
    memory = (found["token_bytes"] - HEAD * BYTES[found["dense"]]) / layers / found["read_TBps"] * 1e-6
    scale = WIDTH / layer
    yield '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 190" font-family="sans-serif" font-size="12" role="img" aria-labelledby="t">'
    yield (f'<title id="t">A layer of the decode megakernel: {len(stages)} stages\' work and wait in microseconds, beside what memory needs; '
           f'{found["gpu"]}, {found["model"]}, {found["dense"]}</title>')
    yield '<rect width="860" height="190" fill="#fff"/>'
    yield '<text x="10" y="65">block 0</text><text x="10" y="126">memory needs</text>'
    at = LEFT
    for i, (name, times) in enumerate(stages.items()):
        yield f'<text x="{at:.1f}" y="{36 if i % 2 else 20}">{name}</text>'
        for us, fill, ink in zip(times, (WORK, WAIT), (' fill="#fff"', "")):
            width = us * scale
            yield f'<rect x="{at:.1f}" y="46" width="{width:.1f}" height="30" fill="{fill}"/>'
            if width > 22:
                yield f'<text x="{at + width / 2:.1f}" y="66"{ink} text-anchor="middle">{us:.1f}</text>'
            at += width
    yield f'<rect x="{LEFT}" y="106" width="{memory * scale:.1f}" height="30" fill="{MEMORY}"/>'
    yield (f'<text x="{LEFT + memory * scale / 2:.1f}" y="126" fill="#fff" text-anchor="middle">{memory:.1f} of {layer:.1f} us</text>')
    yield f'<rect x="{LEFT}" y="156" width="14" height="14" fill="{WORK}"/><text x="130" y="168">work, us</text>'
    yield f'<rect x="210" y="156" width="14" height="14" fill="{WAIT}"/><text x="230" y="168">waiting for the other blocks, us</text>'
    yield (f'<text x="110" y="186">{found["gpu"]}, {found["model"]}, {found["dense"]}: {layers} layers and the head, {token_ms:.2f} ms a token</text>')
    yield "</svg>"


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        print("\n".join(picture(json.load(file))))


if __name__ == "__main__":
    main()
