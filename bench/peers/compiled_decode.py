"""A token of decoding by transformers under torch.compile, one stream, with random bf16 weights of a published shape: a peer of gpu_decode.py, in a process of its own.

    python3 bench/peers/compiled_decode.py SIZE CONTEXT TOKENS [--gate FILE] [--tiny]

SIZE is a name of `ingot bench decode --synthetic` among the families. A step is the model with its static cache and the argmax of the logits, compiled as one graph
(fullgraph) and replayed as a CUDA graph (mode reduce-overhead); the next step takes the token from GPU memory. Prints one line of JSON: us, the mean over TOKENS
steps after CONTEXT tokens and some warm steps. --gate: the file whose lock the timed part takes, so that several processes may compile side by side; a file beside
it with the ending .SIZE says that this process has compiled. --tiny: a small model on the CPU without a time, which checks the tokens against the same
steps without a cache.
"""
import argparse
import json
import pathlib
import time

import torch

import gpu_models
from gpu_common import turn

LLAMA, QWEN, QWEN_MOE = "Llama", "Qwen3", "Qwen3Moe"
SHAPES = {
    "llama-3.2-1b": gpu_models.SHAPES["Llama-3.2-1B"],
    "qwen3-4b": gpu_models.SHAPES["Qwen3-4B"],
    "smollm2-135m": (LLAMA, dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64)),
    "llama-3.1-8b": (LLAMA, dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128)),
    "qwen3-30b-a3b": (QWEN_MOE, dict(vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
                                     num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128)),
    "qwen3-0.6b": (QWEN, dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128)),
}
TIED = {"smollm2-135m", "llama-3.2-1b", "qwen3-0.6b", "qwen3-4b"}
WARM = 8


def model_of(size, positions, tiny):
    import transformers

    kind, sizes = SHAPES[size]
    sizes = {**sizes, **(gpu_models.TINY if tiny else {}), "max_position_embeddings": positions, "tie_word_embeddings": size in TIED}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
    try:
        with torch.device("cpu" if tiny else "cuda"):
            return config, getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="sdpa").eval()
    finally:
        torch.set_default_dtype(torch.float32)


def has_experts(config):
    return getattr(config, "num_experts", 0) > 0


def decoder_of(model, config, context, positions, experts, **how):
    """(next(token): the token after `token`, the first token) after a prompt of `context` random tokens."""
    from transformers import StaticCache

    device = model.device
    cache = StaticCache(config=config, max_cache_len=positions)
    ids = torch.randint(config.vocab_size, (1, context), generator=torch.Generator().manual_seed(1)).to(device)
    position = torch.tensor([[context]], device=device)

    @torch.compile(fullgraph=True, **how)
    def step(token, at):
        return model(input_ids=token, position_ids=at, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

    if has_experts(config):
        model.set_experts_implementation("grouped_mm")  # the copies of weights that batched_mm makes for a prompt do not fit
    first = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
    if has_experts(config):
        model.set_experts_implementation(experts)

    def following(token):
        found = step(token, position).clone()  # a replay overwrites the graph's own output
        position.add_(1)
        return found

    return following, first, ids


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("context", type=int)
    parser.add_argument("tokens", type=int)
    parser.add_argument("--gate")
    parser.add_argument("--experts", default="batched_mm", choices=("batched_mm", "grouped_mm"), help="how a mixture's step multiplies by its chosen experts (default: batched_mm)")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    positions = options.context + WARM + options.tokens
    config, model = model_of(options.size, positions, options.tiny)
    following, token, ids = decoder_of(model, config, options.context, positions, options.experts, **({} if options.tiny else {"mode": "reduce-overhead"}))
    if options.tiny:
        for _ in range(options.tokens):
            ids = torch.cat([ids, token], 1)
            token = following(token)
            assert torch.equal(token, model(input_ids=ids).logits[:, -1:].argmax(-1)), ids.shape
        print(json.dumps({"tokens": options.tokens}))
        return
    for _ in range(WARM):
        token = following(token)
    torch.cuda.synchronize()
    if options.gate:
        pathlib.Path(f"{options.gate}.{options.size}").touch()
    with turn(options.gate):
        started = time.perf_counter()
        for _ in range(options.tokens):
            token = following(token)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    print(json.dumps({"us": 1e6 * seconds / options.tokens}))


if __name__ == "__main__":
    main()
