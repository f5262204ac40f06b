#!/usr/bin/env python3
"""EAGLE-3 draft heads on the CPU against their definition, spec/eagle.py, on a small model that is trained here.

    parity_draft_head.py BUILD/parity_draft_head [--keep DIR] [--skip-without-peers]

A GPT-OSS of 4 layers learns a page of this repository's licence byte by byte, and a head of each published kind learns to guess its tokens by
training-time test: each step of the training repeats the layer with its own output for the features, as the guesses of a draft do. Then the
native engine answers prompts with drafts of 4 tokens, greedily and at temperature 1. Compared: every guess of every step, hence every count
of accepted tokens; the answer with the one without drafts (in the native half); and the tokens of a step on average, greedily at least 1.6.

The heads answer again with their matrices in fp8 and in MXFP4 (ingot's --draft-dense). Printed: the tokens of a step beside those of bf16, of all
heads together. fp8 may lose 3 %, MXFP4 10 %.

A guess may differ only where the definition's logits of both tokens are closer than fp32 can tell: 1e-4 of the largest.
"""
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import parity_peers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
with parity_peers.required():
    import torch
    import torch.nn.functional as F
    from safetensors.torch import save_file
from spec import decoder, eagle, gpt_oss  # noqa: E402

TOO_CLOSE = 1e-4  # of the largest logit
MOST = 4          # tokens of a draft
TOKENS = 96       # of an answer
CONTEXT = 256
TARGET = dict(model_type="gpt_oss", vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
              num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=CONTEXT,
              sliding_window=32, eos_token_id=0, rope_theta=10000.0,
              rope_scaling=dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=128))
HEAD = dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama", hidden_size=64, intermediate_size=160, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, num_hidden_layers=1, rms_norm_eps=1e-5, hidden_act="silu", vocab_size=256,
            max_position_embeddings=CONTEXT, rope_theta=10000.0)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
KINDS = {  # name: keys of config.json, ids of the head, attention window of the run
    "plain": (dict(eagle_config=dict(eagle_aux_hidden_state_layer_ids=[1, 2, 4])), 48, 0),
    "norm_before_fc, llama3, a window": (dict(norm_before_fc=True, rope_scaling=LLAMA3, eagle_config=dict(
        eagle_aux_hidden_state_layer_ids=[1, 3, 4], norm_before_fc=True)), 48, 24),
    "fc_norm and norm_output, yarn": (dict(fc_norm=True, norm_output=True, rope_parameters=YARN, eagle_aux_hidden_state_layer_ids=[2, 4]), 48, 0),
    "norm_before_residual, the target's head": (dict(norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[0, 2, 4]), 256, 0),
}


def text_ids():
    return torch.tensor(list((ROOT / "LICENSE").read_bytes()[600:2200]))


# --- the target --------------------------------------------------------------------------------------------------------
def random_target(c, generator):
    draw = lambda *shape: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    w = {"model.embed_tokens.weight": draw(c["vocab_size"], c["hidden_size"]) * 4, "lm_head.weight": draw(c["vocab_size"], c["hidden_size"]),
         "model.norm.weight": torch.ones(c["hidden_size"])}
    C, I, E, D = c["hidden_size"], c["intermediate_size"], c["num_local_experts"], c["head_dim"]
    Q, K = c["num_attention_heads"] * D, c["num_key_value_heads"] * D
    for l in range(c["num_hidden_layers"]):
        n = f"model.layers.{l}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            w[f"{n}{name}.weight"] = torch.ones(C)
        w[n + "self_attn.sinks"] = torch.zeros(c["num_attention_heads"])
        for p, (out, width) in dict(q=(Q, C), k=(K, C), v=(K, C), o=(C, Q)).items():
            w[f"{n}self_attn.{p}_proj.weight"], w[f"{n}self_attn.{p}_proj.bias"] = draw(out, width), torch.zeros(out)
        w[n + "mlp.router.weight"], w[n + "mlp.router.bias"] = draw(E, C), torch.zeros(E)
        w[n + "mlp.experts.gate_up_proj"] = draw(E, 2 * I, C).transpose(1, 2).contiguous()
        w[n + "mlp.experts.gate_up_proj_bias"] = torch.zeros(E, 2 * I)
        w[n + "mlp.experts.down_proj"] = draw(E, C, I).transpose(1, 2).contiguous()
        w[n + "mlp.experts.down_proj_bias"] = torch.zeros(E, C)
    return w


