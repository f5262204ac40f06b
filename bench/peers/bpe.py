"""Byte-level BPE beside Hugging Face tokenizers and tiktoken: learning, encoding on one thread, and equal ids.

    ninja -C build ingot && python3 bench/peers/bpe.py [--build build] [--corpus DIR] [--megabytes 100] [--fuzz 20000] [--json FILE]

Learning: 8,192 merges on the C++ headers that came with the compiler. Encoding: distinct files (each content once) under
--corpus with that vocabulary, one thread, one call a file; Ingot and the peers take turns, and the shortest time of --repeats
counts. Peers use their fastest entry points: encode_batch_fast without threads, encode_to_numpy. Then the same for the
pattern of o200k, with 32,768 tokens learned from the corpus and written as GPT-OSS's files are.
"""
import argparse
import ctypes
import datetime
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
MERGES, VOCAB = 8192, 8192 + 257
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_POSSESSIVE = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"  # as shipped by tiktoken
SUFFIXES = {".h", ".hpp", ".tcc", ".c", ".cpp", ".py", ".pyi", ".txt", ".md", ".rst", ".html", ""}


def read_texts(roots, suffixes, limit):
    texts, seen, total = [], set(), 0
    for root in roots:
        for path in sorted(p for p in pathlib.Path(root).rglob("*") if p.suffix in suffixes):
            if path.is_symlink() or not path.is_file() or path.stat().st_size == 0:
                continue
            try:
                data = path.read_bytes()
                data.decode()
            except (UnicodeDecodeError, OSError):
                continue
            if data in seen:
                continue
            seen.add(data)
            texts.append(data)
            total += len(data)
            if total >= limit:
                return texts
    return texts


def native(build, folder):
    library = pathlib.Path(folder) / "libbpe.so"
    subprocess.run(["g++", "-std=c++20", "-O2", "-shared", "-fPIC", f"-I{ROOT}/src", f"{ROOT}/bench/peers/bpe_native.cpp",
                    f"{build}/libingot.a", "-lpthread", "-ldl", "-lz", "-o", str(library)], check=True)
    n = ctypes.CDLL(str(library))
    n.bpe_error.restype = ctypes.c_char_p
    n.bpe_train.restype = n.bpe_encode.restype = ctypes.c_int64
    n.bpe_train.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_char_p]
    n.bpe_encode.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p]
    n.bpe_load.restype = ctypes.c_void_p
    n.bpe_load.argtypes = [ctypes.c_char_p]
    return n


