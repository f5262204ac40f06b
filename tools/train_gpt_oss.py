"""Trains a small model of the GPT-OSS architecture with Hugging Face transformers on any text, and writes a checkpoint that
`ingot convert`, `generate`, `eval` and `info` take: config.json, bf16 safetensors in shards, tokenizer.json (byte-level BPE under
the names of o200k_harmony), and held_out.jsonl, token ids of documents outside the training text.

    python3 tools/train_gpt_oss.py --data /usr/include/c++ --out small-gpt-oss --seconds 60
    ingot eval accuracy --model small-gpt-oss --ids small-gpt-oss/held_out.jsonl

By default about 20 million parameters; needs torch, transformers (5 or later) and tokenizers. A GPU takes a minute; --device cpu
with --hidden 64 --layers 2 is enough for a trial.
"""
import argparse
import hashlib
import json
import math
import pathlib
import time

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = "|".join([  # the word pattern of o200k
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
SPECIAL = ["<|startoftext|>", "<|endoftext|>", "<|reserved_200000|>", "<|reserved_200001|>", "<|return|>", "<|constrain|>",
           "<|reserved_200004|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|reserved_200009|>", "<|reserved_200010|>",
           "<|reserved_200011|>", "<|call|>"]


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", required=True, help="a text file, or a folder of them")
    p.add_argument("--out", required=True)
    p.add_argument("--seconds", type=float, default=60, help="of training")
    p.add_argument("--steps", type=int, default=0, help="instead of --seconds")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--vocab", type=int, default=4096, help="the special tokens included")
    p.add_argument("--hidden", type=int, default=256)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--kv-heads", type=int, default=2)
    p.add_argument("--head-dim", type=int, default=64)
    p.add_argument("--experts", type=int, default=8)
    p.add_argument("--per-token", type=int, default=2)
    p.add_argument("--intermediate", type=int, default=288)
    p.add_argument("--context", type=int, default=512)
    p.add_argument("--batch", type=int, default=32, help="sequences of a step")
    p.add_argument("--lr", type=float, default=1.5e-3)
    p.add_argument("--held-out", type=int, default=32, help="sequences to write into held_out.jsonl")
    p.add_argument("--shard", default="15MB", help="most bytes of one safetensors file")
    p.add_argument("--seed", type=int, default=1)
    return p.parse_args()


def documents(path):
    """Texts for training, and the held-out texts: one in twenty, chosen by content."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    parts = [], []
    for file in files:
        content = file.read_bytes()
        if content and b"\0" not in content:
            parts[hashlib.sha256(content).digest()[0] % 20 == 0].append(content.decode("utf-8", errors="replace"))
    if path.is_file() or not all(parts):  # of a single long text the end
        text = "".join(parts[0] + parts[1])
        parts = [text[:len(text) * 19 // 20]], [text[len(text) * 19 // 20:]]
    return parts


def learn_tokenizer(texts, vocab):
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab - len(SPECIAL), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                                  show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return tokenizer


def ids_of(tokenizer, texts):
    end = tokenizer.token_to_id("<|endoftext|>")
    out = []
    for encoded in tokenizer.encode_batch(texts, add_special_tokens=False):
        out += encoded.ids + [end]
    return torch.tensor(out)


def make_model(args, tokenizer):
    config = transformers.GptOssConfig(
        vocab_size=args.vocab, hidden_size=args.hidden, num_hidden_layers=args.layers, num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads, head_dim=args.head_dim, num_local_experts=args.experts, num_experts_per_tok=args.per_token,
        intermediate_size=args.intermediate, sliding_window=128, max_position_embeddings=131072, tie_word_embeddings=False,
        router_aux_loss_coef=0.02, bos_token_id=tokenizer.token_to_id("<|startoftext|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        eos_token_id=[tokenizer.token_to_id(t) for t in ("<|return|>", "<|endoftext|>", "<|call|>")])
    config._attn_implementation = config._experts_implementation = "eager"
    return transformers.GptOssForCausalLM(config)


def train(args, model, ids):
    generator = torch.Generator().manual_seed(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
    start, step, shown = time.monotonic(), 0, 0
    while True:
        done = step / args.steps if args.steps else (time.monotonic() - start) / args.seconds
        if done >= 1:
            return step
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / 50) * (0.05 + 0.475 * (1 + math.cos(math.pi * done)))
        at = torch.randint(len(ids) - args.context, (args.batch,), generator=generator)
        batch = torch.stack([ids[a:a + args.context] for a in at.tolist()]).to(args.device, non_blocking=True)
        loss = model(input_ids=batch, labels=batch, use_cache=False, output_router_logits=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if time.monotonic() - shown > 5:
            shown = time.monotonic()
            print(f"step {step}, {shown - start:.0f} s: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def held_out_loss(model, lists):
    total = count = 0
    for ids in lists:
        logits = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:], device=model.device), reduction="sum").item()
        count += len(ids) - 1
    return total / count


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    out = pathlib.Path(args.out)
    train_texts, held_texts = documents(pathlib.Path(args.data))
    tokenizer = learn_tokenizer(train_texts, args.vocab)
    if tokenizer.get_vocab_size() > args.vocab:
        raise SystemExit(f"found {tokenizer.get_vocab_size()} tokens, expected at most --vocab {args.vocab}")
    ids, held = ids_of(tokenizer, train_texts), ids_of(tokenizer, held_texts)
    model = make_model(args, tokenizer).to(args.device).train()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; {len(ids):,} tokens to learn from, {len(held):,} held out", flush=True)
    steps = train(args, model, ids)
    model = model.to(torch.bfloat16).eval()
    model.config.router_aux_loss_coef = 0.0
    model.save_pretrained(out, max_shard_size=args.shard)
    tokenizer.save(str(out / "tokenizer.json"))
    stride = max(args.context, (len(held) - args.context) // max(1, args.held_out))
    lists = [held[a:a + args.context].tolist() for a in range(0, len(held) - args.context, stride)][:args.held_out]
    (out / "held_out.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lists))
    model = model.float()  # the written numbers, in fp32
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"{steps} steps; held-out loss of the checkpoint under transformers, fp32: {held_out_loss(model, lists):.4f} over "
          f"{sum(len(x) - 1 for x in lists):,} tokens", flush=True)


if __name__ == "__main__":
    main()