def train(parameters, steps, rate, loss_of):
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    return float(loss.detach())


def train_target(directory, text, generator):
    config = gpt_oss.parse_config(TARGET)
    stored = random_target(TARGET, generator)
    parameters = [p.requires_grad_() for p in stored.values()]

    def loss_of():
        begin = int(torch.randint(len(text) - 129, (1,), generator=generator))
        return gpt_oss.losses(config, gpt_oss.name_weights(config, stored, torch.float32), text[begin:begin + 129]).mean()

    loss = train(parameters, 350, 6e-3, loss_of)
    stored = {name: p.detach().bfloat16() for name, p in stored.items()}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(TARGET))
    save_file(stored, directory / "model.safetensors")
    return config, gpt_oss.name_weights(config, stored, torch.float64), loss


# --- heads -------------------------------------------------------------------------------------------------------------
def random_head(keys, ids, generator):
    draw = lambda *shape: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    C, I, D = HEAD["hidden_size"], HEAD["intermediate_size"], HEAD["head_dim"]
    Q, K = HEAD["num_attention_heads"] * D, HEAD["num_key_value_heads"] * D
    head = eagle.parse_config(keys, TARGET["num_hidden_layers"])
    width = len(head.boundaries) * C
    matrices = {"fc": (C, width), "midlayer.self_attn.q_proj": (Q, 2 * C), "midlayer.self_attn.k_proj": (K, 2 * C),
                "midlayer.self_attn.v_proj": (K, 2 * C), "midlayer.self_attn.o_proj": (C, Q), "midlayer.mlp.gate_proj": (I, C),
                "midlayer.mlp.up_proj": (I, C), "midlayer.mlp.down_proj": (C, I)}
    norms = {"midlayer.input_layernorm": C, "midlayer.hidden_norm": C, "midlayer.post_attention_layernorm": C, "norm": C}
    if head.norm_before_fc:
        norms["input_norm"] = width
    if head.fc_norm:
        norms |= {f"fc_norm.{i}": C for i in range(len(head.boundaries))}
    if ids < TARGET["vocab_size"]:
        matrices["lm_head"] = (ids, C)
    w = {f"{name}.weight": draw(*shape) for name, shape in matrices.items()}
    return head, w | {f"{name}.weight": torch.ones(n) for name, n in norms.items()}


def repeated_layer(h, w, tokens, g, earlier):
    """The layer in the training: row p sees the first repetition's rows 0 to p, and of each later repetition its own row.

    tokens and g (T, ...) are those of repetition len(earlier); its rows stand at positions p + len(earlier)."""
    T, step = len(tokens), len(earlier)
    n = eagle.norm(h, g, w["hidden_norm"])
    x = torch.cat([eagle.norm(h, w["embed"][tokens], w["embed_norm"]), n], dim=-1)
    q, k, v = ((x @ w[p].T).view(T, -1, h.head_dim) for p in "qkv")
    turn = lambda y: decoder.rotate(h.rope, torch.cat([y.new_zeros(step, *y.shape[1:]), y]))[step:]
    group = h.heads // h.kv_heads
    q, k, v = turn(q), turn(k).repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    earlier.append((k, v))
    distance = torch.arange(T)[:, None] - torch.arange(T)
    scores = [torch.einsum("qhd,khd->hqk", q, earlier[0][0]).masked_fill(distance < 0, -torch.inf)]
    scores += [torch.einsum("qhd,qhd->hq", q, keys)[..., None] for keys, _ in earlier[1:]]
    p = (torch.cat(scores, dim=-1) / h.head_dim ** 0.5).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", p[..., :T], earlier[0][1])
    for i, (_, values) in enumerate(earlier[1:]):
        mixed = mixed + p[..., T + i].T[..., None] * values
    r = (n if h.norm_before_residual else g) + mixed.flatten(1) @ w["o"].T
    m = eagle.norm(h, r, w["mlp_norm"])
    return r + (F.silu(m @ w["gate"].T) * (m @ w["up"].T)) @ w["down"].T


