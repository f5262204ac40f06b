"""Writes tests/data/text: tokenizers made by the reference implementations, and their ids for unusual texts.

    pip install tokenizers==0.23.3 tiktoken==0.14.0 sentencepiece==0.2.3
    python3 tools/make_text_goldens.py

The texts are random with a fixed seed; the vocabularies are learned from these texts and from LICENSE.
"""
import io
import json
import pathlib
import random

import sentencepiece
import tiktoken
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "tests" / "data" / "text"
CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": CASELESS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES,
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + CASELESS
             + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + CASELESS
             + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES,
    "qwen2": CASELESS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES,
}
POOLS = ["abcdefgstmdrevlLSTMDREV", " \t\n\r\x0b\x0c\x85\xa0\u2028\u3000\u200b\u180e\ufeff", "'\u2019.,!?-_/\\#$%", "0123456789\u00b2\u00bd\u2167\u0663",
         "".join(map(chr, range(0x300, 0x310))), "\u00e9\u00e0\u00e7\u00df\u017f\u212a\u212b", "\u00c9\u01c5\u01c8\u02b0\u00aa\u30fe\u3005",
         "\u65e5\u672c\u8a9e\u304b\u306a\ud55c\uad6d", "\U0001f600\u200d\U0001f469\U0001f3fd\u2764\ufe0f\U0001f1eb", "\u05e2\u05d1\u0627\u0644\u0939\u093f\u0928\u094d",
         "\x01\x1c\x1f\x7f\ue000\ufffe\U0010ffff\ufb01\u3300"]
BITS = [" ", "  ", "\n", "\n\n ", " '", "'s", "'LL", "'\u017f", "'Re", "Ab", " x", "12345", "\u2581", "ABCd", " the", "<|bos|>"]


def texts(count):
    rng = random.Random(20260)
    out = ["", " ", "\n", "x" * 70, " " * 65 + "a", "<|bos|><s><0x41>", "it's we'LL I'\u017f"]
    while len(out) < count:
        text = ""
        for _ in range(rng.randrange(1, 12)):
            text += rng.choice(BITS) if rng.random() < 0.4 else "".join(rng.choices(rng.choice(POOLS), k=rng.randrange(1, 5)))
            if rng.random() < 0.05:
                text += chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]))
        out.append(text)
    return out


def pre_tokenizer(name):
    if name == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(PATTERNS[name]), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def train_bpe(documents):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizer("gpt2"), decoders.ByteLevel()
    t.train_from_iterator(documents, trainers.BpeTrainer(vocab_size=600, min_frequency=2, special_tokens=["<|bos|>"], show_progress=False,
                                                         initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return t


def tiktoken_of(tokenizer, pattern):
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    byte_of = {**{chr(b): b for b in printable}, **{chr(256 + i): b for i, b in enumerate(others)}}
    ranks = {bytes(byte_of[c] for c in token): i for token, i in tokenizer.get_vocab().items() if token != "<|bos|>"}
    return tiktoken.Encoding("golden", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|bos|>": 0})


def train_sentencepiece(documents):
    lines = [line for d in documents for line in d.split("\n") if line.strip()]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # parameter-golf's settings except the size
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=450, byte_fallback=True, split_digits=True,
        normalization_rule_name="nmt_nfkc", add_dummy_prefix=False, character_coverage=0.999, pad_id=0, bos_id=1, eos_id=2, unk_id=3,
        hard_vocab_limit=False, num_threads=1, minloglevel=2)
    return model.getvalue()


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    cases = texts(80)
    documents = [(ROOT / "LICENSE").read_text(encoding="utf-8")] + cases
    bpe = train_bpe(documents)
    # The library tokenizers would remove <|bos|> from a text; Ingot never does. Without the added token <|bos|> is ordinary text there too.
    plain = json.loads(bpe.to_str())
    plain["added_tokens"] = []
    plain = Tokenizer.from_str(json.dumps(plain))
    golden = {"texts": cases}
    for name, pattern in PATTERNS.items():
        plain.pre_tokenizer = pre_tokenizer(name)
        golden[name] = [plain.encode(c, add_special_tokens=False).ids for c in cases]
        assert golden[name] == [tiktoken_of(bpe, pattern).encode_ordinary(c) for c in cases], name
    (OUT / "bpe.json").write_text(bpe.to_str(), encoding="utf-8")
    model = train_sentencepiece(documents)
    (OUT / "sp.model").write_bytes(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    golden["sentencepiece"] = [processor.encode(c) for c in cases]
    golden["sentencepiece_decoded"] = [processor.decode(ids) for ids in golden["sentencepiece"]]
    (OUT / "golden.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
