#!/usr/bin/env python3
"""GPT-OSS against its definition and against Hugging Face transformers, on random checkpoints in every published form.

    parity_gpt_oss.py BUILD/parity_gpt_oss [--keep DIR] [--skip-without-peers]

Three functions, pairwise: the native model (fp32, batches of tokens into a cache), spec/gpt_oss.py (fp64), and transformers'
GptOssForCausalLM (fp32 as it is, and fp64 with its rotation tables in fp64). Checkpoints: bf16 as transformers saves it, MXFP4 blocks and
scales under both published names (sharded and not; the config in each spelling). Compared: logits of chosen rows at contexts
1, 127 to 130, 200 and 4097, and greedy continuations.

Tolerances, of the norm of a row of logits. Definition against transformers in fp64: 1e-10. Native fp32 against the definition in fp64:
twice the error of the definition itself in fp32 at the worst position of this context, and 16 roundings, 1e-6. Native against
transformers, both fp32: the same, and angles that transformers rounds in fp32: position * u radians, u = 2^-24, in q and in k of every layer.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import parity_peers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "spec"))
with parity_peers.required():
    import numpy as np
    import torch
    import transformers
    from safetensors.torch import save_file

import gpt_oss as spec  # noqa: E402

U = 2.0**-24
EXACT_LIMIT = 1e-10


def native_limit(own):
    return 2 * own + 16 * U


def peer_limit(config, own, position):
    return native_limit(own) + 2 * config.layers * position * U


# --- checkpoints -------------------------------------------------------------------------------------------------------
PUBLISHED = dict(vocab_size=211, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                 head_dim=32, num_local_experts=8, num_experts_per_tok=4, max_position_embeddings=131072, sliding_window=128)
OTHER = dict(vocab_size=97, hidden_size=96, intermediate_size=32, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3,
             head_dim=16, num_local_experts=5, num_experts_per_tok=2, max_position_embeddings=2048, sliding_window=40,
             layer_types=["full_attention", "sliding_attention", "sliding_attention"], attention_bias=False, tie_word_embeddings=True,
             rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=16.0, beta_slow=1.0, truncate=True,
                                  original_max_position_embeddings=512))

BARE = PUBLISHED | dict(hidden_size=96, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2, head_dim=64)


def random_model(sizes, seed):
    """Every parameter random, at a scale that gives logits of standard deviation 2 and more, sinks that matter and clamps that clamp."""
    torch.manual_seed(seed)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale, shift = 1.0, 0.0
            if "norm" in name:
                scale, shift = 0.2, 1.0
            elif "embed" in name:
                scale = 1.0
            elif name.endswith("gate_up_proj") or name.endswith("down_proj"):
                scale = 3.0 / p.shape[1] ** 0.5  # (E, in, out)
            elif p.dim() == 2 and "bias" not in name:
                scale = 2.0 / p.shape[1] ** 0.5
            elif "bias" in name:
                scale = 0.3
            p.copy_(torch.randn(p.shape) * scale + shift)
    return model.to(torch.bfloat16).eval()


def published_tensors(model):
    """The tensors of a checkpoint under Hugging Face's published names: experts as MXFP4, everything else bf16."""
    out = {}
    for name, p in model.state_dict().items():
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            out[name + "_blocks"], out[name + "_scales"] = (t.contiguous() for t in spec.mxfp4_encode(p.float().transpose(1, 2)))
        else:
            out[name] = p.clone()
    return out


def published_config(model):
    c = model.config
    return dict(
        architectures=["GptOssForCausalLM"], model_type="gpt_oss", **{k: getattr(c, k) for k in PUBLISHED},
        experts_per_token=c.num_experts_per_tok, attention_bias=True, attention_dropout=0.0, hidden_act="silu",
        initial_context_length=4096, layer_types=c.layer_types, rms_norm_eps=1e-5, rope_theta=150000, swiglu_limit=7.0,
        rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096, rope_type="yarn",
                          truncate=False),
        tie_word_embeddings=False, use_cache=True, eos_token_id=2, pad_token_id=0, torch_dtype="bfloat16",
        quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=[
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]))


