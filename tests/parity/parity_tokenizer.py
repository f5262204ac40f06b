#!/usr/bin/env python3
"""o200k_harmony beside tiktoken and Hugging Face tokenizers: equal ids, for a vocabulary learned here and written in both
published forms (tiktoken's ranks; tokenizer.json with every merge, added tokens and ignore_merges as GPT-OSS has it). Then the same vocabulary in the
forms of other families (Llama 3, Qwen3, Mistral's tekken, SmolLM2): their patterns, normalization form C, and added tokens that ordinary text may
contain. Then a vocabulary with byte fallback in all forms that a tokenizer.json has for the spaces of SentencePiece.

    parity_tokenizer.py BUILD/parity_tokenizer [--texts 6000] [--vocab 6000] [--seed 1] [--skip-without-peers]

Texts: this repository's files, words of every script with the case, marks, contractions, numbers and spaces that the pattern
tells apart, random code points, special tokens spelled out, and long runs. Every token of the vocabulary is also decoded.
"""
import base64
import itertools
import json
import random
import struct
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

import parity_peers

ROOT = Path(__file__).resolve().parents[2]
with parity_peers.required():
    import tiktoken
    from tokenizers import Tokenizer, models, normalizers, trainers
    from tokenizers.normalizers import NFC

PATTERN = "|".join([
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""",
    r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
    r"""\s*[\r\n]+""",
    r"""\s+(?!\S)""",
    r"""\s+""",
])
NAMES = {0: "startoftext", 1: "endoftext", 4: "return", 5: "constrain", 7: "channel", 8: "start", 9: "end", 10: "message",
         14: "call", 20: "endofprompt"}
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
CHAR_OF = {b: chr(b) for b in PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in PRINTABLE)}
BYTE_OF = {c: b for b, c in CHAR_OF.items()}
# Latin, Greek, Cyrillic, Armenian, Hebrew, Arabic, Devanagari, Bengali, Tamil, Thai, Tibetan, Georgian, Hangul, Ethiopic, Cherokee,
# Khmer, Latin extended, Greek extended, kana, CJK, Vai, Deseret, mathematical letters, emoji
SCRIPTS = [(0x41, 0x7b), (0xc0, 0x24f), (0x370, 0x400), (0x400, 0x530), (0x531, 0x588), (0x591, 0x5f3), (0x600, 0x700), (0x900, 0x980),
           (0x980, 0xa00), (0xb80, 0xc00), (0xe00, 0xe5c), (0xf00, 0xfd0), (0x10a0, 0x1100), (0xac00, 0xd7a4), (0x1200, 0x1380),
           (0x13a0, 0x13fe), (0x1780, 0x17fa), (0x1e00, 0x1f00), (0x1f00, 0x2000), (0x3041, 0x3100), (0x4e00, 0x9fff), (0xa500, 0xa62c),
           (0x10400, 0x10450), (0x1d400, 0x1d800), (0x1f300, 0x1f650)]
SPACES = [" ", "  ", "\n", "\r\n", "\n\n", "\t", " \n ", "\u00a0", "\u3000", "\u2028", "\x85", "\x0b", "\u200b", "    "]
ENDINGS = ["", "'s", "'T", "'re", "'VE", "'m", "'ll", "'d", "'\u017f", "\u2019s", "'x", "'", "''s"]
MARKS = ["", "", "", "\u0301", "\u0302\u0316", "\u093f", "\u20dd", "\ufe0f", "\u02b0", "\u0345"]
NUMBERS = ["1", "23", "456", "7890", "\u0663", "\u2167", "\u00b2", "\u0967\u0968", "\U0001d7d8", "1,234.5"]
SIGNS = ["!", "?!", "//", "/\n/", "...", "->", "_", "#", "\u2014", "\u3001", "\u20ac", "\U0001f469\u200d\U0001f4bb", "\x00", "\u00ad", "/\r\n"]


def word(rng):
    low, high = rng.choice(SCRIPTS)
    letters = "".join(chr(rng.randrange(low, high)) + rng.choice(MARKS) for _ in range(rng.randrange(1, 7)))
    return rng.choice([str.lower, str.upper, str.title, str, str])(letters) + rng.choice(ENDINGS)


def odd_text(rng):
    parts = []
    for _ in range(rng.randrange(1, 25)):
        kind = rng.random()
        if kind < 0.45:
            parts.append(word(rng))
        elif kind < 0.6:
            parts.append(rng.choice(NUMBERS))
        elif kind < 0.75:
            parts.append(rng.choice(SIGNS))
        elif kind < 0.8:
            code = rng.randrange(0x110000)
            # The division of code points assigned by later versions of Unicode depends on the age of each library's tables.
            parts.append("" if unicodedata.category(chr(code)) in ("Cn", "Cs") else chr(code))
        elif kind < 0.83:
            parts.append("<|" + rng.choice([*NAMES.values(), "reserved_7"]) + "|>")
        if rng.random() < 0.6:
            parts.append(rng.choice(SPACES))
    return "".join(parts)


def texts_of(rng, count):
    files = [p.read_text(errors="ignore") for folder in ("docs", "src/ingot/text", "src/ingot/core", "tests/data/text")
             for p in sorted((ROOT / folder).rglob("*")) if p.is_file() and p.suffix in (".md", ".cpp", ".h", ".txt")]
    units = ["a", "A", " ", "\n", "'", "1", "\u0301", "\u3042", "the ", "aA", "\u02b0A", " \n", "/", "!\n", "x'S"]
    runs = [u * (n // len(u)) for u in units for n in (63, 64, 65, 99, 100, 101, 3000)]
    return files + runs + [odd_text(rng) for _ in range(count)] + [""]


def frames(texts):
    return b"".join(struct.pack("<I", len(t)) + t for t in (text.encode() for text in texts))


def ours(program, tokenizer, texts):
    return lists_of(subprocess.run([program, tokenizer], input=frames(texts), stdout=subprocess.PIPE, check=True).stdout)


def differences(name, program, path, peer, texts):
    """How many texts get ids by the tokenizer at `path` that differ from those of `peer`, the same tokenizer in Hugging Face's package; prints the first three."""
    count = 0
    for text, found in zip(texts, ours(program, str(path), texts), strict=True):
        wanted = peer.encode(text, add_special_tokens=False).ids
        if found != wanted:
            count += 1
            if count <= 3:
                print(f"{name}: {text[:80]!r}: found {found[:40]}, expected {wanted[:40]}")
    return count


def lists_of(out):
    lists, at = [], 0
    while at < len(out):
        n, = struct.unpack_from("<I", out, at)
        lists.append(list(struct.unpack_from(f"<{n}i", out, at + 4)))
        at += 4 + 4 * n
    return lists


def write_forms(ranks, folder):
    """The two published forms of a vocabulary: (ranks file, tokenizer.json)."""
    tiktoken_file, json_file = folder / "o200k_base.tiktoken", folder / "tokenizer.json"
    tiktoken_file.write_text("".join(f"{base64.b64encode(t).decode()} {i}\n" for t, i in ranks.items()))
    spell = lambda token: "".join(CHAR_OF[b] for b in token)
    merges = []
    for token in ranks:
        cuts = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += [[spell(a), spell(b)] for a, b in sorted(cuts, key=lambda c: (ranks[c[0]], ranks[c[1]]))]
    n = len(ranks)
    specials = [f"<|{NAMES.get(i, f'reserved_{n + i}')}|>" for i in range(21)]
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True)
    json_file.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [dict(id=n + i, content=s, **flags) for i, s in enumerate(specials)], "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}, byte_level | {"use_regex": False}]},
        "post_processor": byte_level | {"trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                  "vocab": {spell(t): i for t, i in ranks.items()}, "merges": merges}}))
    return str(tiktoken_file), str(json_file)


TEKKEN = PATTERN.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
CL100K = "|".join([r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True)
ADDED = ["<think>", "</think>", "<tool_call>", "  \n", "think", "e\u0301!", "\u00e9!", "\U0001f600", "<t"]  # one is the beginning of a second, one
                                                                                                            # has a decomposed letter


def split(regex):
    return {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}, BYTE_LEVEL | {"use_regex": False}]}


def families(program, json_file, texts, rng):
    """For each family, how many texts get ids that differ from those of Hugging Face's package."""
    base = json.loads(Path(json_file).read_text())
    smollm = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL | {"use_regex": True}]}
    texts = [rng.choice([t, unicodedata.normalize("NFD", t)]) if len(t) < 1000 else t for t in texts]
    texts += ["".join(rng.choice([*ADDED, "a", " ", "\n", "  ", "e\u0301", "x1", "<"]) for _ in range(rng.randrange(1, 12))) for _ in range(len(texts) // 4)]
    differ = {}
    for name, pre, nfc, ignore in (("llama3", split(CL100K), False, True), ("qwen3", split(CL100K.replace("{1,3}", "")), True, False), ("tekken", split(TEKKEN), False, True), ("smollm2", smollm, False, False),
                                   ("gpt2", BYTE_LEVEL | {"use_regex": True}, True, False)):
        # An added token that the vocabulary has keeps the vocabulary's id; the package numbers all further tokens consecutively.
        vocab = base["model"]["vocab"]
        fresh = itertools.count(len(vocab) + len(base["added_tokens"]))
        added = [dict(id=vocab[t] if t in vocab else next(fresh), content=t, single_word=False, lstrip=False, rstrip=False, normalized=i % 2 == 1, special=False)
                 for i, t in enumerate(ADDED)]
        document = base | {"added_tokens": base["added_tokens"] + added, "pre_tokenizer": pre, "normalizer": {"type": "NFC"} if nfc else None, "model": base["model"] | {"ignore_merges": ignore}}
        path = Path(json_file).with_name(name + ".json")
        path.write_text(json.dumps(document))
        peer = Tokenizer.from_file(str(path))
        peer.encode_special_tokens = True
        # The package's normalization uses an older version of Unicode, in which 120 marks have no combining class.
        same = [t for t in texts if not nfc or NFC().normalize_str(t) == unicodedata.normalize("NFC", t)]
        differ[name] = differences(name, program, path, peer, same)
    return differ


def byte_fallback(program, folder, training, texts):
    """For each form of the spaces, how many texts get ids that differ from those of Hugging Face's package."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    # Without a step that divides words, so that pieces may contain several words and runs of spaces.
    tokenizer.train_from_iterator([t[:400] for t in training], trainers.BpeTrainer(
        vocab_size=3000, special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))], limit_alphabet=1500, show_progress=False))
    base = json.loads(tokenizer.to_str())
    special = [dict(id=i, content=name, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True) for i, name in enumerate(("<unk>", "<s>", "</s>"))]
    vocab = base["model"]["vocab"]
    fresh = itertools.count(len(vocab))  # an added token that the vocabulary has keeps the vocabulary's id
    added = [dict(id=vocab[name] if name in vocab else next(fresh), content=name, single_word=False, lstrip=False, rstrip=False, normalized=False,
                  special=False) for name in ("<think>", "\n\n\n", "<t", "\U0001f600!")]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    prepend = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, replace]}
    at_spaces = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    forms = {"Prepend": (prepend, None, []), "Replace": (replace, None, added), "Replace and Split": (replace, at_spaces, added)}
    for scheme, divided in itertools.product(("first", "always", "never"), (True, False)):
        pre = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": divided}
        forms[f"Metaspace {scheme}{' split' if divided else ''}"] = (None, pre, [])
    forms["Metaspace of older files"] = (None, {"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True}, [])
    texts = texts + [" ", "  ", " a", "  a", "\u2581a", "\u2581", " \n", "a ", "a  b   c    d", "<think> a", " <think>", "\n\n\n\n"]
    differ = {}
    for name, (normalizer, pre, more) in forms.items():
        path = folder / "fallback.json"
        path.write_text(json.dumps(base | {"added_tokens": special + more, "normalizer": normalizer, "pre_tokenizer": pre, "decoder": None}))
        peer = Tokenizer.from_file(str(path))
        peer.encode_special_tokens = True
        differ[name] = differences(name, program, path, peer, texts)
    return differ


def main():
    parser = parity_peers.parser(__doc__)
    parser.add_argument("program")
    parser.add_argument("--texts", type=int, default=6000)
    parser.add_argument("--vocab", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    texts = texts_of(rng, args.texts)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        learned = folder / "learned.json"
        training = texts[:-1] + [odd_text(rng) for _ in range(2000)]
        subprocess.run([args.program, "--train", str(args.vocab), str(learned)], input=frames(training), check=True)
        vocab = json.loads(learned.read_text())["model"]["vocab"]
        tokens = sorted(vocab, key=vocab.get)
        ranks = {bytes(BYTE_OF[c] for c in t): i for i, t in enumerate(tokens)}
        tiktoken_file, json_file = write_forms(ranks, folder)
        peer = tiktoken.Encoding("learned", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|start|>": len(ranks) + 8})
        hf = Tokenizer.from_file(json_file)
        hf.encode_special_tokens = True  # as text, never as control tokens
        ours_ranks, ours_json = ours(args.program, tiktoken_file, texts), ours(args.program, json_file, texts)
        differ = {"tiktoken": 0, "tokenizers": 0}
        for text, a, b in zip(texts, ours_ranks, ours_json, strict=True):
            for who, got, want in (("tiktoken", a, peer.encode_ordinary(text)), ("tokenizers", b, hf.encode(text, add_special_tokens=False).ids)):
                if got != want:
                    differ[who] += 1
                    if differ[who] <= 3:
                        print(f"{who}: {text[:80]!r}: found {got[:40]}, expected {want[:40]}")
        forms = sum(a != b for a, b in zip(ours_ranks, ours_json))
        others = families(args.program, json_file, texts, rng)
        fallback = byte_fallback(args.program, folder, training, texts)
    print(f"{len(texts)} texts, {sum(len(t.encode()) for t in texts)} bytes, {len(ranks)} tokens: "
          f"{differ['tiktoken']} differ from tiktoken, {differ['tokenizers']} from tokenizers; {forms} between the two forms")
    print("other families: " + ", ".join(f"{n} differ of {name}" for name, n in others.items()))
    print("byte fallback: " + ", ".join(f"{n} differ of {name}" for name, n in fallback.items()))
    sys.exit(1 if any([*differ.values(), *others.values(), *fallback.values()]) else 0)


if __name__ == "__main__":
    main()
