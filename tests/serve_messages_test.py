"""Runs `ingot serve` with models that give a prescribed answer: Anthropic's API, calls of functions, tokens of a text.

    python3 tests/serve_messages_test.py BINARY [unittest options]
"""
import json
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import puppet
import serve_test
from program import ingot

try:
    import anthropic
except ImportError:
    anthropic = None
try:
    import openai
    import pydantic
except ImportError:
    openai = None

CITY = dict(type="object", properties=dict(city=dict(type="string")))
TOOLS = [dict(name="weather", description="Says it.", input_schema=CITY)]
THOUGHT = ["<|channel|>", "analysis", "<|message|>", "let me see", "<|end|>", "<|start|>", "assistant"]
ARGUMENTS = '{"city":"Paris"}'
CALL = ["<|channel|>", "commentary to=functions.weather ", "<|constrain|>", "json", "<|message|>", ARGUMENTS, "<|call|>"]
BOTH = ["<|channel|>", "commentary to=functions.weather ", "<|message|>", ARGUMENTS, "<|end|>", "<|start|>", "assistant", "<|channel|>", "commentary to=functions.now ", "<|message|>", "{ }", "<|call|>"]
FINAL = ["<|channel|>", "final", "<|message|>", "It rains", " STOP ", "in Paris.", "<|return|>"]
HI = [dict(role="user", content="Hi")]


def setUpModule():
    run = ingot("serve", "none", "--port", 0)
    if "without libmicrohttpd" in run.error:
        raise unittest.SkipTest("built without libmicrohttpd")


class Said(unittest.TestCase):
    """Each test serves a model with one fixed answer."""

    def serve(self, script, *options, after=None, word=None):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        server = serve_test.Server(*options, model=puppet.puppet_model(pathlib.Path(holder.name, "model"), script, after, word))
        self.addCleanup(server.stop)
        return server

    def post(self, server, path, expected=200, headers={}, **body):
        status, text, _ = server.request("POST", path, body, headers)
        self.assertEqual(status, expected, text)
        return json.loads(text)

    def ask(self, server, expected=200, headers={}, **body):
        return self.post(server, "/v1/messages", expected, headers, **(dict(model="tiny", max_tokens=60, messages=HI) | body))


