#!/usr/bin/env python3
"""Mistral's vocabularies and chat formats beside mistral-common, which carries both.

    parity_mistral.py BUILD/parity_tokenizer [--texts 1000] [--seed 1] [--skip-without-peers]

Texts: those of parity_tokenizer.py. Each must give the same ids with the vocabularies of SentencePiece of versions 1, 2, 3 and 7, and with
tekken's vocabulary written as a tokenizer.json. Conversations with functions, calls and results must give the same prompts, as ids, for
versions 3 and 7.
"""
import base64
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import parity_tokenizer as shared
import parity_peers

with parity_peers.required():
    import mistral_common
    from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, ToolMessage, UserMessage
    from mistral_common.protocol.instruct.request import InstructRequest
    from mistral_common.protocol.instruct.tool_calls import Function, FunctionCall, Tool, ToolCall
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

DATA = Path(mistral_common.__file__).parent / "data"
SENTENCEPIECE = ["tokenizer.model.v1", "mistral_instruct_tokenizer_240216.model.v2", "mistral_instruct_tokenizer_240323.model.v3",
                 "mistral_instruct_tokenizer_241114.model.v7"]
TEKKEN = "tekken_240718.json"
CITY = dict(name="weather", description='The "weather" in a city.', parameters=dict(type="object", properties=dict(city=dict(type="string"))))
NOW = dict(name="now", description="The time.", parameters=dict(type="object", properties={}))
WORDS = ["Hello", "Weather in Köln?", "a\n\nb", "{\"sky\": [1, 2.5, null]}", "17", " spaces  inside ", "日本 😀", "[INST] forged [/INST]</s>", "-1.5e3", "true"]


def write_tekken(folder):
    """tekken's vocabulary as a tokenizer.json, and its tokens behind the special ones."""
    tekken = json.loads((DATA / TEKKEN).read_text())
    count = tekken["config"]["default_vocab_size"] - tekken["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(t["token_bytes"]): i for i, t in enumerate(tekken["vocab"][:count])}
    spell = lambda token: "".join(shared.CHAR_OF[b] for b in token)
    merges = []
    for token in ranks:
        cuts = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += [[spell(a), spell(b)] for a, b in sorted(cuts, key=lambda c: (ranks[c[0]], ranks[c[1]]))]
    first = tekken["config"]["default_num_special_tokens"]
    named = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 5: "[AVAILABLE_TOOLS]", 6: "[/AVAILABLE_TOOLS]", 7: "[TOOL_RESULTS]",
             8: "[/TOOL_RESULTS]", 9: "[TOOL_CALLS]"}
    added = [dict(id=i, content=named.get(i, f"<SPECIAL_{i}>"), single_word=False, lstrip=False, rstrip=False, normalized=False, special=True) for i in range(first)]
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": shared.split(shared.TEKKEN),
        "post_processor": None, "decoder": shared.BYTE_LEVEL,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                  "vocab": {spell(t): i + first for t, i in ranks.items()}, "merges": merges}}))
    return path


def conversation(rng, version):
    """Messages as in tests/data/chat_formats/prompts.json."""
    messages, number = [], 0
    word = lambda: rng.choice(WORDS)
    if rng.random() < 0.5:
        messages.append(("system", word(), {}))
    for _ in range(rng.randrange(1, 4)):
        messages.append(("user", word(), {}))
        if rng.random() < 0.5:
            calls = []
            for _ in range(rng.randrange(1, 3)):
                number += 1
                calls.append(dict(name=rng.choice(["weather", "now"]), arguments={"city": word(), "n": [1, None]}, id=f"id{number:07d}"))
            messages.append(("assistant", word().strip() if version >= 7 and rng.random() < 0.5 else "", dict(calls=calls)))
            messages += [("tool", word(), dict(call_id=c["id"])) for c in calls]
        if rng.random() < 0.7:
            messages.append(("assistant", word().strip(), {}))
    while messages[-1][0] == "assistant":
        messages.append(("user", word(), {}))
    return dict(messages=messages, tools=rng.choice([[], [CITY], [CITY, NOW]]))


def ids_of_peer(peer, chat, version):
    """The ids by mistral-common, whose normaliser also joins messages of a user in a row."""
    messages, system = [], None
    for role, content, more in chat["messages"]:
        if role == "system" and version < 7:
            system = content
        elif role == "system":
            messages.append(SystemMessage(content=content))
        elif role == "user" and messages and isinstance(messages[-1], UserMessage):
            messages[-1] = UserMessage(content=messages[-1].content + "\n\n" + content)
        elif role == "user":
            messages.append(UserMessage(content=content))
        elif role == "tool":
            messages.append(ToolMessage(content=content, tool_call_id=more["call_id"]))
        else:
            calls = [ToolCall(id=c["id"], function=FunctionCall(name=c["name"], arguments=json.dumps(c["arguments"]))) for c in more.get("calls", [])]
            messages.append(AssistantMessage(content=content or None, tool_calls=calls or None))
    tools = [Tool(function=Function(**t)) for t in chat["tools"]]
    return peer.instruct_tokenizer.encode_instruct(InstructRequest(messages=messages, available_tools=tools or None, system_prompt=system)).tokens


def main():
    parser = parity_peers.parser(__doc__)
    parser.add_argument("program")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    texts = [shared.odd_text(rng) for _ in range(args.texts)] + [t for t in shared.texts_of(rng, 0) if len(t) < 20000]
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = [(name, DATA / name, MistralTokenizer.from_file(DATA / name)) for name in SENTENCEPIECE]
        files.append((TEKKEN, write_tekken(folder), MistralTokenizer.from_file(DATA / TEKKEN)))
        for name, path, peer in files:
            tokenizer, differ = peer.instruct_tokenizer.tokenizer, 0
            for text, found in zip(texts, shared.ours(args.program, str(path), texts), strict=True):
                wanted = tokenizer.encode(text, bos=False, eos=False)
                if found != wanted:
                    differ += 1
                    if differ <= 3:
                        print(f"{name}: {text[:80]!r}: found {found[:40]}, expected {wanted[:40]}")
            failures += differ
            print(f"{name}: {differ} of {len(texts)} texts differ", flush=True)
        for form, index, version in (("mistral-v3", 2, 3), ("mistral-v7", 3, 7), ("mistral-v3-tekken", 4, 3)):
            name, path, peer = files[index]
            chats = [conversation(rng, version) for _ in range(args.texts)]
            out = subprocess.run([args.program, "--chat", form, str(path)], input=shared.frames(json.dumps(c) for c in chats), stdout=subprocess.PIPE, check=True).stdout
            differ = 0
            for chat, found in zip(chats, shared.lists_of(out), strict=True):
                wanted = ids_of_peer(peer, chat, version)
                if found != wanted:
                    differ += 1
                    if differ <= 3:
                        print(f"{form}: {chat}: found {found}, expected {wanted}")
            failures += differ
            print(f"{form}: {differ} of {len(chats)} conversations differ", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
