"""Runs `ingot serve` as its users would: OpenAI's own client, curl, and sockets that mean no good.

    python3 tests/serve_test.py BINARY [unittest options]
"""
import concurrent.futures
import datetime
import http.client
import json
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cli_gpt_oss_test
from program import ingot, start
from tiny_checkpoints import write_draft_head

try:
    import openai
except ImportError:
    openai = None

# A schema with every supported keyword, and functions to call.
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["zeta", "kind", "list", "deep"],
    "properties": {
        "zeta": {"type": "string", "maxLength": 8}, "kind": {"enum": ["a", "b", None, 7]},
        "list": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "often": {"type": ["boolean", "null"]}, "deep": {"$ref": "#/$defs/deep"}},
    "$defs": {"deep": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"deep": {"$ref": "#/$defs/deep"}}, "required": ["deep"], "additionalProperties": False}]}}}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer"}}, "required": ["city"], "additionalProperties": False}
TOOLS = [dict(type="function", function=dict(name="weather", parameters=CITY)), dict(type="function", function=dict(name="now"))]


def valid(schema, value, root=None):
    """The meaning of the keywords above in JSON Schema."""
    root = root or schema
    if "$ref" in schema:
        at = root
        for key in schema["$ref"].split("/")[1:]:
            at = at[key]
        return valid(at, value, root)
    if "anyOf" in schema:
        return any(valid(s, value, root) for s in schema["anyOf"])
    if "enum" in schema:
        return any(value == v and type(value) is type(v) for v in schema["enum"])
    types = dict(object=dict, array=list, string=str, integer=int, boolean=bool, null=type(None))
    wanted = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if type(value) not in [types[t] for t in wanted]:
        return False
    if isinstance(value, dict):
        known = schema.get("properties", {})
        return set(schema.get("required", [])) <= set(value) <= set(known) and all(valid(known[k], v, root) for k, v in value.items())
    if isinstance(value, list):
        return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1 << 30) and all(valid(schema["items"], v, root) for v in value)
    return not isinstance(value, str) or len(value) <= schema.get("maxLength", 1 << 30)


ENDLESS = {"1": -100, "2": -100, "5": -100, "8": -100}  # neither the end of an answer nor another turn is drawn
GREEDY = dict(temperature=0)


def setUpModule():
    global MODEL, WITHOUT
    run = ingot("serve", "none", "--port", 0)
    WITHOUT = "without libmicrohttpd" in run.error
    MODEL = cli_gpt_oss_test.Chat("test_piped_turns_are_answered_and_known_tokens_are_used_again")
    MODEL.setUp()


def tearDownModule():
    MODEL.doCleanups()