def write_sharded(tensors, config, directory, shards):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i:05d}-of-{shards - 1:05d}.safetensors"  # numbered as published
        part = {n: tensors[n] for n in names[i::shards]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = dict(metadata=dict(total_size=sum(t.numel() * t.element_size() for t in tensors.values())), weight_map=weight_map)
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_own(tensors, model, directory):
    """OpenAI's names and config."""
    directory.mkdir()
    c = model.config
    config = dict(num_hidden_layers=c.num_hidden_layers, num_experts=c.num_local_experts, experts_per_token=c.num_experts_per_tok,
                  vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, swiglu_limit=7.0,
                  head_dim=c.head_dim, num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads,
                  sliding_window=c.sliding_window, initial_context_length=4096, rope_theta=150000, rope_scaling_factor=32.0,
                  rope_ntk_alpha=1, rope_ntk_beta=32)
    (directory / "config.json").write_text(json.dumps(config))
    words = [("input_layernorm.weight", "attn.norm.scale"), ("self_attn.o_proj", "attn.out"), ("self_attn.sinks", "attn.sinks"),
             ("post_attention_layernorm.weight", "mlp.norm.scale"), ("mlp.router", "mlp.gate"),
             ("mlp.experts.gate_up_proj_bias", "mlp.mlp1_bias"), ("mlp.experts.down_proj_bias", "mlp.mlp2_bias"),
             ("mlp.experts.gate_up_proj_", "mlp.mlp1_weight."), ("mlp.experts.down_proj_", "mlp.mlp2_weight."),
             ("model.layers.", "block."), ("model.embed_tokens.weight", "embedding.weight"), ("model.norm.weight", "norm.scale"),
             ("lm_head.weight", "unembedding.weight")]
    out = {}
    for name, tensor in tensors.items():
        for hf, own in words:
            name = name.replace(hf, own)
        out[name] = tensor
    for l in range(c.num_hidden_layers):
        for what in ("weight", "bias"):
            out[f"block.{l}.attn.qkv.{what}"] = torch.cat([out.pop(f"block.{l}.self_attn.{p}_proj.{what}") for p in "qkv"])
    save_file(out, directory / "model.safetensors")


# --- the three functions -----------------------------------------------------------------------------------------------
def native(program, directory, cases, layers=0):
    """For each case: logits (rows, V) and the greedy ids."""
    with tempfile.TemporaryDirectory() as temporary:
        asked, found = Path(temporary) / "cases.json", Path(temporary) / "out.f32"
        asked.write_text(json.dumps(dict(cases=cases, layers=layers)))
        subprocess.run([program, str(directory), str(asked), str(found)], check=True)
        numbers = torch.from_numpy(np.fromfile(found, "<f4"))
    vocab = spec.read_config(directory).vocab
    out, at = [], 0
    for c in cases:
        n = len(c["rows"]) * vocab
        out.append((numbers[at:at + n].view(-1, vocab).double(), numbers[at + n:at + n + c["greedy"]].long().tolist()))
        at += n + c["greedy"]
    assert at == len(numbers)
    return out


def exactly(model):
    """transformers computes rotations and norms in fp32 whatever the model's type is; here they are computed in fp64, like the rest."""
    def rotation(self, x, position_ids):
        theta, factor = spec.rope_frequencies(spec.parse_config(model.config.to_dict()))
        angle = position_ids[:, :, None].double() * theta
        return factor * angle.cos(), factor * angle.sin()

    def norm(self, x):
        return spec.rms_norm(x, self.weight, self.variance_epsilon)

    model = model.double()
    model.model.rotary_emb.forward = rotation.__get__(model.model.rotary_emb)
    for module in model.modules():
        if type(module).__name__ == "GptOssRMSNorm":
            module.forward = norm.__get__(module)
    return model


def peer_logits(model, ids, rows):
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, rows]
        return model.lm_head(hidden).double()