class Messages(Said):
    def test_an_answer_is_a_list_of_blocks(self):
        server = self.serve(THOUGHT[:-2] + ["<|start|>", "assistant"] + FINAL)
        message = self.ask(server, system="Be brief.")
        self.assertEqual([message[k] for k in ("type", "role", "model", "stop_reason", "stop_sequence")], ["message", "assistant", "tiny", "end_turn", None])
        self.assertEqual(message["content"], [dict(type="text", text="It rains STOP in Paris.")])  # thoughts are shown where the request enables them
        thinking = self.ask(server, thinking=dict(type="enabled", budget_tokens=2000))
        self.assertEqual([b["type"] for b in thinking["content"]], ["thinking", "text"])
        self.assertEqual(thinking["content"][0]["thinking"], "let me see")
        cut = self.ask(server, max_tokens=9)
        self.assertEqual((cut["stop_reason"], cut["usage"]["output_tokens"]), ("max_tokens", 9))
        stopped = self.ask(server, stop_sequences=["no", "STOP"])
        self.assertEqual((stopped["stop_reason"], stopped["stop_sequence"], stopped["content"][0]["text"]), ("stop_sequence", "STOP", "It rains "))
        counted = self.post(server, "/v1/messages/count_tokens", model="tiny", messages=HI, system="Be brief.")
        long = [dict(role="user", content="x" * 300000)]  # more than the context
        self.assertGreater(self.post(server, "/v1/messages/count_tokens", model="tiny", messages=long)["input_tokens"], 300000)
        self.assertIn("fewer than 8192", self.ask(server, 400, messages=long)["error"]["message"])
        usage = message["usage"]
        self.assertEqual(counted["input_tokens"], usage["input_tokens"] + usage["cache_read_input_tokens"])
        self.assertGreater(self.ask(server, system="Be brief.")["usage"]["cache_read_input_tokens"], 20)

    def test_a_stream_builds_the_whole_message(self):
        server = self.serve(THOUGHT + CALL)
        more = dict(tools=TOOLS, thinking=dict(type="adaptive"))
        whole = self.ask(server, **more)
        status, text, headers = server.request("POST", "/v1/messages", dict(model="tiny", max_tokens=60, messages=HI, stream=True, **more))
        self.assertEqual((status, headers["Content-Type"]), (200, "text/event-stream"))
        events = [(e.split("\n")[0][7:], json.loads(e.split("\n")[1][6:])) for e in text.strip().split("\n\n")]
        self.assertTrue(all(name == data["type"] for name, data in events))
        self.assertEqual([events[0][0], events[-2][0], events[-1][0]], ["message_start", "message_delta", "message_stop"])
        self.assertEqual([data["content_block"]["type"] for name, data in events if name == "content_block_start"], [b["type"] for b in whole["content"]])
        deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
        self.assertEqual("".join(d.get("thinking", "") for d in deltas), "let me see")
        self.assertEqual(json.loads("".join(d.get("partial_json", "") for d in deltas)), whole["content"][1]["input"])
        self.assertEqual((events[-2][1]["delta"]["stop_reason"], whole["stop_reason"]), ("tool_use", "tool_use"))
        self.assertEqual(events[-2][1]["usage"]["output_tokens"], whole["usage"]["output_tokens"])

    def test_a_tool_is_used_and_its_result_read(self):
        server = self.serve(CALL, after=FINAL, word="Rain")
        first = self.ask(server, tools=TOOLS)
        self.assertEqual([(b["type"], b["name"], b["input"]) for b in first["content"]], [("tool_use", "weather", dict(city="Paris"))])
        turns = HI + [dict(role="assistant", content=first["content"]),
                      dict(role="user", content=[dict(type="tool_result", tool_use_id=first["content"][0]["id"], content="Rain")])]
        second = self.ask(server, tools=TOOLS, messages=turns)
        self.assertEqual((second["content"][0]["text"], second["stop_reason"]), ("It rains STOP in Paris.", "end_turn"))
        turns[2]["content"][0]["tool_use_id"] = "other"
        self.assertIn("no call of that id", self.ask(server, 400, tools=TOOLS, messages=turns)["error"]["message"])

    def test_errors_have_anthropic_s_form(self):
        server = self.serve(FINAL)
        for status, kind, body in ((400, "invalid_request_error", dict(messages=[])), (404, "not_found_error", dict(model="other")), (400, "invalid_request_error", dict(max_tokens=0)),
                                   (400, "invalid_request_error", dict(messages=[dict(role="user", content="x" * 300000)]))):
            error = self.ask(server, status, **body)
            self.assertEqual((error["type"], error["error"]["type"]), ("error", kind), error)
        status, text, _ = server.request("GET", "/v1/messages")
        self.assertEqual((status, json.loads(text)["type"]), (405, "error"))
        status, text, _ = server.request("POST", "/v1/messages", "{")
        self.assertEqual((status, json.loads(text)["error"]["type"]), (400, "invalid_request_error"))

    def test_a_key_may_come_as_anthropic_s_clients_send_it(self):
        with tempfile.NamedTemporaryFile("w") as keys:
            keys.write("secret\n")
            keys.flush()
            server = self.serve(FINAL, "--api-key-file", keys.name)
            for status, headers in ((200, {"X-Api-Key": "secret"}), (200, {"Authorization": "Bearer secret"}), (401, {}), (401, {"X-Api-Key": ""}), (401, {"X-Api-Key": "secre"}),
                                    (401, {"X-Api-Key": "secret", "Authorization": "Bearer other"}), (401, {"Authorization": "secret"})):
                got = self.ask(server, status, headers)
                self.assertEqual(got.get("error", {}).get("type"), None if status == 200 else "authentication_error", headers)

    def test_a_request_of_claude_code_has_no_unknown_field_but_tools_of_servers(self):
        server = self.serve(FINAL, "--strict-fields")
        mark = dict(cache_control=dict(type="ephemeral"))
        turns = [dict(role="user", content=[dict(type="text", text="Weather?", **mark)]),
                 dict(role="assistant", content=[dict(type="thinking", thinking="hm", signature=""), dict(type="tool_use", id="toolu_1", name="weather", input=dict(city="Paris"), **mark)]),
                 dict(role="user", content=[dict(type="tool_result", tool_use_id="toolu_1", is_error=False, content=[dict(type="text", text="Rain", **mark)], **mark), dict(type="text", text="Go on")])]
        body = dict(max_tokens=32000, messages=turns, system=[dict(type="text", text="You are Claude Code.", **mark), dict(type="text", text="Be brief.", **mark)],
                    tools=[dict(TOOLS[0], **mark)], thinking=dict(type="adaptive"), output_config=dict(effort="high"), metadata=dict(user_id="u"), temperature=1,
                    context_management=dict(edits=[dict(type="clear_thinking_20251015", keep="all")]))
        status, text, _ = server.request("POST", "/v1/messages?beta=true", dict(model="tiny", **body), {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"})
        self.assertEqual(status, 200, text)
        self.assertEqual(json.loads(text)["content"][0]["text"], "It rains STOP in Paris.")
        counted = self.post(server, "/v1/messages/count_tokens?beta=true", model="tiny", **body)["input_tokens"]
        self.assertEqual(counted, json.loads(text)["usage"]["input_tokens"] + json.loads(text)["usage"]["cache_read_input_tokens"])
        searching = body | dict(tools=body["tools"] + [dict(type="web_search_20250305", name="web_search")])
        self.assertIn("tools[1].type", self.ask(server, 400, **searching)["error"]["message"])
        self.ask(self.serve(FINAL), **searching)  # without --strict-fields the tool is left out

    @unittest.skipIf(anthropic is None, "no Python package anthropic")
    def test_anthropic_s_own_client(self):
        client_of = lambda s: anthropic.Anthropic(base_url=f"http://127.0.0.1:{s.port}", api_key="none", max_retries=0, timeout=60)
        more = dict(model="tiny", max_tokens=2048, tools=TOOLS, thinking=dict(type="enabled", budget_tokens=1024))
        with client_of(self.serve(THOUGHT + CALL)).messages.stream(messages=HI, **more) as stream:
            self.assertEqual([b.type for b in stream.get_final_message().content], ["thinking", "tool_use"])
        client = client_of(self.serve(CALL, after=FINAL, word="Rain"))
        turns = list(HI)
        for expected in (["tool_use"], ["text"]):
            with client.messages.stream(messages=turns, **more) as stream:
                message = stream.get_final_message()
            self.assertEqual([b.type for b in message.content], expected)
            whole = client.messages.create(messages=turns, **more)
            self.assertEqual([b.model_dump(exclude={"id"}) for b in whole.content], [b.model_dump(exclude={"id"}) for b in message.content])
            use = message.content[0]
            turns += [dict(role="assistant", content=message.content), dict(role="user", content=[dict(type="tool_result", tool_use_id=getattr(use, "id", ""), content="Rain")])]
        self.assertEqual(message.content[0].text, "It rains STOP in Paris.")
        self.assertGreater(client.messages.count_tokens(model="tiny", messages=HI).input_tokens, 10)
        with self.assertRaises(anthropic.BadRequestError):
            client.messages.create(model="tiny", max_tokens=9, messages=[dict(role="user", content=[dict(type="image", source=dict(type="url", url="http://a"))])])


class Calls(Said):
    def test_calls_by_a_bare_name_and_of_undeclared_functions_reach_the_client(self):
        tools = [dict(type="function", function=dict(name="weather", parameters=CITY))]
        for recipient, name in (("weather", "weather"), ("functions.weather", "weather"), ("functions.other", "other"), ("browser.search", "browser_search")):
            server = self.serve(["<|channel|>", f"commentary to={recipient} ", "<|constrain|>", "json", "<|message|>", ARGUMENTS, "<|call|>"])
            choice = self.post(server, "/v1/chat/completions", messages=HI, tools=tools, max_tokens=60)["choices"][0]
            calls = [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"]["tool_calls"]]
            self.assertEqual((calls, choice["finish_reason"]), ([(name, ARGUMENTS)], "tool_calls"))


    def test_an_answer_has_one_call_where_the_request_forbids_several(self):
        server = self.serve(BOTH)
        chat = [dict(type="function", function=dict(name=name, parameters=CITY)) for name in ("weather", "now")]
        flat = [dict(type="function", **tool["function"]) for tool in chat]
        own = [dict(name=name, input_schema=CITY) for name in ("weather", "now")]
        for several, names in ((True, ["weather", "now"]), (False, ["weather"])):
            choice = self.post(server, "/v1/chat/completions", messages=HI, tools=chat, parallel_tool_calls=several)["choices"][0]
            self.assertEqual(([c["function"]["name"] for c in choice["message"]["tool_calls"]], choice["finish_reason"]), (names, "tool_calls"))
            response = self.post(server, "/v1/responses", input=HI, tools=flat, parallel_tool_calls=several)
            self.assertEqual(([item["name"] for item in response["output"]], response["status"]), (names, "completed"))
            message = self.ask(server, tools=own, tool_choice=dict(type="auto", disable_parallel_tool_use=not several))
            self.assertEqual(([block["name"] for block in message["content"]], message["stop_reason"]), (names, "tool_use"))
            status, text, _ = server.request("POST", "/v1/chat/completions", dict(messages=HI, tools=chat, parallel_tool_calls=several, stream=True))
            deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in text.splitlines() if line.startswith("data: {")]
            self.assertEqual([c["function"]["name"] for d in deltas for c in d.get("tool_calls", []) if "name" in c["function"]], names)


@unittest.skipIf(openai is None, "no Python package openai")
class Schemas(Said):
    """Clients read answers without checking them. Here the clients' own types check every object and every event."""

    def events(self, server, path, **body):
        status, text, _ = server.request("POST", path, dict(stream=True, **body))
        self.assertEqual(status, 200, text)
        return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]

    def test_answers_and_events_are_valid_under_the_types_of_the_clients(self):
        from openai.types import Completion, responses
        from openai.types.chat import ChatCompletion, ChatCompletionChunk
        check = lambda kind, value: pydantic.TypeAdapter(kind).validate_python(value)
        chat = [dict(type="function", function=dict(name="weather", parameters=CITY))]
        flat = [dict(type="function", name="weather", parameters=CITY, strict=False)]
        for script in (THOUGHT + CALL, THOUGHT + FINAL):
            server = self.serve(script)
            for more in ({}, dict(logprobs=True, top_logprobs=2)):
                check(ChatCompletion, self.post(server, "/v1/chat/completions", messages=HI, tools=chat, **more))
                for event in self.events(server, "/v1/chat/completions", messages=HI, tools=chat, stream_options=dict(include_usage=True), **more):
                    check(ChatCompletionChunk, event)
            for more in ({}, dict(logprobs=2)):
                check(Completion, self.post(server, "/v1/completions", prompt="Hi", max_tokens=3, **more))
            for more in ({}, dict(include=["message.output_text.logprobs"], top_logprobs=2)):
                whole = self.post(server, "/v1/responses", input=HI, tools=flat, **more)
                check(responses.Response, whole)
                events = self.events(server, "/v1/responses", input=HI, tools=flat, **more)
                for event in events:
                    check(responses.ResponseStreamEvent, event)
                logprobs = [[t["bytes"] for t in part["logprobs"]] for item in whole["output"] if item["type"] == "message" for part in item["content"]]
                said = [list(map(len, FINAL[3:6]))] if script[-1] == FINAL[-1] else []
                self.assertEqual([list(map(len, tokens)) for tokens in logprobs], said if more else [[] for _ in said])
            if anthropic is not None:
                body = dict(model="tiny", max_tokens=60, messages=HI, tools=TOOLS, thinking=dict(type="enabled", budget_tokens=1024))
                check(anthropic.types.Message, self.ask(server, **body))
                for event in self.events(server, "/v1/messages", **body):
                    check(anthropic.types.RawMessageStreamEvent, event)


class Tokens(Said):
    def test_tokens_of_a_text_are_given_and_taken(self):
        server = self.serve(FINAL)
        text = "the assistant, final \u65e5"
        vllm = self.post(server, "/tokenize", prompt=text, return_token_strs=True)
        llama = self.post(server, "/tokenize", content=text)
        self.assertEqual((vllm["tokens"], vllm["count"]), (llama["tokens"], len(llama["tokens"])))
        self.assertEqual(len(vllm["token_strs"]), vllm["count"])
        self.assertGreater(vllm["max_model_len"], 1000)
        pieces = self.post(server, "/tokenize", content=text, with_pieces=True)["tokens"]
        self.assertEqual([p["id"] for p in pieces], llama["tokens"])
        self.assertEqual(b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces), text.encode())
        back = self.post(server, "/detokenize", tokens=llama["tokens"])
        self.assertEqual((back["prompt"], back["content"]), (text, text))
        self.assertEqual(self.post(server, "/detokenize", tokens=[])["content"], "")
        long = self.post(server, "/tokenize", messages=[dict(role="user", content="x" * 9000)])
        self.assertGreater(long["count"], long["max_model_len"])
        chat = self.post(server, "/tokenize", messages=HI, model="tiny")
        self.assertEqual(chat["count"], self.post(server, "/v1/chat/completions", messages=HI, max_tokens=1)["usage"]["prompt_tokens"])
        for path, body in (("/tokenize", {}), ("/tokenize", dict(prompt=1)), ("/detokenize", dict(tokens=[1 << 20])), ("/detokenize", dict(tokens="a"))):
            self.assertIn("error", self.post(server, path, 400, **body))


if __name__ == "__main__":
    unittest.main()