class Server:
    """`ingot serve` on a port of its own."""

    def __init__(self, *options, model=None, name="tiny"):
        date = [] if model else ["--date", "none"]  # which a run of `ingot train` is not told
        self.process = start("serve", "--model", model or MODEL.model, "--port", 0, *date, "--name", name, *options)
        self.log, self.port = "", None
        while self.port is None:
            line = self.process.stderr.readline().decode()
            assert line, f"it ended: {self.log}"
            self.log += line
            found = re.search(rf"serving {re.escape(name)} at http://[^ ]*:(\d+) ", line)
            self.port = int(found[1]) if found else None
        self.rest = threading.Thread(target=self.read_rest, daemon=True)  # Python's end waits for every other thread, also where a test failed
        self.rest.start()

    def read_rest(self):
        for line in self.process.stderr:
            self.log += line.decode()

    def log_until(self, text, seconds=20):
        deadline = time.monotonic() + seconds
        while text not in self.log:
            assert time.monotonic() < deadline, f"{text} is not in the log: {self.log}"
            time.sleep(0.01)
        return self.log

    def request(self, method, path, body=None, headers={}, host=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        if isinstance(body, dict):
            body = json.dumps(body)
        more = {"Content-Type": "application/json"} if body is not None else {}
        connection.request(method, path, body, more | ({"Host": host} if host else {}) | headers)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text, response.headers

    def metric(self, name):
        found = re.search(rf"^ingot:{re.escape(name)} (\S+)$", self.request("GET", "/metrics")[1], re.M)
        return float(found[1])

    def until(self, name, value, seconds=20):
        deadline = time.monotonic() + seconds
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, expected {value}"
            time.sleep(0.01)

    def raw(self, data, end=False, seconds=10):
        """Reads until the server closes the connection or sends nothing for a while."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as s:
            back = b""
            try:
                s.sendall(data)
                if end:
                    s.shutdown(socket.SHUT_WR)
                while part := s.recv(65536):
                    back += part
            except OSError:
                pass
            return back

    def stream(self, body, path="/v1/completions"):
        """A connection whose answer has begun."""
        s = socket.create_connection(("127.0.0.1", self.port), timeout=120)
        text = json.dumps(body | dict(stream=True))
        s.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        first = s.recv(4096)
        assert first.startswith(b"HTTP/1.1 200 "), first
        return s

    def stop(self, signals=1):
        for _ in range(signals):
            self.process.terminate()
        self.process.wait(60)
        self.rest.join()
        self.process.stderr.close()
        return self.process.returncode


class WithServer(unittest.TestCase):
    OPTIONS = ()

    @classmethod
    def setUpClass(cls):
        if WITHOUT:
            raise unittest.SkipTest("built without libmicrohttpd")
        cls.server = Server(*cls.OPTIONS)
        cls.addClassCleanup(cls.end)

    @classmethod
    def end(cls):
        assert cls.server.stop() == 0, cls.server.log

    def setUp(self):
        self.assertIsNone(self.server.process.poll(), self.server.log)


@unittest.skipIf(openai is None, "no Python package openai")
class Client(WithServer):
    def setUp(self):
        super().setUp()
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.server.port}/v1", api_key="none", max_retries=0, timeout=60)

    def complete(self, **more):
        return self.client.completions.create(**(dict(model="tiny", prompt="assistant ", max_tokens=20, logit_bias=ENDLESS) | more))

    def chat(self, **more):
        return self.client.chat.completions.create(**(dict(model="tiny", messages=[dict(role="user", content="Hi \u65e5")], max_completion_tokens=60) | more))

    def test_models_are_listed(self):
        self.assertEqual([m.id for m in self.client.models.list()], ["tiny"])
        self.assertEqual(self.client.models.retrieve("tiny"), self.client.models.list().data[0])
        for other in ("other", "a/b", "%", "%2"):
            with self.assertRaisesRegex(openai.NotFoundError, "expected tiny"):
                self.client.models.retrieve(other)

    def test_a_completion_equals_generate_s(self):
        mine = self.complete(prompt="assistant user", max_tokens=30, logit_bias=None, **GREEDY)
        run = ingot("generate", "--model", MODEL.model, "--raw", "--prompt", "assistant user", "--tokens", 30, "--temperature", 0, "--json")
        expected = json.loads(run.text)
        self.assertEqual(mine.choices[0].text, expected["text"])
        self.assertEqual(mine.choices[0].finish_reason, expected["finish"])
        self.assertEqual((mine.usage.prompt_tokens, mine.usage.completion_tokens), (expected["prompt_tokens"], len(expected["ids"])))

    def test_seeds_repeat_and_choices_differ(self):
        a, b = self.complete(seed=5, n=3), self.complete(seed=5, n=3)
        self.assertEqual([c.text for c in a.choices], [c.text for c in b.choices])
        self.assertEqual([c.index for c in a.choices], [0, 1, 2])
        self.assertEqual(len({c.text for c in a.choices}), 3)
        self.assertEqual(a.usage.completion_tokens, 60)
        self.assertNotEqual(self.complete().choices[0].text, self.complete().choices[0].text)  # without a seed

    def test_prompts_may_be_several_and_ids(self):
        several = self.complete(prompt=["user", "final"], **GREEDY)
        self.assertEqual([c.text for c in several.choices], [self.complete(prompt=p, **GREEDY).choices[0].text for p in ("user", "final")])
        self.assertEqual(self.complete(prompt=[10, 11, 12], **GREEDY).usage.prompt_tokens, 3)

    def test_a_stream_has_the_text_of_the_whole_answer(self):
        for seed in range(6):
            options = dict(seed=seed, n=2, max_tokens=40, stop=["a", "e "] if seed % 2 else None)
            whole = self.complete(**options)
            texts, reasons, usage = ["", ""], [None, None], []
            for chunk in self.complete(stream=True, stream_options=dict(include_usage=True), **options):
                for c in chunk.choices:
                    texts[c.index] += c.text
                    reasons[c.index] = c.finish_reason or reasons[c.index]
                usage.append(chunk.usage)
            self.assertEqual([(c.text, c.finish_reason) for c in whole.choices], list(zip(texts, reasons)))
            self.assertEqual(usage[:-1], [None] * (len(usage) - 1))
            self.assertEqual(usage[-1].completion_tokens, whole.usage.completion_tokens)

    def test_a_stop_string_ends_the_text_before_it(self):
        whole = self.complete(seed=3, max_tokens=60).choices[0].text
        for stop in (whole[7:9], whole[20], whole[11:16]):
            short = self.complete(seed=3, max_tokens=60, stop=stop).choices[0]
            self.assertEqual((short.text, short.finish_reason), (whole[: whole.index(stop)], "stop"))

    def test_a_stop_id_ends_the_answer_before_its_token(self):
        run = ingot("generate", "--model", MODEL.model, "--raw", "--prompt", "assistant user", "--tokens", 30, "--temperature", 0, "--json")
        ids = json.loads(run.text)["ids"]
        ask = dict(prompt="assistant user", max_tokens=30, logit_bias=None, **GREEDY)
        first = {i: ids.index(i) for i in ids[1:]}  # the places at which each id comes first
        for id, at in first.items():
            short = self.complete(**ask, extra_body=dict(stop_token_ids=[id]))
            self.assertEqual((short.choices[0].finish_reason, short.usage.completion_tokens), ("stop", at))
            before = self.server.request("POST", "/detokenize", dict(tokens=ids[:at]))[1]
            self.assertEqual(short.choices[0].text, json.loads(before)["content"])
        earliest = min(first, key=first.get)
        self.assertEqual(self.complete(**ask, extra_body=dict(stop_token_ids=list(first))).usage.completion_tokens, first[earliest])

    def test_a_chat_ends_at_a_stop_id_that_is_text(self):
        finished = set()
        for seed in range(6):
            more = dict(seed=seed, max_completion_tokens=60, logprobs=True)
            whole, short = self.chat(**more).choices[0], self.chat(**more, extra_body=dict(stop_token_ids=list(range(9, 73)))).choices[0]
            text, reasoning = short.message.content or "", getattr(short.message, "reasoning_content", None) or ""
            self.assertTrue((whole.message.content or "").startswith(text))
            self.assertTrue((getattr(whole.message, "reasoning_content", None) or "").startswith(reasoning))
            # Ids 9 to 72 are the bytes "!" to "`", each a token, and no token of the answer may be one of them.
            self.assertFalse([t.token for t in short.logprobs.content if len(t.bytes) == 1 and 33 <= t.bytes[0] <= 96])
            finished.add(short.finish_reason)
        self.assertIn("stop", finished)

    def test_logprobs_are_of_the_text_s_tokens(self):
        c = self.complete(logprobs=3, seed=1).choices[0].logprobs
        self.assertEqual((len(c.tokens), len(c.token_logprobs), len(c.top_logprobs), c.text_offset[0]), (20, 20, 20, 0))
        self.assertTrue(all(p <= 0 for p in c.token_logprobs))
        self.assertTrue(all(len(top) <= 3 for top in c.top_logprobs))
        greedy = self.complete(logprobs=1, logit_bias=None, temperature=0).choices[0].logprobs
        self.assertEqual(greedy.token_logprobs, [max(top.values()) for top in greedy.top_logprobs])

    def test_logit_bias_forbids_and_forces(self):
        self.assertEqual(self.complete(logit_bias={"100": 100}, max_tokens=5, logprobs=0, **GREEDY).choices[0].logprobs.tokens[1:],
                         self.complete(logit_bias={"100": 100}, max_tokens=5, logprobs=0, **GREEDY).choices[0].logprobs.tokens[:-1])

    def test_a_chat_has_text_and_thoughts_and_its_stream_the_same(self):
        kinds = set()
        for seed in range(12):
            options = dict(seed=seed, reasoning_effort="low")
            message = self.chat(**options).choices[0].message
            text = reasoning = ""
            for chunk in self.chat(stream=True, **options):
                for c in chunk.choices:
                    text += c.delta.content or ""
                    reasoning += getattr(c.delta, "reasoning_content", None) or ""
            self.assertEqual((message.content or "", getattr(message, "reasoning_content", "")), (text, reasoning))
            self.assertNotRegex(text + reasoning, r"<\|")
            kinds |= {bool(text), bool(reasoning)}
        self.assertIn(True, kinds)

    def test_a_second_turn_uses_the_first_one_s_tokens(self):
        messages = [dict(role="user", content="Tell me " + "more " * 30)]
        self.chat(messages=messages, **GREEDY)
        messages += [dict(role="assistant", content="No."), dict(role="user", content="Please")]
        again = self.chat(messages=messages, **GREEDY)
        self.assertGreater(again.usage.prompt_tokens_details.cached_tokens, 30)
        self.assertEqual(again.model_extra["timings"]["cache_n"], again.usage.prompt_tokens_details.cached_tokens)

    def test_a_prediction_changes_no_answer_and_its_tokens_are_counted(self):
        for options in (dict(temperature=0), dict(seed=3), dict(seed=4, frequency_penalty=-1, logprobs=True)):
            ask = dict(messages=[dict(role="user", content="Write it again, write it again.")], max_completion_tokens=60, **options)
            plain = self.chat(**ask)
            text = plain.choices[0].message.content or plain.choices[0].message.model_extra.get("reasoning_content") or "None"
            predicted = self.chat(prediction=dict(type="content", content=text), **ask)
            self.assertEqual(predicted.choices[0].model_dump(), plain.choices[0].model_dump())
            details = predicted.usage.completion_tokens_details
            self.assertGreaterEqual(details.accepted_prediction_tokens, 0)
            self.assertGreaterEqual(details.rejected_prediction_tokens, 0)
            self.assertIsNone(plain.usage.completion_tokens_details.accepted_prediction_tokens)
            timings = predicted.model_extra["timings"]
            self.assertLessEqual(timings.get("draft_n_accepted", 0), timings.get("draft_n", 0))

    def test_functions_are_described_and_their_results_read(self):
        function = dict(name="weather", description="Says it.", parameters=dict(type="object", properties=dict(city=dict(type="string"))))
        tools = [dict(type="function", function=function)]
        call = dict(id="c1", type="function", function=dict(name="weather", arguments='{"city": "Paris"}'))
        messages = [dict(role="user", content="?"), dict(role="assistant", tool_calls=[call]), dict(role="tool", tool_call_id="c1", content="Rain")]
        self.assertGreater(self.chat(messages=messages, tools=tools).usage.prompt_tokens, self.chat(messages=messages).usage.prompt_tokens + 10)
        with self.assertRaisesRegex(openai.BadRequestError, "no call of that id"):
            self.chat(messages=messages[::2], tools=tools)

    def test_a_response_is_the_chat_in_another_form_and_its_stream_the_same(self):
        finished = set()
        for seed in range(8):
            more = dict(model="tiny", input="Hi \u65e5", max_output_tokens=40, reasoning=dict(effort="low"), extra_body=dict(seed=seed))
            whole = self.client.responses.create(**more)
            message = self.chat(seed=seed, reasoning_effort="low", max_completion_tokens=40).choices[0].message
            self.assertEqual(whole.output_text, message.content or "")
            thoughts = "".join(part.text for item in whole.output if item.type == "reasoning" for part in item.content)
            self.assertEqual(thoughts, getattr(message, "reasoning_content", ""))
            thought_tokens = whole.usage.output_tokens_details.reasoning_tokens
            self.assertEqual((thought_tokens > 0, thought_tokens < whole.usage.output_tokens), (thoughts != "", True))
            for item in whole.output:
                cut = whole.status == "incomplete" and item is whole.output[-1]
                self.assertIn(item.status, ("incomplete", "completed") if cut else ("completed",))  # the limit may fall between two items
            events = list(self.client.responses.create(stream=True, **more))
            self.assertEqual([e.sequence_number for e in events], list(range(len(events))))
            self.assertEqual("".join(e.delta for e in events if e.type == "response.output_text.delta"), whole.output_text)
            self.assertEqual(events[-1].response.output_text, whole.output_text)
            self.assertEqual((events[-1].type, events[-1].response.usage.output_tokens), (f"response.{whole.status}", whole.usage.output_tokens))
            finished.add(whole.status)
        self.assertLessEqual(finished, {"completed", "incomplete"})
        with self.assertRaises(openai.BadRequestError) as e:
            self.client.responses.create(model="tiny", input="Hi", previous_response_id="resp_1")
        self.assertEqual(e.exception.param, "previous_response_id")

    # The text of a random model depends on its masks alone: a document that is cut off by the limit alone may be incomplete.
    def documents(self, n=12, **more):
        whole = 0
        for seed in range(n):
            choice = self.chat(seed=seed, max_completion_tokens=600, logit_bias=self.CLOSING, **more).choices[0]
            if choice.finish_reason == "length":
                continue
            whole += 1
            yield choice
        self.assertGreater(whole, n // 3)

    CLOSING = {str(9 + b - 33): 8 for b in b'"}]'} | {str(9 + b - 33): -8 for b in b"[{"} | {"2": 8, "5": 8, "8": 8}  # so that the answer ends

    def test_json_mode_gives_an_object(self):
        for choice in self.documents(response_format=dict(type="json_object")):
            self.assertIsInstance(json.loads(choice.message.content), dict)
            self.assertEqual(choice.finish_reason, "stop")

    def test_a_schema_s_answer_is_valid_under_it_and_keeps_its_order(self):
        wanted = dict(type="json_schema", json_schema=dict(name="thing", strict=True, schema=SCHEMA))
        for choice in self.documents(response_format=wanted):
            value = json.loads(choice.message.content)
            self.assertTrue(valid(SCHEMA, value), value)
            self.assertEqual(list(value), [k for k in SCHEMA["properties"] if k in value])

    def test_a_schema_s_stream_and_its_response_are_the_same(self):
        wanted = dict(type="json_schema", json_schema=dict(name="thing", strict=True, schema=SCHEMA))
        for seed in range(4):
            options = dict(seed=seed, max_completion_tokens=600, logit_bias=self.CLOSING)
            whole = self.chat(response_format=wanted, **options).choices[0].message.content
            stream = self.chat(response_format=wanted, stream=True, **options)
            self.assertEqual("".join(c.delta.content or "" for chunk in stream for c in chunk.choices), whole or "")
            text = dict(format=dict(type="json_schema", name="thing", strict=True, schema=SCHEMA))
            response = self.client.responses.create(model="tiny", input="Hi \u65e5", max_output_tokens=600, text=text,
                                                    extra_body=dict(seed=seed, logit_bias=self.CLOSING))
            self.assertEqual(response.output_text, whole or "")

    def test_patterns_formats_and_bounds_are_held(self):
        properties = dict(code=dict(type="string", pattern="^[A-Z]{2}-\\d{1,3}$"), day=dict(type="string", format="date"), size=dict(type="integer", minimum=3, maximum=20, multipleOf=3),
                          part=dict(type="number", exclusiveMinimum=0, maximum=1), of=dict(oneOf=[dict(type="null"), dict(type="boolean")]))
        wanted = dict(type="json_schema", json_schema=dict(name="thing", strict=True, schema=dict(type="object", properties=properties, required=list(properties), additionalProperties=False)))
        for choice in self.documents(response_format=wanted):
            value = json.loads(choice.message.content)
            self.assertRegex(value["code"], "^[A-Z]{2}-[0-9]{1,3}$")
            datetime.date.fromisoformat(value["day"])
            self.assertIn(value["size"], range(3, 21, 3))
            self.assertTrue(0 < value["part"] <= 1, value)
            self.assertIn(value["of"], (None, True, False))

    def test_a_call_can_be_forced_and_its_arguments_are_valid(self):
        names = set()
        for choice in self.documents(tools=TOOLS, tool_choice="required"):
            call = choice.message.tool_calls[0].function
            names.add(call.name)
            self.assertTrue(valid(CITY if call.name == "weather" else dict(type="object"), json.loads(call.arguments)), call)
            self.assertEqual((choice.finish_reason, choice.message.content), ("tool_calls", None))
        self.assertLessEqual(names, {"weather", "now"})
        for choice in self.documents(4, tools=TOOLS, tool_choice=dict(type="function", function=dict(name="weather"))):
            self.assertEqual(choice.message.tool_calls[0].function.name, "weather")
        with self.assertRaises(openai.BadRequestError) as e:
            self.chat(tools=TOOLS, tool_choice=dict(type="function", function=dict(name="none")))
        self.assertEqual(e.exception.param, "tool_choice")

    def test_schemas_that_are_not_read_are_refused_by_name(self):
        for schema, param in ((dict(type="string", pattern="^(?!a)"), "response_format.json_schema.schema.pattern"),
                              (dict(type="object", properties=dict(a=dict(oneOf=[]))), "response_format.json_schema.schema.properties.a.oneOf"),
                              (7, "response_format.json_schema.schema")):
            with self.assertRaises(openai.BadRequestError) as e:
                self.chat(response_format=dict(type="json_schema", json_schema=dict(name="a", schema=schema)))
            self.assertEqual(e.exception.param, param)
        for format in (dict(type="xml"), dict(), dict(type="json_schema"), dict(type="json_schema", json_schema=dict(name="a b", schema={}))):
            with self.assertRaises(openai.BadRequestError) as e:
                self.chat(response_format=format)
            self.assertTrue(e.exception.param.startswith("response_format"))

    def test_penalties_keep_tokens_from_coming_again(self):
        force = {"100": 1, "101": 1} | {str(i): -100 for i in range(100)} | {str(i): -100 for i in range(102, 340)}
        def ids(**more):
            return self.complete(logit_bias=force, max_tokens=12, logprobs=0, **GREEDY, **more).choices[0].logprobs.tokens
        plain, punished = ids(), ids(frequency_penalty=2)
        self.assertLess(abs(punished.count(punished[0]) - 6), 5)
        self.assertEqual(len(set(punished)), 2, punished)  # each occurrence makes a token less likely, so the other token follows
        self.assertEqual(len(set(ids(presence_penalty=2, frequency_penalty=0))), 2)
        self.assertEqual(len(plain), 12)
        with self.assertRaises(openai.BadRequestError) as e:
            self.complete(frequency_penalty=2.5)
        self.assertEqual(e.exception.param, "frequency_penalty")

    def test_a_chat_s_logprobs_are_of_its_text(self):
        options = dict(seed=1, logprobs=True, top_logprobs=3, max_completion_tokens=600, logit_bias=self.CLOSING,
                       response_format=dict(type="json_schema", json_schema=dict(name="a", schema=dict(enum=["yes", "no"]))))
        choice = self.chat(**options).choices[0]
        content = choice.logprobs.content
        self.assertEqual(b"".join(bytes(t.bytes) for t in content).decode(), choice.message.content)
        for token in content:
            self.assertLessEqual(token.logprob, 0)
            self.assertEqual(len(token.top_logprobs), 3)
            self.assertEqual(sorted((t.logprob for t in token.top_logprobs), reverse=True), [t.logprob for t in token.top_logprobs])
            self.assertLessEqual(token.logprob, token.top_logprobs[0].logprob)
            self.assertEqual(bytes(token.bytes).decode(errors="replace"), token.token)
        streamed = [t for chunk in self.chat(stream=True, **options) for c in chunk.choices if c.logprobs for t in c.logprobs.content]
        self.assertEqual([(t.bytes, t.logprob) for t in streamed], [(t.bytes, t.logprob) for t in content])

    def test_errors_name_the_field(self):
        for field, more in (("n", dict(n=9)), ("temperature", dict(temperature=3)), ("max_tokens", dict(max_tokens=0)), ("stop", dict(stop=["a"] * 5)),
                            ("stop_token_ids", dict(extra_body=dict(stop_token_ids=[340]))), ("stop_token_ids[1]", dict(extra_body=dict(stop_token_ids=[1, -1]))),
                            ("repetition_penalty", dict(extra_body=dict(repetition_penalty=1.2)))):
            with self.assertRaises(openai.BadRequestError) as e:
                self.complete(**more)
            self.assertEqual(e.exception.param, field)
        with self.assertRaises(openai.NotFoundError) as e:
            self.complete(model="other")
        self.assertEqual(e.exception.code, "model_not_found")
        with self.assertRaises(openai.BadRequestError) as e:
            self.complete(prompt="x " * 9000)
        self.assertEqual(e.exception.code, "context_length_exceeded")
        with self.assertRaisesRegex(openai.BadRequestError, "id 340"):
            self.complete(prompt=[340])
        with self.assertRaisesRegex(openai.BadRequestError, "id 340"):
            self.complete(logit_bias={"340": 1})

    def test_concurrent_requests_get_the_same_answers_as_alone(self):
        alone = [self.complete(prompt=f"user {i}", max_tokens=40, **GREEDY).choices[0].text for i in range(8)]
        noise = random.Random(1)

        def one(i):
            if noise.random() < 0.3:  # goes away in the middle
                s = self.server.stream(dict(prompt=f"user {i}", max_tokens=4000, logit_bias=ENDLESS))
                s.close()
                return
            self.assertEqual(self.complete(prompt=f"user {i % 8}", max_tokens=40, **GREEDY).choices[0].text, alone[i % 8])

        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            list(pool.map(one, range(64)))
        self.server.until("num_requests_running", 0)


class Drafts(WithServer):
    """A server that drafts every answer, beside one that drafts none. The given costs make the lengths of drafts independent of the clock."""
    OPTIONS = ("--draft", "lookup", "--draft-max", "5", "--draft-costs", "100,105,110,115,120,125")

    def test_answers_of_every_kind_are_those_of_no_drafts(self):
        self.assertGreater(self.compare(self.server), 0)

    def test_answers_with_a_draft_head_are_those_of_no_drafts(self):
        head = write_draft_head(MODEL.directory / "head", MODEL.VOCAB, MODEL.HIDDEN, [0, 1, 2])
        server = Server("--draft", head, *self.OPTIONS[2:])
        self.addCleanup(server.stop)
        self.compare(server)
        self.assertGreater(server.metric("spec_decode_num_draft_tokens_total"), 0)
        self.assertIn("a draft head over the hidden states behind layers 0, 1, 2", server.log)

    def test_tokens_of_a_prediction_are_counted_by_whether_the_answer_has_them(self):
        text = "int add(int a, int b) { return a + b; }"
        schema = dict(type="object", properties=dict(text=dict(const=text)), required=["text"], additionalProperties=False)
        body = dict(messages=[dict(role="user", content="x")], max_completion_tokens=120, temperature=0, response_format=dict(type="json_schema", json_schema=dict(name="s", schema=schema)))
        plain, predicting = Server("--draft", "none"), Server(*self.OPTIONS[2:])
        self.addCleanup(plain.stop)
        self.addCleanup(predicting.stop)
        ask = lambda server, **more: json.loads(server.request("POST", "/v1/chat/completions", body | more)[1])
        want = ask(plain)
        answer = want["choices"][0]["message"]["content"]
        self.assertIn(text, answer)
        prediction = lambda content: dict(prediction=dict(type="content", content=content))
        counts = []
        for content in (answer, "Nothing of this occurs."):
            for server in (predicting, plain):
                found = ask(server, **prediction(content))
                self.assertEqual(found["choices"], want["choices"])
                details, timings = found["usage"]["completion_tokens_details"], found["timings"]
                counts.append([details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]])
                self.assertLessEqual(counts[-1][0], timings.get("draft_n_accepted", 0))
                self.assertLessEqual(sum(counts[-1]), timings.get("draft_n", 0))
        (right, wrong_after), none, (by_chance, wrong), none_either = counts
        self.assertEqual((none, none_either), ([0, 0], [0, 0]))
        self.assertGreater(right, len(text) / 2)
        self.assertLess(wrong_after, right / 2)
        self.assertTrue(0 <= by_chance <= 5 and wrong > 0, counts)
        self.assertEqual(json.loads(predicting.request("POST", "/v1/chat/completions", body)[1])["timings"].get("draft_n"), None)  # without a prediction

    def compare(self, drafting):
        plain = Server("--draft", "none")
        self.addCleanup(plain.stop)
        schema = dict(type="json_schema", json_schema=dict(name="s", schema=SCHEMA))
        accepted = 0
        for more in (dict(temperature=0), dict(seed=1), dict(seed=2, temperature=0.5, frequency_penalty=-1, presence_penalty=0.5), dict(seed=3, response_format=schema), dict(seed=4, tools=TOOLS, tool_choice="required"),
                     dict(seed=5, response_format=dict(type="json_object"), temperature=0.3, logprobs=True, top_logprobs=2), dict(seed=6, min_p=0.1, n=3, logit_bias={"5": 3, "9": -100}), dict(temperature=0, stop=["a"])):
            body = dict(messages=[dict(role="user", content="Say it again, say it again, say it again.")], max_completion_tokens=80) | more
            found, want = (json.loads(server.request("POST", "/v1/chat/completions", body)[1]) for server in (drafting, plain))
            without_ids = lambda answer: re.sub(r"call_[0-9a-f]+", "call", json.dumps(answer["choices"]))
            self.assertEqual(without_ids(found), without_ids(want), more)
            self.assertEqual(found["usage"]["completion_tokens"], want["usage"]["completion_tokens"])
            self.assertNotIn("draft_n", want["timings"])
            accepted += found["timings"].get("draft_n_accepted", 0)
        self.assertEqual(drafting.metric("spec_decode_num_accepted_tokens_total"), accepted)
        self.assertEqual(plain.metric("spec_decode_num_draft_tokens_total"), 0)
        return accepted


class StrictFields(WithServer):
    OPTIONS = ("--strict-fields",)

    def test_an_unknown_field_and_a_tool_of_another_type_are_refused_by_name(self):
        for name, more in (("cache_prompt", dict(cache_prompt=True)), ("tools[0].type", dict(tools=[dict(type="web_search")]))):
            status, text, _ = self.server.request("POST", "/v1/responses", dict(input="a") | more)
            self.assertEqual((status, json.loads(text)["error"]["param"]), (400, name))


class Protocol(WithServer):
    OPTIONS = ("--cors-origin", "https://friend.example", "--allow-host", "model.example", "--context", "60000")

    def test_health_and_metrics(self):
        self.assertEqual(self.server.request("GET", "/health")[:2], (200, '{"status":"ok"}\n'))
        status, text, headers = self.server.request("GET", "/metrics")
        self.assertEqual(status, 200)
        self.assertIn("text/plain", headers["Content-Type"])
        for line in text.splitlines():
            self.assertRegex(line, r"\A(# (HELP|TYPE) ingot:\w+ .+|ingot:\w+(\{\w+=\"[^\"]+\"\})? [\d.e+-]+)\Z")
        for name in ("drafts_total", "draft_tokens_total", "accepted_tokens_total", 'accepted_tokens_per_pos_total{position="0"}'):
            self.assertIn(f"\ningot:spec_decode_num_{name} ", text)

    def test_a_field_without_effect_is_ignored_and_named_once_in_the_log(self):
        for _ in range(2):
            self.assertEqual(self.server.request("POST", "/v1/completions", dict(prompt="a", max_tokens=1, cache_prompt=True, max_token=3, absent_field=None))[0], 200)
        for name in ("cache_prompt", "max_token (did you mean max_tokens?)"):
            self.assertEqual(self.server.log_until(name).count(json.dumps(name)), 1)
        self.assertNotIn("absent_field", self.server.log)

    def test_a_forced_call_without_strict_takes_any_schema(self):
        properties = dict(n=dict(type="integer", minimum=1, maximum=5), s=dict(type="string", pattern="^(?!\\.)(?!.*\\.\\.).+@.+$", format="email"), o=dict(oneOf=[dict(type="string"), dict(type="string")]),
                          t=dict(type="array", prefixItems=[dict(type="string")], uniqueItems=True, maxItems=1000), a=dict(allOf=[dict(type="object", properties=dict(x=dict(type="string")))] * 2))
        function = dict(name="f", parameters=dict(type="object", properties=properties, required=["n", "other"], propertyNames=dict(pattern="^x")))
        for strict in (False, True):
            body = dict(messages=[dict(role="user", content="a")], tools=[dict(type="function", function=function | dict(strict=strict))], tool_choice="required", max_completion_tokens=3)
            status, text, _ = self.server.request("POST", "/v1/chat/completions", body)
            self.assertEqual(status, 400 if strict else 200, text)

    def test_a_response_repeats_the_requests_fields(self):
        body = dict(input="a", instructions="Be brief.", metadata=dict(a="b"), temperature=0.5, max_output_tokens=2, tools=[dict(type="function", name="f", parameters=dict(type="object", properties={}))])
        status, text, _ = self.server.request("POST", "/v1/responses", body)
        self.assertEqual(status, 200, text)
        answer = json.loads(text)
        self.assertEqual({key: answer[key] for key in body if key != "input"}, {key: body[key] for key in body if key != "input"})
        self.assertEqual((answer["tool_choice"], answer["top_p"], answer["store"]), ("auto", 1, False))

    def test_a_request_of_codex_is_answered_with_its_functions(self):
        parameters = dict(type="object", properties=dict(command=dict(type="array", items=dict(type="string"))))
        tools = [dict(type="function", name="shell", description="Runs", strict=False, parameters=parameters), dict(type="web_search"), dict(type="local_shell"), dict(type="image_generation"),
                 dict(type="custom", name="apply_patch", description="d", format=dict(type="grammar", syntax="lark", definition="start: /a/")), dict(type="namespace", name="mcp", description="", tools=[])]
        items = [dict(type="message", role="user", content=[dict(type="input_text", text="Hi")]), dict(type="custom_tool_call", call_id="c1", name="apply_patch", input="*** Begin Patch", status="completed"),
                 dict(type="custom_tool_call_output", call_id="c1", output="done"), dict(type="message", role="assistant", phase="final_answer", content=[dict(type="output_text", text="Yes", annotations=[])]),
                 dict(type="message", role="user", phase=None, content=[dict(type="input_text", text="Go on")])]
        body = dict(model="tiny", instructions="You are Codex.", input=items, tools=tools, tool_choice="auto", parallel_tool_calls=False, store=False, stream=False, include=["reasoning.encrypted_content"],
                    prompt_cache_key="k", client_metadata=dict(x="y"), reasoning=dict(effort="xhigh", summary="auto"), text=dict(verbosity="low"), max_output_tokens=4)
        status, text, _ = self.server.request("POST", "/v1/responses", body)
        self.assertEqual(status, 200, text)
        self.assertIn('"tools[] of type web_search"', self.server.log_until("of type namespace"))

    def test_a_prompt_that_is_echoed_is_scored(self):
        ask = lambda **body: json.loads(self.server.request("POST", "/v1/completions", dict(temperature=0, logprobs=2) | body)[1])
        prompt = [97, 98, 99, 100]
        said = ask(prompt=prompt, max_tokens=12, logit_bias=ENDLESS, echo=True)
        scores, offsets = said["choices"][0]["logprobs"], said["choices"][0]["logprobs"]["text_offset"]
        self.assertEqual((len(scores["tokens"]), len(scores["token_logprobs"]), len(scores["top_logprobs"])), (16, 16, 16))
        self.assertEqual((scores["token_logprobs"][0], scores["top_logprobs"][0]), (None, None))
        self.assertEqual((offsets, said["choices"][0]["text"].startswith("".join(scores["tokens"][:4]))), (sorted(offsets), True))
        # Each prompt and choice has its own scores; a slot that holds the prompt changes nothing.
        text = "assistant the user said"
        whole = ask(prompt=text, max_tokens=0, echo=True)
        parts = [c["logprobs"] for c in ask(prompt=[text, text + " no"], n=2, max_tokens=0, echo=True)["choices"]]
        self.assertEqual((whole["choices"][0]["text"], whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]), (text, "length", 0))
        self.assertEqual("".join(whole["choices"][0]["logprobs"]["tokens"]), text)
        self.assertEqual([parts[0], parts[1]], [whole["choices"][0]["logprobs"]] * 2)
        self.assertEqual(parts[2], parts[3])
        self.assertGreater(len(parts[2]["tokens"]), len(parts[0]["tokens"]))
        for score, top in list(zip(parts[0]["token_logprobs"], parts[0]["top_logprobs"]))[1:]:
            self.assertLessEqual(score, max(top.values()) + 1e-9)
        for n in range(1, 4):  # as sampled after all earlier tokens
            one = ask(prompt=prompt[:n], max_tokens=1, logit_bias={str(prompt[n]): 100})["choices"][0]["logprobs"]
            self.assertAlmostEqual(one["token_logprobs"][0], scores["token_logprobs"][n], delta=1e-4)
        self.assertEqual(ask(prompt=text, max_tokens=3, echo=True, logprobs=None, logit_bias=ENDLESS)["choices"][0]["text"][: len(text)], text)
        streamed = self.server.request("POST", "/v1/completions", dict(prompt=text, max_tokens=0, echo=True, logprobs=2, stream=True))[1]
        self.assertEqual(json.loads(streamed.split("data: ")[1])["choices"][0]["logprobs"], parts[0])
        for bad in (dict(max_tokens=0), dict(echo=1)):
            self.assertEqual(self.server.request("POST", "/v1/completions", dict(prompt="a") | bad)[0], 400)

    def test_addresses_and_methods(self):
        for status, method, path, body in ((404, "GET", "/v1/none", None), (404, "GET", "//v1/models", None), (405, "GET", "/v1/completions", None), (405, "POST", "/health", "{}"),
                                           (404, "GET", "/v1/../health", None), (400, "POST", "/v1/completions", ""), (400, "POST", "/v1/completions", "[]"), (200, "GET", "/v1/models", None)):
            with self.subTest(path=path):
                got = self.server.request(method, path, body)
                self.assertEqual(got[0], status, got[1])
                if status != 200:
                    self.assertEqual(set(json.loads(got[1])["error"]), {"message", "type", "param", "code"})
        for path, meant in (("/chat/completions", "/v1/chat/completions"), ("/models", "/v1/models"), ("/v1/v1/messages", "/v1/messages"), ("/v1/responses/resp_1", "POST /v1/responses"), ("/v1/v1/none", None)):
            message = json.loads(self.server.request("POST", path, "{}")[1])["error"]["message"]
            self.assertRegex(message, rf"\Afound no such address, expected {meant}: " if meant else r"\Afound no such address, expected one of /health, .*/v1/chat/completions, ")
        refused = self.server.request("POST", "/v1/completions", "prompt=a", {"Content-Type": "application/x-www-form-urlencoded"})[1]
        self.assertIn("found the Content-Type application/x-www-form-urlencoded, expected the header Content-Type: application/json", refused)

    def test_bodies_are_json_and_bounded(self):
        for status, headers in ((415, {"Content-Type": "text/plain"}), (415, {"Content-Encoding": "gzip"}), (200, {"Content-Type": "application/json; charset=utf-8"})):
            self.assertEqual(self.server.request("POST", "/v1/completions", '{"prompt": "a", "max_tokens": 1}', headers)[0], status)
        large = b'{"prompt": "' + b"x" * (5 << 20) + b'"}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.assertIn(b" 413 ", self.server.raw(head + b"Content-Length: %d\r\n\r\n" % len(large))[:20])
        chunks = b"".join(b"10000\r\n" + large[i : i + 65536].ljust(65536) + b"\r\n" for i in range(0, len(large), 65536)) + b"0\r\n\r\n"
        self.assertIn(b" 413 ", self.server.raw(head + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks)[:20])
        self.assertEqual(self.server.request("GET", "/health")[0], 200)

    def test_requests_that_two_servers_could_read_in_two_ways_are_refused_and_the_connection_closes(self):
        body = b'{"prompt": "a", "max_tokens": 1}'
        n = len(body)
        for bad in (b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n" % n, b"Content-Length: %d\r\nContent-Length: 1\r\n" % n, b"Content-Length: +%d\r\n" % n,
                    b"Content-Length: %d, %d\r\n" % (n, n), b"Transfer-Encoding: chunked, identity\r\n", b"Transfer-Encoding: gzip\r\n", b"Host: other\r\nContent-Length: %d\r\n" % n,
                    b"Content-Length: -1\r\n", b"Content-Length: 0x10\r\n"):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            started = time.monotonic()
            back = self.server.raw(head + bad + b"\r\n" + body)
            self.assertLess(time.monotonic() - started, 8, bad)  # closed, not left open
            self.assertEqual(set(re.findall(rb"HTTP/1.1 (\d+)", back)), {b"400"}, bad)
        self.assertIn(b" 400 ", self.server.raw(b"GET /health HTTP/1.1\r\n\r\n")[:20])

    def test_garbage_and_floods_of_headers_end_the_connection(self):
        for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", os.urandom(4096) + b"\r\n\r\n", b"GET /" + b"a" * 70000,
                     b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70000, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 10000):
            self.assertNotIn(b" 200 ", self.server.raw(data, end=True)[:40], data[:20])
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        for chunk in (b"-2\r\nab\r\n", b"0x2\r\nab\r\n", b"+2\r\nab\r\n", b"1" * 17 + b"\r\nab\r\n", b"zz\r\nab\r\n", b"\r\n"):
            self.assertNotIn(b" 200 ", self.server.raw(head + chunk, end=True)[:20], chunk)
        self.assertEqual(self.server.request("GET", "/health")[0], 200)

    def test_an_unknown_host_name_is_refused(self):
        for status, host in ((200, "localhost:1"), (200, "127.0.0.1"), (200, "[::1]:80"), (200, "model.example"), (200, "MODEL.example:99"), (403, "evil.example"), (403, "localhost.evil.example")):
            self.assertEqual(self.server.request("GET", "/v1/models", host=host)[0], status, host)

    def test_pages_of_other_origins_may_send_requests_only_if_allowed(self):
        for status, origin, named in ((200, "https://friend.example", "https://friend.example"), (403, "https://evil.example", None), (403, "null", None), (200, "http://localhost:9", None)):
            got = self.server.request("GET", "/v1/models", headers={"Origin": origin}, host="localhost:9")
            self.assertEqual((got[0], got[2]["Access-Control-Allow-Origin"]), (status, named))
        status, _, headers = self.server.request("OPTIONS", "/v1/chat/completions", headers={"Origin": "https://friend.example"})
        self.assertEqual((status, headers["Access-Control-Allow-Headers"], headers["Access-Control-Allow-Private-Network"]), (204, "Authorization, Content-Type", None))

    def test_a_preflight_of_an_allowed_origin_allows_the_headers_it_asks_for(self):
        asked = "authorization,content-type, x-stainless-os,x-stainless-retry-count"
        ask = lambda origin, names: self.server.request("OPTIONS", "/v1/chat/completions", headers={"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": names, "Access-Control-Request-Private-Network": "true"})
        status, _, headers = ask("https://friend.example", asked)
        self.assertEqual((status, headers["Access-Control-Allow-Headers"], headers["Access-Control-Allow-Private-Network"]), (204, asked, "true"))
        self.assertEqual(ask("https://friend.example", "a<b>, \u00e9")[2]["Access-Control-Allow-Headers"], "Authorization, Content-Type")  # no names of headers
        status, _, headers = ask("https://evil.example", asked)
        self.assertEqual((status, headers["Access-Control-Allow-Headers"]), (403, None))

    def test_an_answer_ends_when_its_client_has_gone(self):
        aborted = self.server.metric('request_success_total{finished_reason="abort"}')
        long = dict(prompt="a", max_tokens=59000, logit_bias=ENDLESS)
        s = self.server.stream(long)
        self.server.until("num_requests_running", 1)
        s.close()
        self.server.until("num_requests_running", 0, 10)
        text = json.dumps(long)
        s = socket.create_connection(("127.0.0.1", self.server.port))
        s.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        self.server.until("num_requests_running", 1)
        s.close()
        self.server.until("num_requests_running", 0, 10)
        self.assertEqual(self.server.metric('request_success_total{finished_reason="abort"}'), aborted + 2)

    def test_a_client_that_closes_one_direction_gets_the_stream(self):
        s = self.server.stream(dict(prompt="a", max_tokens=300, logit_bias=ENDLESS))
        s.shutdown(socket.SHUT_WR)
        back = b""
        while b"[DONE]" not in back:
            part = s.recv(65536)
            self.assertTrue(part, back[-200:])
            back += part
        s.close()

    @unittest.skipUnless(shutil.which("curl"), "no curl")
    def test_curl_reads_events(self):
        url = f"http://127.0.0.1:{self.server.port}/v1/completions"
        body = json.dumps(dict(prompt="a", max_tokens=5, stream=True, logit_bias=ENDLESS))
        run = subprocess.run(["curl", "-sN", url, "-H", "Content-Type: application/json", "-d", body], capture_output=True, timeout=60)
        events = run.stdout.decode().split("\n\n")
        self.assertEqual(events[-2:], ["data: [DONE]", ""])
        for event in events[:-2]:
            self.assertEqual(json.loads(event.removeprefix("data: "))["object"], "text_completion")


if __name__ == "__main__":
    unittest.main()