def peer_greedy(model, ids, n):
    """transformers' own cached generation: the ids, and the logits from which each id was taken."""
    model.generation_config.eos_token_id = None  # no stop id
    with torch.no_grad():
        prompt = torch.tensor([ids])
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, do_sample=False, eos_token_id=None,
                             output_logits=True, return_dict_in_generate=True)
        assert out.sequences.shape[1] == len(ids) + n
    return out.sequences[0, len(ids):].tolist(), torch.cat(out.logits).double()


def distance(found, expected):
    """The error of the worst row."""
    error = float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    return error if error == error else float("inf")


# --- the comparison ----------------------------------------------------------------------------------------------------
class Report:
    def __init__(self):
        self.passed = self.failed = 0

    def add(self, what, error, limit):
        good = error <= limit
        self.passed, self.failed = self.passed + good, self.failed + (not good)
        print(f"{'ok' if good else 'FAILED':6} {what}: {error:.1e}, allowed {limit:.1e}")

    def greedy(self, what, found, expected, logits, limit):
        """Equal ids, up to a place where the peer's two best are closer than the tolerance of its logits."""
        same = next((i for i, (a, b) in enumerate(zip(found, expected)) if a != b), len(expected))
        if same < len(expected):
            top = logits[same].topk(2).values
            gap = float((top[0] - top[1]) / logits[same].norm())
            print(f"       {what}: {same} of {len(expected)} ids, then a gap of {gap:.1e}")
            return self.add(what, 0.0 if gap < 2 * limit else float("inf"), limit)
        self.add(f"{what}: {len(expected)} ids equal", 0.0, 0.0)


def cases_for(vocab, contexts, greedy, seed):
    g = torch.Generator().manual_seed(seed)
    batches = [[512], [1], [3, 100, 1, 64], [127, 2]]
    out = []
    for i, n in enumerate(contexts):
        ids = torch.randint(vocab, (n,), generator=g).tolist()
        rows = sorted({0, n // 2, max(0, n - 2), n - 1})
        out.append(dict(ids=ids, rows=rows, greedy=greedy, batches=batches[i % 4] if n < 1000 else [512]))
    return out


def compare(report, name, program, directory, exact, peer, contexts, greedy, seed):
    """`exact` is the peer in fp64; `peer` is the unchanged peer, in fp32."""
    config = spec.read_config(directory)
    weights = {dtype: spec.read_weights(directory, config, dtype) for dtype in (torch.float64, torch.float32)}
    cases = cases_for(config.vocab, contexts, greedy, seed)
    for case, (found, ids) in zip(cases, native(program, directory, cases)):
        n, rows = len(case["ids"]), case["rows"]
        with torch.no_grad():
            expected, narrow = (spec.logits(config, w, case["ids"]).double() for w in weights.values())
        own, expected = distance(narrow, expected), expected[rows]
        where = f"{name}, context {n}"
        report.add(f"{where}: native - definition", distance(found, expected), native_limit(own))
        peer_ids, peer_rows = peer_greedy(peer, case["ids"], greedy)
        limit = peer_limit(config, own, n + greedy)
        report.add(f"{where}: native - transformers, last row", distance(found[-1:], peer_rows[:1]), limit)
        report.greedy(f"{where}: greedy", ids, peer_ids, peer_rows, limit)
        if n <= 200:
            report.add(f"{where}: definition - transformers, fp64", distance(peer_logits(exact, case["ids"], rows), expected),
                       EXACT_LIMIT)


def load_peer(directory, **more):
    model = transformers.GptOssForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager",
                                                           experts_implementation="eager", **more)
    return model.float().eval()  # dequantised experts come as bf16, without an error


def published_forms(report, program, root):
    model = random_model(PUBLISHED, 1)
    model.save_pretrained(root / "saved")
    compare(report, "bf16 as saved", program, root / "saved", exactly(load_peer(root / "saved")), load_peer(root / "saved"),
            [1, 200], 24, 1)

    tensors = published_tensors(model)
    write_sharded(tensors, published_config(model), root / "published", 3)
    dequantised = dict(quantization_config=transformers.Mxfp4Config(dequantize=True))
    exact, peer = exactly(load_peer(root / "published", **dequantised)), load_peer(root / "published", **dequantised)
    compare(report, "MXFP4 as published", program, root / "published", exact, peer, [1, 127, 128, 129, 130, 200, 4097], 24, 2)

    write_own(tensors, model, root / "own")
    cases = cases_for(211, [130, 40], 8, 3)
    for layers in (0, 1, 3):  # different names, the same numbers: the same bits
        for (a, x), (b, y) in zip(native(program, root / "own", cases, layers), native(program, root / "published", cases, layers)):
            report.add(f"OpenAI's names and config, {layers or 'all'} layers, bit for bit", float(not (torch.equal(a, b) and x == y)), 0.0)
    config = spec.read_config(root / "own")
    weights = {dtype: spec.read_weights(root / "own", config, dtype) for dtype in (torch.float64, torch.float32)}
    for case, (found, _) in zip(cases, native(program, root / "own", cases, 3)):
        with torch.no_grad():
            expected, narrow = (spec.logits(config, w, case["ids"], layers=3).double() for w in weights.values())
        report.add("the first 3 layers: native - definition", distance(found, expected[case["rows"]]),
                   native_limit(distance(narrow, expected)))


def left_out(report, program, root):
    """For a value that a config leaves out, Ingot takes the same value as transformers: rotation, head_dim, window, epsilon, the kinds of layers."""
    model = random_model(BARE, 6)
    model.save_pretrained(root / "bare")
    path = root / "bare" / "config.json"
    kept = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "num_local_experts", "num_experts_per_tok")
    said = {k: v for k, v in json.loads(path.read_text()).items() if k in kept}
    for name, more in (("nothing", {}), ("rope_theta alone", dict(rope_theta=9000.0, rope_scaling=None)), ("an empty rope_parameters", dict(rope_parameters={})),
                       ("both", dict(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
                                     rope_parameters=dict(rope_type="default", rope_theta=77.0)))):
        path.write_text(json.dumps(said | more))
        compare(report, f"a config that says {name} of rotation", program, root / "bare", exactly(load_peer(root / "bare")),
                load_peer(root / "bare"), [150], 8, 7)