def train_head(directory, keys, ids, target_config, target, text, generator):
    keys = HEAD | keys | dict(draft_vocab_size=ids)
    head, stored = random_head(keys, ids, generator)
    counts = torch.bincount(text, minlength=TARGET["vocab_size"])
    known = counts.argsort(descending=True, stable=True)[:ids].sort().values
    if ids < TARGET["vocab_size"]:
        stored["d2t"] = known - torch.arange(ids)
        stored["t2d"] = torch.zeros(TARGET["vocab_size"], dtype=torch.bool).index_fill(0, known, True)
    to_head = torch.full((TARGET["vocab_size"],), -1).index_put((known,), torch.arange(ids))
    begins = range(0, len(text) - CONTEXT // 2, 32)
    passages = []
    with torch.no_grad():
        for begin in begins:
            part = text[begin:begin + CONTEXT // 2]
            streams = gpt_oss.residual_streams(target_config, target, part)
            likeliest = (gpt_oss.rms_norm(streams[-1], target["norm"], target_config.norm_eps) @ target["head"].T).argmax(-1)
            passages.append((part, torch.cat([streams[b] for b in head.boundaries], dim=-1).float(), to_head[likeliest]))
    parameters = [p.requires_grad_() for p in stored.values() if p.is_floating_point()]

    def loss_of():
        part, states, likeliest = passages[int(torch.randint(len(passages), (1,), generator=generator))]
        w = eagle.name_weights(head, stored, target["embed"], target["head"], torch.float32)
        rows, loss, earlier = len(part) - 1 - MOST, 0, []
        g = eagle.features(head, w, states)[:rows]
        for step in range(MOST):  # row p guesses token p + 2 + step after token p + 1 + step
            y = repeated_layer(head, w, part[1 + step:1 + step + rows], g, earlier)
            u = eagle.norm(head, y, w["norm"])
            wanted = likeliest[1 + step:1 + step + rows]
            loss = loss + 0.9 ** step * F.cross_entropy(u @ w["lm_head"].T, wanted, ignore_index=-1)
            g = u if head.norm_output else y
        return loss

    loss = train(parameters, 300, 6e-3, loss_of)
    stored = {name: p.detach().bfloat16() if p.is_floating_point() else p for name, p in stored.items()}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(keys))
    save_file(stored, directory / "model.safetensors")
    return loss


# --- the comparison ----------------------------------------------------------------------------------------------------
def ask(program, directory, model, head, request):
    (directory / "request.json").write_text(json.dumps(request))
    subprocess.run([program, model, head, directory / "request.json", directory / "out.json"], check=True)
    return json.loads((directory / "out.json").read_text())


def too_close(logits, ids, a, b):
    """Whether the logits of two tokens cannot be told apart."""
    at = lambda token: (ids == token).nonzero()
    if len(at(a)) == 0 or len(at(b)) == 0:
        return False
    return abs(float(logits[at(a)[0]] - logits[at(b)[0]])) <= TOO_CLOSE * float(logits.abs().max())


def compare(head, w, target_config, target, prompt, native):
    """Steps, guesses and accepted guesses of an answer, and guesses that were too close to tell."""
    ids = torch.tensor(prompt + native["answer"])
    streams = gpt_oss.residual_streams(target_config, target, ids)
    states = torch.cat([streams[b] for b in head.boundaries], dim=-1)
    told, guesses, accepted, close = len(prompt) + 1, 0, 0, 0  # the first token has no draft
    for step in native["steps"]:
        found = step["draft"]
        want, logits = eagle.draft(head, w, states[:told - 1], ids[:told], len(found))
        for i, (a, b) in enumerate(zip(found, want, strict=True)):
            if a != b:
                assert too_close(logits[i], w["ids"], a, b), f"after {told} tokens: guess {i + 1} is {a}, expected {b}"
                close += 1
                want = found  # later guesses follow another token
                break
        equal = 0
        while equal < len(want) and told + equal < len(ids) and want[equal] == int(ids[told + equal]):
            equal += 1
        assert step["accepted"] == equal, f"after {told} tokens: {step['accepted']} accepted, expected {equal}"
        told += equal + 1
        guesses, accepted = guesses + len(found), accepted + equal
    return len(native["steps"]), guesses, accepted, close


def main():
    parser = parity_peers.parser(__doc__)
    parser.add_argument("program", type=Path)
    parser.add_argument("--keep", type=Path, help="directory for the model and the heads")
    o = parser.parse_args()
    scratch = None if o.keep else tempfile.TemporaryDirectory()
    directory = o.keep or Path(scratch.name)
    torch.set_num_threads(1)  # tensors this small are not worth the waits for a second thread
    generator, start, text = torch.Generator().manual_seed(7), time.monotonic(), text_ids()
    target_config, target, loss = train_target(directory / "target", text, generator)
    print(f"target: loss {loss:.3f} after {time.monotonic() - start:.0f} s")
    in_format = {"bf16": [0, 0], "fp8": [0, 0], "mxfp4": [0, 0]}  # steps, accepted guesses
    prompts = [text[begin:begin + length].tolist() for begin, length in ((0, 40), (300, 3), (500, 90), (900, 65))]
    for number, (name, (keys, ids, window)) in enumerate(KINDS.items()):
        place = directory / f"head{number}"
        loss = train_head(place, keys, ids, target_config, target, text, generator)
        head = eagle.read_config(place, TARGET["num_hidden_layers"], window=window)
        w = eagle.read_weights(place, head, target["embed"], target["head"])
        for temperature, least in ((0, 1.6), (1, 1.2)) if number == 0 else ((0, 1.6),):
            request = dict(prompts=prompts, tokens=TOKENS, most=MOST, temperature=temperature, layers=[], window=window, context=CONTEXT, dense="")
            answers = ask(o.program, directory, directory / "target", place, request)
            counts = [compare(head, w, target_config, target, p, a) for p, a in zip(prompts, answers, strict=True)]
            steps, guesses, accepted, close = map(sum, zip(*counts, strict=True))
            per_step = 1 + accepted / steps
            print(f"{name}, temperature {temperature}: {guesses} guesses, {accepted} accepted, {per_step:.2f} tokens a step"
                  f"{f', {close} too close to tell' if close else ''}; loss of the head {loss:.2f}, {time.monotonic() - start:.0f} s")
            assert per_step >= least, f"{name}: {per_step:.2f} tokens a step, expected at least {least}"
            assert close <= 2, f"{name}: {close} guesses too close to tell, expected hardly any"
        for form, counted in in_format.items():
            answers = ask(o.program, directory, directory / "target", place, request | dict(temperature=0, dense=form))
            counted[0] += sum(len(a["steps"]) for a in answers)
            counted[1] += sum(step["accepted"] for a in answers for step in a["steps"])
    per_step = {form: 1 + accepted / steps for form, (steps, accepted) in in_format.items()}
    print("all heads, temperature 0, tokens a step: " + ", ".join(f"{form} {n:.3f}" for form, n in per_step.items()))
    for form, least in (("fp8", 0.97), ("mxfp4", 0.9)):
        assert per_step[form] >= least * per_step["bf16"], f"{form}: {per_step[form]:.3f} tokens a step, expected at least {least} of bf16's"


if __name__ == "__main__":
    main()
