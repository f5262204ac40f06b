"""Files of small random models for the tests of the program, written without PyTorch."""
import json
import math
import random
import struct


def save_safetensors(path, tensors):
    """tensors: name -> (dtype, shape, bytes)"""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = dict(dtype=dtype, shape=shape, data_offsets=[at, at + len(data)])
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def bf16_numbers(noise, count, scale=0.3, mean=0):
    words = [struct.unpack("<I", struct.pack("<f", noise.gauss(mean, scale)))[0] >> 16 for _ in range(count)]
    return struct.pack(f"<{count}H", *words)


def write_draft_head(directory, vocab, hidden, boundaries, seed=1, **keys):
    """An EAGLE-3 head with random weights that guesses every second id of the vocabulary."""
    heads, kv_heads, dim, inner, ids = 4, 2, 8, 48, vocab // 2
    directory.mkdir()
    config = dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama", hidden_size=hidden, intermediate_size=inner, num_hidden_layers=1,
                  num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim, rms_norm_eps=1e-5, hidden_act="silu", vocab_size=vocab,
                  draft_vocab_size=ids, rope_theta=10000.0, max_position_embeddings=4096, norm_before_fc=True,
                  eagle_config=dict(eagle_aux_hidden_state_layer_ids=boundaries, use_aux_hidden_state=True))
    (directory / "config.json").write_text(json.dumps(config | keys))
    width, q, kv, n = len(boundaries) * hidden, heads * dim, kv_heads * dim, "midlayer."
    norms = {"input_norm": width, n + "input_layernorm": hidden, n + "hidden_norm": hidden, n + "post_attention_layernorm": hidden, "norm": hidden}
    matrices = {"fc": (hidden, width), n + "self_attn.q_proj": (q, 2 * hidden), n + "self_attn.k_proj": (kv, 2 * hidden),
                n + "self_attn.v_proj": (kv, 2 * hidden), n + "self_attn.o_proj": (hidden, q), n + "mlp.gate_proj": (inner, hidden),
                n + "mlp.up_proj": (inner, hidden), n + "mlp.down_proj": (hidden, inner), "lm_head": (ids, hidden)}
    noise = random.Random(seed)
    tensors = {f"{name}.weight": ("BF16", (size,), bf16_numbers(noise, size, 0.2, 1)) for name, size in norms.items()}
    tensors |= {f"{name}.weight": ("BF16", shape, bf16_numbers(noise, math.prod(shape), 1.5 / shape[1] ** 0.5)) for name, shape in matrices.items()}
    tensors["d2t"] = ("I64", (ids,), struct.pack(f"<{ids}q", *range(ids)))  # 0, 2, 4, ...
    save_safetensors(directory / "model.safetensors", tensors)
    return directory


def write_qwen3(directory, vocab, seed=1, follows=None):
    """A random Qwen3 of two small layers, without a tokenizer. With `follows` the likeliest token behind each of its keys is the key's value, whatever
    the earlier tokens are."""
    hidden, heads, kv_heads, dim, inner = 32, 4, 2, 8, 48
    directory.mkdir()
    config = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2,
                  num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim, rms_norm_eps=1e-6, hidden_act="silu", vocab_size=vocab,
                  rope_theta=10000.0, max_position_embeddings=4096, eos_token_id=vocab - 1)
    (directory / "config.json").write_text(json.dumps(config))
    q, kv, noise, tensors = heads * dim, kv_heads * dim, random.Random(seed), {}
    norms, matrices = {"model.norm": hidden}, {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    for layer in range(2):
        n = f"model.layers.{layer}."
        norms |= {n + "input_layernorm": hidden, n + "post_attention_layernorm": hidden, n + "self_attn.q_norm": dim, n + "self_attn.k_norm": dim}
        matrices |= {n + f"self_attn.{name}_proj": shape for name, shape in dict(q=(q, hidden), k=(kv, hidden), v=(kv, hidden), o=(hidden, q)).items()}
        matrices |= {n + f"mlp.{name}_proj": shape for name, shape in dict(gate=(inner, hidden), up=(inner, hidden), down=(hidden, inner)).items()}
    tensors = {f"{name}.weight": ("BF16", (size,), bf16_numbers(noise, size, 0.2, 1)) for name, size in norms.items()}
    tensors |= {f"{name}.weight": ("BF16", shape, bf16_numbers(noise, math.prod(shape), 1.5 / shape[1] ** 0.5)) for name, shape in matrices.items()}
    if follows:  # the layers add nothing, and the head finds the next token by the embedding of the last one
        for name, (kind, shape, data) in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name] = (kind, shape, bytes(len(data)))
        kind, shape, embeddings = tensors["model.embed_tokens.weight"]
        head, row = bytearray(len(embeddings)), 2 * hidden
        for token, next_token in follows.items():
            head[next_token * row:(next_token + 1) * row] = embeddings[token * row:(token + 1) * row]
        tensors["lm_head.weight"] = (kind, shape, bytes(head))
    save_safetensors(directory / "model.safetensors", tensors)
    return directory