def other_shapes(report, program, root):
    model = random_model(OTHER, 2)
    model.save_pretrained(root / "other", max_shard_size="60KB")
    assert len(list((root / "other").glob("*.safetensors"))) > 2, "expected several shards"
    compare(report, "other shapes, tied, no attention bias, truncated YaRN", program, root / "other",
            exactly(load_peer(root / "other")), load_peer(root / "other"), [1, 39, 40, 41, 150, 600], 24, 4)


def encoding(report, program, root):
    """The converter's MXFP4 numbers are the definition's, byte for byte."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(64, 320, generator=g) * torch.exp2(torch.randint(-12, 6, (64, 1), generator=g).float())
    x[3, :64] = 0
    x[4, :32] = torch.tensor([6.0, -6, 7, 5, 2.5, 3.5, 0.25, -0.25] * 4)
    x[5] = x[5].to(torch.bfloat16).float()
    source, target = root / "numbers.f32", root / "numbers.mxfp4"
    source.write_bytes(x.numpy().astype("<f4").tobytes())
    subprocess.run([program, "--encode", str(source), str(x.shape[1]), str(target)], check=True)
    blocks, scales = spec.mxfp4_encode(x)
    expected = blocks.numpy().tobytes() + scales.numpy().tobytes()
    report.add("MXFP4 encoding, byte for byte", float(target.read_bytes() != expected), 0.0)


def main():
    parser = parity_peers.parser(__doc__)
    parser.add_argument("program", help="the native half, target `parity_gpt_oss`")
    parser.add_argument("--keep", help="write the checkpoints here and keep them")
    args = parser.parse_args()
    torch.set_num_threads(1)  # with single tokens threads mostly wait for each other
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    report = Report()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(args.keep or temporary)
        root.mkdir(exist_ok=True)
        encoding(report, args.program, root)
        published_forms(report, args.program, root)
        left_out(report, args.program, root)
        other_shapes(report, args.program, root)
    print(f"{report.passed} passed, {report.failed} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