def least(repeats, calls):
    """The shortest time of each call in seconds; the calls take turns."""
    best = {name: float("inf") for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def train(n, texts, vocab, threads, o200k, path):
    joined = b"".join(texts)
    ends, at = (ctypes.c_int64 * len(texts))(), 0
    for i, text in enumerate(texts):
        at += len(text)
        ends[i] = at
    if n.bpe_train(joined, ends, len(texts), vocab, threads, int(o200k), path.encode()) < 0:
        sys.exit(n.bpe_error().decode())


def learn(n, headers, threads, path, repeats):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    strings, peer = [h.decode() for h in headers], {}

    def ours():
        train(n, headers, VOCAB, threads, False, path)

    def theirs():
        t = peer["t"] = Tokenizer(models.BPE())
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        t.train_from_iterator(strings, trainers.BpeTrainer(vocab_size=VOCAB, min_frequency=2, special_tokens=["<|bos|>"], show_progress=False,
                                                           initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))

    best = least(repeats, {"ours": ours, "tokenizers": theirs})
    a, b = json.loads(pathlib.Path(path).read_text())["model"], json.loads(peer["t"].to_str())["model"]
    same = a["vocab"] == b["vocab"] and a["merges"] == [" ".join(m) for m in b["merges"]]
    return {"bytes": sum(map(len, headers)), "files": len(headers), "threads": threads, "seconds": best, "same_merges": same}


def tiktoken_of(path, pattern):
    import tiktoken
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte_of = {**{chr(b): b for b in printable}, **{chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in printable)}}
    vocab = json.loads(pathlib.Path(path).read_text())["model"]["vocab"]
    ranks = {bytes(byte_of[c] for c in token): i for token, i in vocab.items() if token != "<|bos|>"}
    return tiktoken.Encoding("ours", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|bos|>": 0})


def encode(n, texts, path, repeats):
    from tokenizers import Tokenizer
    return encode_with(n, n.bpe_load(path.encode()), Tokenizer.from_file(path), tiktoken_of(path, GPT2_POSSESSIVE), texts, repeats)


def encode_o200k(n, texts, threads, repeats, folder):
    sys.path.insert(0, str(ROOT / "tests/parity"))
    from parity_tokenizer import BYTE_OF, PATTERN, write_forms
    from tokenizers import Tokenizer
    import tiktoken
    learned = f"{folder}/o200k.json"
    train(n, texts, 32768, threads, True, learned)
    vocab = json.loads(pathlib.Path(learned).read_text())["model"]["vocab"]
    ranks = {bytes(BYTE_OF[c] for c in token): i for i, token in enumerate(sorted(vocab, key=vocab.get))}
    ranks_file, json_file = write_forms(ranks, pathlib.Path(folder))
    peer = tiktoken.Encoding("o200k", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    hf = Tokenizer.from_file(json_file)
    hf.encode_special_tokens = True
    return {"vocab": len(ranks), **encode_with(n, n.bpe_load(ranks_file.encode()), hf, peer, texts, repeats)}


def encode_with(n, handle, hf, tik, texts, repeats):
    strings = [t.decode() for t in texts]
    ids = (ctypes.c_int32 * max(map(len, texts)))()
    counts = {}

    def ours():
        counts["ours"] = sum(n.bpe_encode(handle, t, len(t), ids) for t in texts)

    def tokenizers():
        counts["tokenizers"] = sum(len(e) for s in strings for e in hf.encode_batch_fast([s], add_special_tokens=False))

    def tiktoken():
        counts["tiktoken"] = sum(len(tik.encode_to_numpy(s, disallowed_special=())) for s in strings)

    best = least(repeats, {"ours": ours, "tokenizers": tokenizers, "tiktoken": tiktoken})
    size = sum(map(len, texts))
    return {"bytes": size, "files": len(texts), "tokens": counts, "mb_per_second": {k: round(size / v / 1e6, 2) for k, v in best.items()}}


def fuzz(n, path, count):
    """Unusual texts on which the ids of Ingot or tiktoken differ from those of tokenizers."""
    from tokenizers import Tokenizer
    handle, hf, tik = n.bpe_load(path.encode()), Tokenizer.from_file(path), tiktoken_of(path, GPT2)
    rng, bad = random.Random(1), 0
    pools = ["abstdmrevl'", " \t\n\r\x0b\x0c\x85\xa0\u2028\u3000\u200b", "'!?.,-_/", "0123\u00b2\u2167\u0663", "\u0301\u0302\u0316",
             "\u00e9\u00df\u017f\u01c5\u02b0", "\u65e5\u672c\u3042\ud55c", "\U0001f600\u200d\U0001f469\u2764\ufe0f", "\u05d0\u0639\u0939\u093f\u0e01", "\x00\x1c\x1f\x7f\ue000"]
    for _ in range(count):
        text = ""
        for _ in range(rng.randrange(1, 20)):
            text += "".join(rng.choices(rng.choice(pools), k=rng.randrange(1, 5)))
            code = rng.randrange(0x110000 if rng.random() < 0.5 else 0x3000)
            text += "" if 0xD800 <= code < 0xE000 or rng.random() < 0.7 else chr(code)
        data = text.encode()
        ids = (ctypes.c_int32 * max(1, len(data)))()
        got = list(ids[:n.bpe_encode(handle, data, len(data), ids)])
        bad += got != hf.encode(text, add_special_tokens=False).ids or got != tik.encode_ordinary(text)
    return {"texts": count, "different": bad}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--headers", default="/usr/include/c++/12")
    parser.add_argument("--corpus", nargs="+", default=["/usr/include", "/usr/lib/python3", "/usr/local/lib", "/usr/share"])
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fuzz", type=int, default=20000)
    parser.add_argument("--json")
    args = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(args.threads)
    headers = []
    for path in sorted(pathlib.Path(args.headers).rglob("*")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size:
            data = path.read_bytes()
            try:
                data.decode()
                headers.append(data)
            except UnicodeDecodeError:
                pass
    with tempfile.TemporaryDirectory() as folder:
        n, tokenizer = native(args.build, folder), f"{folder}/tokenizer.json"
        model = re.search(r"model name\s*: (.+)", pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        result = {"cpu": model[1] if model else "unknown", "date": str(datetime.date.today()), "train": learn(n, headers, args.threads, tokenizer, args.repeats)}
        print(json.dumps(result["train"]), flush=True)
        result["fuzz"] = fuzz(n, tokenizer, args.fuzz)
        print(json.dumps(result["fuzz"]), flush=True)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        texts = read_texts(args.corpus, SUFFIXES, args.megabytes * 1e6)
        result["encode"] = encode(n, texts, tokenizer, args.repeats)
        print(json.dumps(result["encode"]), flush=True)
        result["encode_o200k"] = encode_o200k(n, texts, args.threads, args.repeats, folder)
        print(json.dumps(result["encode_o200k"]))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
