"""ingot.engine against the program, on a random GPT-OSS with a Harmony vocabulary. engine_test.py PROGRAM; status 77 where PyTorch or the
package is missing."""
import contextlib
import importlib.util
import io
import json
import pathlib
import re
import sys
import threading
import unittest

if any(importlib.util.find_spec(name) is None for name in ("torch", "ingot")):
    print(f"skipped: {sys.executable} has no torch, or no ingot")
    sys.exit(77)

import cli_gpt_oss_test
import serve_test
from program import TEXT, TINY
from program import ingot as program
from tiny_checkpoints import write_draft_head, write_qwen3

import ingot.engine

GOLDENS = pathlib.Path(__file__).parent / "data/chat_formats/prompts.json"
PAGE = pathlib.Path(__file__).parent.parent / "docs/engine.md"
CONTROLS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<s>", "</s>",
            "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]",
            "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
WEATHER = {"name": "weather", "description": "The weather in a city.", "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}
GREEDY = dict(temperature=0, max_tokens=30, date="")


def setUpModule():
    global MODEL, gpt_oss
    MODEL = cli_gpt_oss_test.Chat("test_piped_turns_are_answered_and_known_tokens_are_used_again")
    MODEL.setUp()
    serve_test.WITHOUT = "without libmicrohttpd" in program("serve", "none", "--port", 0).error
    gpt_oss = ingot.engine.Model(MODEL.model, device="cpu")


def tearDownModule():
    MODEL.doCleanups()


def of_program(*more):
    run = program("generate", "--model", MODEL.model, "--json", "--device", "cpu", *more, *([] if "--raw" in more else ["--date", "none"]))
    assert run.returncode == 0, run.error
    return json.loads(run.text)


class OtherModels(unittest.TestCase):
    """A random Qwen3 with its vocabulary, a run of `ingot train`, and directories without a model."""

    def qwen3(self, name, start_token=None):
        directory = write_qwen3(MODEL.directory / name, 320)
        specials = [word for token in ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
                    for word in ("--special", token)]
        run = program("tokenizer", "train", "--data", MODEL.file("qwen3.txt", "user assistant system\n" * 3), "--vocab", 320, "--out", directory / "tokenizer.json", *specials)
        self.assertEqual(run.returncode, 0, run.error)
        if start_token:
            path = directory / "tokenizer.json"
            ids = [{"SpecialToken": {"id": start_token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
            path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": {"type": "TemplateProcessing", "single": ids, "pair": ids, "special_tokens": {}}}))
        return directory

    def of_program(self, model, *more):
        run = program("generate", "--model", model, "--json", "--device", "cpu", "--prompt", "Hi.", "--tokens", 12, "--temperature", 0, *more)
        self.assertEqual(run.returncode, 0, run.error)
        return json.loads(run.text)

    def test_the_chat_format_and_its_efforts_are_those_of_the_program(self):
        model = self.qwen3("qwen3")
        with self.assertRaisesRegex(NotImplementedError, r"^engine: found no chat template, expected chat_format=NAME \(harmony, .*\), or raw=True to continue the prompt as it is$"):
            ingot.engine.Model(model, device="cpu").generate("Hi.")
        chat = ingot.engine.Model(model, device="cpu", chat_format="qwen3")
        self.assertEqual((chat.efforts, gpt_oss.efforts), (("none", "medium"), ("low", "medium", "high")))
        prompts = set()
        for effort in ("none", "medium", "high"):  # no known format has all efforts: the nearest counts
            want = self.of_program(model, "--chat-format", "qwen3", "--reasoning", effort, "--date", "none")
            got = chat.generate("Hi.", reasoning=effort, max_tokens=12, temperature=0, date="")
            self.assertEqual((got.ids, got.prompt_tokens), (want["ids"], want["prompt_tokens"]))
            prompts.add(got.prompt_tokens)
        self.assertEqual(len(prompts), 2)
        for words in (["generate", "--prompt", "Hi."], ["chat"], ["serve", "--port", 0]):
            refused = program(*words, "--model", model, "--device", "cpu", "--chat-format", "qwen3", "--date", "2026-01-31", stdin=b"")
            self.assertEqual(refused.returncode, 2, refused.error)
            self.assertIn("found --date, which changes nothing with the chat format qwen3, whose prompts have no date", refused.error)
        with self.assertRaisesRegex(ValueError, "engine: reasoning: found 'much', expected 'none' or 'medium'$"):
            chat.generate("Hi.", reasoning="much")
        with self.assertRaisesRegex(ValueError, "engine: chat_format: found 'qwen9', expected None, 'harmony', 'chatml', .* or 'gemma3'$"):
            ingot.engine.Model(model, device="cpu", chat_format="qwen9")
        with self.assertRaisesRegex(ValueError, 'found "qwen3", expected harmony for GPT-OSS'):
            ingot.engine.Model(MODEL.model, device="cpu", chat_format="qwen3")

    def test_a_text_begins_with_the_start_token_as_in_the_program(self):
        for name, token, start in (("starts", "<|im_start|>", 0), ("starts-not", None, None)):
            model = self.qwen3(name, token)
            want = self.of_program(model, "--raw")
            opened = ingot.engine.Model(model, device="cpu")
            got = opened.generate("Hi.", raw=True, max_tokens=12, temperature=0)
            self.assertEqual((opened.start, got.ids, got.prompt_tokens), (start, want["ids"], len(opened.encode("Hi.")) + (token is not None)))
            self.assertEqual(opened.generate([*([start] if token else []), *opened.encode("Hi.")], raw=True, max_tokens=12, temperature=0).ids, got.ids)

    def test_a_run_with_a_vocabulary_of_characters_continues_texts(self):
        run_directory = MODEL.directory / "run"
        run = program("train", *TINY, "--set", "train.tokenizer=char", "--data", MODEL.file("text.txt", TEXT), "--out", run_directory, "--steps", 2)
        self.assertEqual(run.returncode, 0, run.error)
        run = program("generate", run_directory, "--prompt", "The ", "--tokens", 12, "--temperature", 0, "--json", "--device", "cpu")
        self.assertEqual(run.returncode, 0, run.error)
        opened = ingot.engine.Model(run_directory, device="cpu")
        got = opened.generate("The ", raw=True, max_tokens=12, temperature=0)
        self.assertEqual(got.text, json.loads(run.text)["text"])
        self.assertEqual(opened.decode(opened.encode("The ")), "The ")
        with self.assertRaisesRegex(ValueError, "^engine: text to encode: byte 0: found the character"):
            opened.generate("\u65e5", raw=True)
        with self.assertRaisesRegex(NotImplementedError, "^engine: found a tokenizer without the control tokens of a chat format .*, expected one that has them, or raw=True$"):
            opened.generate("The ")

    def test_a_directory_without_a_model_is_refused_by_that_reason(self):
        for name in ("docs", "docs/deep"):
            empty = MODEL.directory / name
            empty.mkdir()
            with self.assertRaisesRegex(FileNotFoundError, f"^{empty}: found no checkpoint, expected "):
                ingot.engine.Model(empty, device="cpu")

    def test_a_model_without_a_tokenizer_is_refused_by_the_name_of_the_argument(self):
        model = write_qwen3(MODEL.directory / "untokenized", 320)
        with self.assertRaisesRegex(FileNotFoundError, "found a model without a tokenizer, expected a tokenizer.json .* beside the weights, or tokenizer=FILE$"):
            ingot.engine.Model(model, device="cpu")

    def test_matrices_of_a_checkpoint_are_converted_at_loading(self):
        model = ingot.engine.Model(MODEL.model, device="cpu", dense="fp8")
        self.assertIn("dense matrices became fp8 at loading", model.note)
        self.assertNotEqual(model.weight_bytes, ingot.engine.Model(MODEL.model, device="cpu").weight_bytes)
        self.assertRegex(repr(model), r"^Model\('.*', device='cpu', context=\d+\)$")
        with self.assertRaisesRegex(ValueError, "engine: dense: found 'int8', expected None, 'bf16', 'fp8' or 'mxfp4'"):
            ingot.engine.Model(MODEL.model, device="cpu", dense="int8")

    def test_a_closed_model_is_refused_and_its_memory_is_free(self):
        with ingot.engine.Model(MODEL.model, device="cpu") as model:
            self.assertEqual(len(model.generate("Hi.", max_tokens=2, date="").ids), 2)
            engine = model._engine
        self.assertLessEqual(sys.getrefcount(engine), 2)  # of `engine` and of this call: nothing else holds the memory
        for call in (lambda: model.generate("Hi."), lambda: model.encode("Hi."), lambda: next(model.stream("Hi."))):
            with self.assertRaisesRegex(ValueError, "^engine: found a model that was closed, expected an open one$"):
                call()

    def test_the_class_keeps_its_earlier_name(self):
        self.assertIs(ingot.engine.GptOss, ingot.engine.Model)


class Engine(unittest.TestCase):
    def test_an_answer_equals_generate_s(self):
        for seed, more in ((1, {}), (5, dict(top_k=20, min_p=0.01, temperature=0.8)), (6, dict(top_p=0.9, temperature=1.3))):
            options = [word for key, value in more.items() for word in ("--" + key.replace("_", "-"), value)]
            want = of_program("--prompt", "Hi \u65e5.", "--tokens", 40, "--seed", seed, *options)
            got = gpt_oss.generate("Hi \u65e5.", max_tokens=40, seed=seed, date="", **more)
            self.assertEqual((got.ids, got.prompt_tokens), (want["ids"], want["prompt_tokens"]))
            self.assertEqual(got.text, "".join(m["content"] for m in want["messages"] if m["channel"] in ("final", "")))
            self.assertEqual(got.thoughts, "".join(m["content"] for m in want["messages"] if m.get("channel") == "analysis"))

    def test_raw_text_and_ids_are_continued(self):
        want = of_program("--raw", "--prompt", "assistant user", "--tokens", 30, "--temperature", 0)
        got = gpt_oss.generate("assistant user", raw=True, **GREEDY)
        self.assertEqual((got.ids, got.text, got.finish), (want["ids"], want["text"], want["finish"]))
        self.assertEqual(gpt_oss.generate(gpt_oss.encode("assistant user"), raw=True, **GREEDY).ids, got.ids)
        self.assertEqual(gpt_oss.decode(gpt_oss.encode("a \u65e5 <|end|>")), "a \u65e5 <|end|>")

    def test_quant_equals_the_program_s(self):
        want = of_program("--raw", "--prompt", "assistant user", "--tokens", 30, "--temperature", 0, "--quant")
        rounded = ingot.engine.Model(MODEL.model, device="cpu", quant=True)
        got = rounded.generate("assistant user", raw=True, logprobs=0, **GREEDY)
        self.assertEqual((got.ids, got.text), (want["ids"], want["text"]))
        plain = gpt_oss.generate("assistant user", raw=True, logprobs=0, **GREEDY)
        self.assertNotEqual([p for p, _ in got.logprobs], [p for p, _ in plain.logprobs])

    def test_drafts_change_no_answer(self):
        drafting = ingot.engine.Model(MODEL.model, device="cpu", draft="lookup", draft_max=5)
        for seed, temperature in ((1, 0), (2, 0.7), (3, 1)):
            options = dict(raw=True, max_tokens=60, seed=seed, temperature=temperature, past_end=True)
            want, got = gpt_oss.generate("assistant user", **options), drafting.generate("assistant user", **options)
            self.assertEqual((got.ids, got.text, got.finish), (want.ids, want.text, want.finish))
            self.assertEqual(want.drafted_tokens, 0)
            self.assertLessEqual(got.accepted_tokens, got.drafted_tokens)
        with self.assertRaisesRegex(ValueError, "draft: found 'tree', expected 'none', 'lookup' or the directory of a draft head"):
            ingot.engine.Model(MODEL.model, device="cpu", draft="tree")

    def test_flags_that_are_no_bools_are_refused_by_their_names(self):
        for options, message in ((dict(quant="no"), "quant: found 'no', expected a bool"), (dict(draft_exact=0), "draft_exact: found 0, expected a bool")):
            with self.assertRaisesRegex(ValueError, f"^engine: {message}$"):
                ingot.engine.Model(MODEL.model, device="cpu", **options)
        with self.assertRaisesRegex(ValueError, "^engine: thoughts: found 'no', expected a bool$"):
            next(gpt_oss.stream("Hi.", thoughts="no", **GREEDY))

    def test_options_of_drafts_that_would_have_no_effect_are_refused(self):
        for options, message in ((dict(draft="lookup", draft_layers=(1, 2)), r"draft_layers: found \(1, 2\), expected \(\) without a draft head"),
                                 (dict(draft="lookup", draft_window=100), "draft_window: found 100, expected 0 without a draft head"),
                                 (dict(draft_layers=[1]), r"draft_layers: found \[1\], expected \(\) without a draft head"),
                                 (dict(draft_exact=True), "draft_exact: found True, expected False without drafts"),
                                 (dict(draft_costs=(100, 110)), r"draft_costs: found \(100, 110\), expected \(\) without drafts"),
                                 (dict(draft="lookup", draft_max=8), "draft_max: found 8, expected 1 to 7"),
                                 (dict(draft="lookup", draft_costs=(100,)), r"draft_costs: found \(100,\), expected positive times of steps of 1, 2 and more tokens"),
                                 (dict(draft="lookup", draft_costs=(100, -1)), r"draft_costs: found \(100, -1\), expected positive times"),
                                 (dict(draft="lookup", draft_costs="100,110"), "draft_costs: found '100,110', expected a list of numbers"),
                                 (dict(draft="lookup", draft_costs=(1, "a")), "draft_costs: found 'a', expected a number")):
            with self.assertRaisesRegex(ValueError, f"^engine: {message}"):
                ingot.engine.Model(MODEL.model, device="cpu", **options)

    def test_costs_of_steps_determine_the_drafts(self):
        options = dict(raw=True, max_tokens=200, temperature=0, past_end=True)
        prompt = "assistant user assistant user assistant user"
        cheap, dear = (ingot.engine.Model(MODEL.model, device="cpu", draft="lookup", draft_costs=costs).generate(prompt, **options)
                       for costs in ((100, 101, 102, 103), [1, 1e6, 1e6, 1e6]))
        self.assertEqual(cheap.ids, dear.ids)
        self.assertGreater(cheap.drafted_tokens, 3 * dear.drafted_tokens)  # dear drafts are tried once in a while

    def test_the_speed_of_an_answer_counts_the_tokens_after_the_first(self):
        answer = gpt_oss.generate("assistant user", raw=True, **GREEDY)
        self.assertAlmostEqual(answer.tokens_per_second, (len(answer.ids) - 1) / answer.token_seconds)
        one = gpt_oss.generate("assistant user", raw=True, temperature=0, max_tokens=1)
        self.assertEqual((len(one.ids), one.tokens_per_second), (1, 0.0))

    def test_a_draft_head_changes_no_answer(self):
        head = write_draft_head(MODEL.directory / "head", MODEL.VOCAB, MODEL.HIDDEN, [0, 1, 2])
        drafting = ingot.engine.Model(MODEL.model, device="cpu", draft=head, draft_max=4, draft_layers=(1, 2, 0), draft_window=100)
        self.assertIn("behind layers 1, 2, 0", drafting.note)
        for seed, temperature in ((1, 0), (2, 1)):
            options = dict(raw=True, max_tokens=60, seed=seed, temperature=temperature, past_end=True)
            want, got = gpt_oss.generate("assistant user", **options), drafting.generate("assistant user", **options)
            self.assertEqual((got.ids, got.text, got.finish), (want.ids, want.text, want.finish))
        with self.assertRaisesRegex(RuntimeError, "draft_layers: found 3, expected different numbers from 0 to 2"):
            ingot.engine.Model(MODEL.model, device="cpu", draft=head, draft_layers=(0, 1, 3))
        narrow = ingot.engine.Model(MODEL.model, device="cpu", draft=head, draft_dense="fp8", draft_exact=True)
        self.assertIn(", in fp8", narrow.note)
        self.assertEqual(narrow.generate("assistant user", **options).ids, want.ids)
        for dense, error in (("fp6", "draft_dense: found 'fp6', expected None, 'bf16', 'fp8' or 'mxfp4'"), ("fp8", "draft_dense: found 'fp8', expected None without a draft head")):
            with self.assertRaisesRegex(ValueError, error):
                ingot.engine.Model(MODEL.model, device="cpu", draft="lookup", draft_dense=dense)

    def test_auto_takes_the_gpu_and_streams_from_it(self):
        gpu = ingot.engine.Model(MODEL.model)
        if not gpu.device.startswith("cuda"):
            self.skipTest(gpu.note or "no GPU")
        prompt = gpt_oss.encode("assistant user")
        answer = gpu.generate(prompt, raw=True, logprobs=2, **GREEDY)
        self.assertEqual("".join(ingot.engine.Model(MODEL.model).stream(prompt, raw=True, **GREEDY)), answer.text)
        drawn = [ingot.engine.Model(MODEL.model).generate(prompt, raw=True, max_tokens=20, seed=3, date="").ids for _ in range(2)]
        self.assertEqual(drawn[0], drawn[1])
        # The same model as the CPU's: roundings to bf16 leave a part in 2^8 of logits of some size 10.
        cpu = gpt_oss.generate(prompt, raw=True, logprobs=2, temperature=0, max_tokens=1, date="")
        self.assertAlmostEqual(answer.logprobs[0][0], cpu.logprobs[0][0], delta=10 / 256)

    def test_a_conversation_has_turns_and_reuses_the_tokens_of_earlier_turns(self):
        first = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
        self.assertEqual(gpt_oss.generate(first, **GREEDY).ids, of_program("--prompt", "Hi.", "--developer", "Be brief.", "--tokens", 30, "--temperature", 0)["ids"])
        more = first + [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Bye."}]
        self.assertGreater(gpt_oss.generate(more, **GREEDY).reused_tokens, 10)

    def test_a_stream_has_the_text_of_generate_and_ends_when_the_loop_is_left(self):
        whole = gpt_oss.generate("Hi.", max_tokens=60, seed=3, date="")
        pieces = list(gpt_oss.stream("Hi.", thoughts=True, max_tokens=60, seed=3, date=""))
        self.assertEqual("".join(t for c, t in pieces if c in ("final", "")), whole.text)
        self.assertEqual("".join(t for c, t in pieces if c == "analysis"), whole.thoughts)
        raw = gpt_oss.generate("user", raw=True, past_end=True, max_tokens=400, seed=2)
        stream = gpt_oss.stream("user", raw=True, past_end=True, max_tokens=100_000, seed=2)
        self.assertTrue(raw.text.startswith(next(stream)))
        stream.close()  # and the model is free
        self.assertEqual(gpt_oss.generate("user", raw=True, past_end=True, max_tokens=400, seed=2).ids, raw.ids)

    def test_an_answer_without_headers_is_all_text(self):
        for seed in range(1, 40):
            answer = gpt_oss.generate("Hi.", max_tokens=4, seed=seed, date="")
            if [m[:2] for m in answer.messages] == [("", "")] and len(answer.text) > 2:
                break
        else:
            self.fail("found no answer without headers")
        printed = program("generate", "--model", MODEL.model, "--device", "cpu", "--date", "none", "--prompt", "Hi.", "--tokens", 4, "--seed", seed)
        self.assertEqual(answer.text + "\n", printed.text)
        self.assertEqual("".join(gpt_oss.stream("Hi.", max_tokens=4, seed=seed, date="")), answer.text)
        heard = []
        got = gpt_oss.generate("Hi.", max_tokens=4, seed=seed, date="", stop=answer.text[-1] + "?", on_text=lambda *piece: heard.append(piece))
        self.assertEqual((got.text, heard[-1][0], "".join(text for _, text in heard)), (answer.text, "", answer.text))

    def test_a_stop_string_ends_the_text_before_it(self):
        whole = gpt_oss.generate("user", raw=True, past_end=True, max_tokens=100, seed=2)
        for at, length in ((20, 3), (35, 1), (10, 7)):
            stop, heard = whole.text[at:at + length], []
            got = gpt_oss.generate("user", raw=True, past_end=True, max_tokens=100, seed=2, stop=["never there", stop], on_text=lambda _, text: heard.append(text))
            self.assertEqual((got.text, got.finish), (whole.text[:whole.text.find(stop)], "stop"))
            self.assertEqual("".join(heard), got.text)
            self.assertLess(len(got.ids), len(whole.ids))

    def test_a_listener_that_returns_false_or_raises_ends_the_answer(self):
        options = dict(raw=True, past_end=True, max_tokens=100_000, seed=2)
        got = gpt_oss.generate("user", on_text=lambda *_: False, **options)
        self.assertEqual(got.finish, "cancelled")
        self.assertLess(len(got.ids), 10)
        with self.assertRaisesRegex(KeyError, "mine"):
            gpt_oss.generate("user", on_text=lambda *_: {}["mine"], **options)
        with self.assertRaisesRegex(RuntimeError, "found an answer under way, expected one at a time"):
            gpt_oss.generate("user", on_text=lambda *_: gpt_oss.generate("user", **options), **options)
        self.assertEqual(len(gpt_oss.generate("user", raw=True, **GREEDY).logprobs), 0)

    def test_logprobs_are_of_the_tokens(self):
        got = gpt_oss.generate("user", raw=True, logprobs=2, **GREEDY)
        self.assertEqual(len(got.logprobs), len(got.ids))
        for id_, (drawn, top) in zip(got.ids, got.logprobs):
            self.assertEqual((top[0][0], top[0][1]), (id_, drawn))  # greedy
            self.assertGreaterEqual(top[0][1], top[1][1])

    def test_another_thread_may_answer_while_python_goes_on(self):
        result = []
        thread = threading.Thread(target=lambda: result.append(gpt_oss.generate("Hi.", **GREEDY)))
        thread.start()
        thread.join()
        self.assertEqual(result[0].ids, gpt_oss.generate("Hi.", **GREEDY).ids)

    def test_wrong_arguments_are_refused_in_one_line_and_lose_nothing(self):
        want = gpt_oss.generate("Hi.", **GREEDY).ids
        for error, message, call in (
                (ValueError, r'engine: prompt\[0\]\.role: found string "robot", expected one of user, system, developer, assistant, tool', dict(prompt=[{"role": "robot", "content": ""}])),
                (ValueError, "found temperature -1", dict(prompt="Hi.", temperature=-1)),
                (ValueError, "prompt: found id 100000 at place 1, expected 0 to 339", dict(prompt=[1, 100000], raw=True)),
                (ValueError, "prompt: found id -1 at place 0, expected 0 to 339", dict(prompt=[-1], raw=True)),
                (ValueError, "engine: prompt: found 1099511627776, expected", dict(prompt=[2**40], raw=True)),
                (ValueError, "engine: prompt: found 'NoneType', expected a list of ids", dict(prompt=None, raw=True)),
                (ValueError, r"engine: prompt: found \[\], expected at least one token", dict(prompt=[], raw=True)),
                (ValueError, "engine: prompt: found 'int', expected text or a list of messages", dict(prompt=5)),
                (ValueError, r"engine: prompt\[0\].content: it is missing", dict(prompt=[{"role": "user"}])),
                (ValueError, r"engine: prompt\[0\].content: it is missing", dict(prompt=[{"role": "user", "content": None}])),
                (ValueError, r"engine: prompt\[0\].content: found number 5, expected a string or a list of parts", dict(prompt=[{"role": "user", "content": 5}])),
                (ValueError, r"engine: prompt\[0\].contents: an unknown field \(did you mean content\?\)", dict(prompt=[{"role": "user", "content": "", "contents": ""}])),
                (ValueError, r"engine: prompt: found .*, expected a list of at least one message", dict(prompt=[])),
                (ValueError, r"engine: prompt\[0\]: found .*, expected an object", dict(prompt=["Hi."])),
                (ValueError, r"engine: prompt: found a value that JSON cannot hold \(.*bytes.*\), expected dicts", dict(prompt=[{"role": "user", "content": b""}])),
                (ValueError, r"engine: prompt: found '\\ud800', expected text that UTF-8 can hold", dict(prompt=[{"role": "user", "content": "a \ud800"}])),
                (ValueError, r"engine: prompt: found '\\ud800', expected text that UTF-8 can hold", dict(prompt="a \ud800")),
                (ValueError, "engine: seed: found -1, expected 0 to", dict(prompt="Hi.", seed=-1)),
                (ValueError, "engine: max_tokens: found 1.5, expected an integer", dict(prompt="Hi.", max_tokens=1.5)),
                (ValueError, "engine: top_p: found 'x', expected a number", dict(prompt="Hi.", top_p="x")),
                (ValueError, "engine: reasoning: found 'much', expected 'low', 'medium' or 'high'", dict(prompt="Hi.", reasoning="much")),
                (ValueError, "engine: date: found '2026-02-30', expected one like", dict(prompt="Hi.", date="2026-02-30")),
                (ValueError, "engine: stop: found 'int', expected text", dict(prompt="Hi.", stop=[5])),
                (ValueError, "engine: stop: found 5, expected text or a list of texts", dict(prompt="Hi.", stop=5)),
                (ValueError, "engine: on_text: found 5, expected a function or None", dict(prompt="Hi.", on_text=5)),
                (ValueError, "engine: system: found 'int', expected text", dict(prompt="Hi.", system=5)),
                (ValueError, "engine: raw: found 'no', expected a bool", dict(prompt="Hi.", raw="no")),
                (ValueError, "engine: past_end: found 1, expected a bool", dict(prompt="Hi.", past_end=1)),
                (ValueError, "engine: found a conversation of 800173 tokens, expected fewer than 131072, the context", dict(prompt="Hi. " * 200_000))):
            with self.assertRaisesRegex(error, message) as raised:
                gpt_oss.generate(**(GREEDY | call))
            self.assertNotIn("\n", str(raised.exception))
        self.assertEqual(gpt_oss.generate("Hi.", **GREEDY).ids, want)
        with self.assertRaisesRegex(FileNotFoundError, "no such"):
            ingot.engine.Model(MODEL.directory / "nothing")
        for path in (None, 5):
            with self.assertRaisesRegex(ValueError, f"^engine: path: found {path}, expected a path$"):
                ingot.engine.Model(path)
        with self.assertRaisesRegex(ValueError, "^engine: tokenizer: found 5, expected a path$"):
            ingot.engine.Model(MODEL.model, tokenizer=5)
        for message, options in (("device: found 'tpu', expected 'auto', 'cpu' or 'cuda'", dict(device="tpu")), ("context: found -1, expected 0 to", dict(context=-1)),
                                 ("found 1000000 tokens, expected at most 131072", dict(context=1_000_000))):
            with self.assertRaisesRegex(ValueError, message) as raised:
                ingot.engine.Model(MODEL.model, **options)
            self.assertNotIn("\n", str(raised.exception))
        for message, call in (("engine: ids: found 1099511627776, expected", lambda: gpt_oss.decode([2**40])), ("engine: ids: found 'NoneType'", lambda: gpt_oss.decode(None)),
                              ("engine: text: found 'NoneType', expected text", lambda: gpt_oss.encode(None))):
            self.assertRaisesRegex(ValueError, message, call)


class Vocabulary:
    """A model's texts in which control tokens stand as their names."""

    def __init__(self, model, directory):
        self.model = model
        added = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
        self.ids = {token["content"]: token["id"] for token in added}
        self.names = {id_: name for name, id_ in self.ids.items()}

    def shown(self, ids):
        return "".join(self.names[i] if i in self.names else self.model._engine.decode([i]).decode("latin-1") for i in ids).encode("latin-1").decode()

    def written(self, text):
        parts = re.split("(" + "|".join(map(re.escape, self.ids)) + ")", text)
        return [i for part in parts for i in ([self.ids[part]] if part in self.ids else self.model.encode(part))]


class Tools(unittest.TestCase):
    """Functions in every family's format, on random models with a vocabulary of bytes and all control tokens."""
    CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'

    @classmethod
    def setUpClass(cls):
        cls.directory = write_qwen3(MODEL.directory / "formats", 256 + len(CONTROLS))
        specials = [word for token in CONTROLS for word in ("--special", token)]
        run = program("tokenizer", "train", "--data", MODEL.file("bytes.txt", "a b c d"), "--vocab", 256 + len(CONTROLS), "--out", cls.directory / "tokenizer.json", *specials)
        assert run.returncode == 0, run.error
        cls.opened = {}
        # A model whose likeliest answer is one call, the text of which is a single token.
        names = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", cls.CALL]
        names += [name for name in CONTROLS if name not in names][:len(CONTROLS) - len(names)]
        ids = cls.ids_of_the_call = {name: i for i, name in enumerate(names)}
        source = json.loads((cls.directory / "tokenizer.json").read_text())
        follows = {source["model"]["vocab"]["\u010a"]: ids["<tool_call>"], ids["<tool_call>"]: ids[cls.CALL], ids[cls.CALL]: ids["</tool_call>"], ids["</tool_call>"]: ids["<|im_end|>"]}
        source["added_tokens"] = [dict(source["added_tokens"][0], id=id_, content=name, special=name != cls.CALL) for name, id_ in ids.items()]
        source["model"]["vocab"] = {token: id_ for token, id_ in source["model"]["vocab"].items() if token not in CONTROLS}
        cls.calling = write_qwen3(MODEL.directory / "calls", 256 + len(CONTROLS), follows=follows)
        (cls.calling / "tokenizer.json").write_text(json.dumps(source))

    def test_a_date_is_refused_where_prompts_have_none(self):
        dated = set()
        for name in ingot.engine._C.chat_formats():
            if name == "harmony":
                continue
            words = ("generate", "--model", self.directory, "--device", "cpu", "--chat-format", name, "--prompt", "Hi.", "--tokens", 1, "--date")
            self.assertEqual(program(*words, "none").returncode, 0)
            run = program(*words, "2026-01-31")
            if run.returncode == 0:
                dated.add(name)
            else:
                self.assertEqual(run.returncode, 2, run.error)
                self.assertIn(f"found --date, which changes nothing with the chat format {name}, whose prompts have no date", run.error)
        self.assertEqual(dated, {"llama3.1"})

    def of(self, chat_format):
        if chat_format == "harmony":
            return gpt_oss, Vocabulary(gpt_oss, MODEL.model)
        if chat_format not in self.opened:
            model = ingot.engine.Model(self.directory, device="cpu", chat_format=chat_format)
            self.opened[chat_format] = model, Vocabulary(model, self.directory)
        return self.opened[chat_format]

    def test_prompts_equal_the_published_templates(self):
        counts = {}
        for case in json.loads(GOLDENS.read_text()):
            if "default_system" in case:  # the published template adds a system text of its own, which these test models do not have
                continue
            messages, called = [], []
            for role, content, more in case["messages"]:
                message = {"role": role, "content": content}
                if "thoughts" in more:
                    message["reasoning_content"] = more["thoughts"]
                if "calls" in more:
                    message["content"] = content or None
                    message["tool_calls"] = [{"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": json.dumps(c["arguments"], ensure_ascii=False)}}
                                             for c in more["calls"]]
                if role == "tool":
                    message |= {"tool_call_id": more["call_id"]} if "call_id" in more else {"name": called.pop(0)}
                called += [c["name"] for c in more.get("calls", [])]
                messages.append(message)
            model, vocabulary = self.of(case["format"])
            for tools in (case["tools"], [{"type": "function", "function": tool} for tool in case["tools"]]):
                got = model.prompt_ids(messages, tools=tools, date="2026-01-31", **({"reasoning": case["effort"]} if case["effort"] else {}))
                self.assertEqual(vocabulary.shown(got), case["prompt"], (case["format"], case["title"]))
            counts[case["format"]] = counts.get(case["format"], 0) + bool(case["tools"])
            if case["tools"]:
                self.assertEqual(model.prompt_ids(messages, tools=case["tools"], tool_choice="none", date=""), model.prompt_ids(messages, date=""))
        for name in ("llama3.1", "qwen2.5", "qwen3", "mistral-v3", "mistral-v3-tekken", "mistral-v7", "mistral-v7-tekken"):
            self.assertGreaterEqual(counts[name], 4, name)

    def test_prompts_and_answers_equal_the_server_s(self):
        if serve_test.WITHOUT:
            self.skipTest("built without libmicrohttpd")
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Weather "}, {"type": "text", "text": "in \u65e5\u672c?"}]},
                    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
                        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "\u65e5\u672c"}'}}]},
                    {"role": "tool", "tool_call_id": "call_1", "content": "warm"}]
        tools = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]
        models = [(MODEL.model, gpt_oss, (), 1), *[(self.directory, self.of(name)[0], ("--chat-format", name), 1) for name in ("qwen3", "llama3.1", "mistral-v3")],
                  (self.calling, ingot.engine.Model(self.calling, device="cpu", chat_format="qwen3"), ("--chat-format", "qwen3"), 0)]
        for directory, model, options, temperature in models:
            server = serve_test.Server("--date", "none", "--device", "cpu", *options, model=directory)
            try:
                body = dict(messages=messages, tools=tools, reasoning_effort="medium")
                status, text, _ = server.request("POST", "/tokenize", body)
                self.assertEqual((status, json.loads(text)["tokens"]), (200, model.prompt_ids(messages, tools=tools, date="")))
                for seed in range(1, 9 if temperature else 2):
                    status, text, _ = server.request("POST", "/v1/chat/completions", body | dict(seed=seed, max_tokens=40, temperature=temperature))
                    self.assertEqual(status, 200, text)
                    want = json.loads(text)["choices"][0]["message"]
                    got = model.generate(messages, tools=tools, date="", seed=seed, max_tokens=40, temperature=temperature)
                    self.assertEqual((got.message["content"] or "", got.thoughts), (want["content"] or "", want.get("reasoning_content") or ""))
                    self.assertEqual([(c.name, c.arguments) for c in got.calls], [(c["function"]["name"], c["function"]["arguments"]) for c in want.get("tool_calls") or []])
                    parsed = model.parse(got.ids, tools=tools)
                    self.assertEqual((parsed.messages, parsed.text, parsed.thoughts), (got.messages, got.text, got.thoughts))
                    if temperature == 0:
                        self.assertEqual(len(got.calls), 1)
            finally:
                server.stop()

    def test_the_calls_of_an_answer_are_parsed_and_go_back_with_their_results(self):
        paris, rome = '{"city": "Paris"}', '{"city": "Rome", "days": 2}'
        question, result = {"role": "user", "content": "Weather?"}, {"role": "tool", "content": "warm"}
        for chat_format, answer, thoughts, text, calls, rest in (
                ("qwen3", f'<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{{"name": "weather", "arguments": {paris}}}\n</tool_call>\n<tool_call>\n{{"name": "weather", "arguments": {rome}}}\n</tool_call><|im_end|>',
                 "hm", "I look.", [("call_0", "weather", paris), ("call_1", "weather", rome)],
                 "\n<|im_start|>user\n<tool_response>\nwarm\n</tool_response>\n<tool_response>\nwarm\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
                ("llama3.1", f'{{"name": "weather", "parameters": {paris}}}<|eot_id|>', "", "", [("call_0", "weather", paris)],
                 '<|start_header_id|>ipython<|end_header_id|>\n\n"warm"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'),
                ("mistral-v3", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {paris}, "id": "a1B2c3D4e"}}]</s>', "", "", [("a1B2c3D4e", "weather", paris)],
                 '[TOOL_RESULTS] {"content": "warm", "call_id": "a1B2c3D4e"}[/TOOL_RESULTS]'),
                ("mistral-v7-tekken", f'[TOOL_CALLS][{{"name": "weather", "arguments": {paris}, "id": "a1B2c3D4e"}}]</s>', "", "", [("a1B2c3D4e", "weather", paris)],
                 "[TOOL_RESULTS]a1B2c3D4e[TOOL_CONTENT]warm[/TOOL_RESULTS]"),
                ("harmony", f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.weather<|channel|>commentary "
                 f"<|constrain|>json<|message|>{paris}<|call|>", "hm", "", [("call_0", "weather", paris)],
                 "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>warm<|end|><|start|>assistant")):
            model, vocabulary = self.of(chat_format)
            got = model.parse(vocabulary.written(answer) + model.encode("never read"), tools=[WEATHER])
            self.assertEqual((got.thoughts, got.text, [(c.id, c.name, c.arguments) for c in got.calls], got.finish), (thoughts, text, calls, "stop"))
            self.assertEqual([(c.channel, c.name, c.arguments) for c in got.calls], [m for m in got.messages if m[1]])
            self.assertEqual((got.message["content"], len(got.message["tool_calls"])), ("I look." if "I look." in answer else None, len(calls)))
            self.assertEqual(vocabulary.shown(got.ids), answer[:answer.rindex("<" if answer.endswith(">") else "[")])
            self.assertEqual(model.parse(got.ids, tools=[WEATHER]).finish, "length")
            for by in ([{"tool_call_id": id_} for id_, _, _ in calls], [{"name": "weather"}] * len(calls)):
                messages = [question, got.message, *[result | more for more in by]]
                shown = vocabulary.shown(model.prompt_ids(messages, tools=[WEATHER], date=""))
                first = vocabulary.shown(model.prompt_ids([question], tools=[WEATHER], date=""))
                self.assertEqual(shown, first + answer + rest)

    def test_a_call_is_generated_answered_and_the_loop_goes_on(self):
        directory, ids, text = self.calling, self.ids_of_the_call, self.CALL
        model = ingot.engine.Model(directory, device="cpu", chat_format="qwen3")
        messages, heard = [{"role": "user", "content": "Weather?"}], []
        first = model.generate(messages, tools=[WEATHER], on_text=lambda *piece: heard.append(piece), **GREEDY)
        self.assertEqual((first.text, first.calls, first.finish), ("", [ingot.engine.Call("call_0", "weather", '{"city": "Paris"}')], "stop"))
        self.assertEqual((first.messages, heard), ([("commentary", "weather", '{"city": "Paris"}')], [("commentary", '{"city": "Paris"}')]))
        self.assertEqual(first.ids, [ids["<tool_call>"], ids[text], ids["</tool_call>"]])
        messages += [first.message, {"role": "tool", "name": "weather", "content": "warm"}]
        second = model.generate(messages, tools=[WEATHER], **GREEDY)
        self.assertEqual([c.id for c in second.calls], ["call_1"])  # one id for each call of the conversation
        self.assertGreaterEqual(second.reused_tokens, first.prompt_tokens)
        pieces = model.stream(messages, tools=[WEATHER], thoughts=True, **GREEDY)
        with self.assertRaises(StopIteration) as end:
            while True:
                self.assertEqual(next(pieces), ("commentary", '{"city": "Paris"}'))
        self.assertEqual((end.exception.value.calls, end.exception.value.ids), (second.calls, second.ids))
        self.assertEqual(list(model.stream(messages, tools=[WEATHER], **GREEDY)), [])

    def test_the_page_s_example_runs(self):
        code = re.search(r"```python\n(import json\n.*?)```", PAGE.read_text(), re.S)[1]
        code = code.replace('"Qwen3-0.6B"', f'{str(self.calling)!r}, chat_format="qwen3", device="cpu"')
        printed, scope = io.StringIO(), {}
        with contextlib.redirect_stdout(printed):
            exec(code, scope)
        first = printed.getvalue().splitlines()[0]
        self.assertEqual(first, "[Call(id='call_0', name='weather', arguments='{\"city\": \"Paris\"}', channel='commentary')]")
        self.assertIn(f"`{first}`", PAGE.read_text())
        self.assertEqual(scope["messages"][-1], {"role": "tool", "tool_call_id": "call_0", "content": "22 degrees and sunny in Paris"})

    def test_thoughts_between_control_tokens_are_no_text(self):
        model, vocabulary = self.of("qwen3")
        got = model.parse(vocabulary.written("<think>\nhm\n</think>\n\nYes.<|im_end|>"))
        self.assertEqual((got.thoughts, got.text, got.messages), ("hm", "Yes.", [("analysis", "", "hm"), ("", "", "Yes.")]))
        self.assertEqual(got.message, {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"})

    def test_wrong_tools_calls_and_results_are_refused_in_one_line(self):
        def call(**more):
            return {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"} | more}]}
        hi, result = {"role": "user", "content": "Hi."}, {"role": "tool", "content": "warm"}
        for message, options in (
                ("tools: found 'dict', expected a list of functions or None", dict(tools=WEATHER)),
                (r"tools\[1\]: found string \"weather\", expected an object", dict(tools=[WEATHER, "weather"])),
                (r"tools\[0\].type: it is missing", dict(tools=[{"function": WEATHER}])),
                (r"tools\[0\].type: found 'web_search', expected function", dict(tools=[{"type": "web_search"}])),
                (r"tools\[0\].function: it is missing", dict(tools=[{"type": "function"}])),
                (r"tools\[0\].function.name: found 'the weather', expected 1 to 128 letters, digits, _ or -", dict(tools=[{"name": "the weather"}])),
                (r"tools\[0\].function.parameters: found empty array.*, expected a JSON schema", dict(tools=[WEATHER | {"parameters": []}])),
                (r"tools\[0\].function.parameter: an unknown field \(did you mean parameters\?\)", dict(tools=[{"name": "f", "parameter": {}}])),
                (r"tools: found a value that JSON cannot hold \(.*type.*\), expected dicts", dict(tools=[WEATHER | {"parameters": dict}])),
                (r"tools: found a value that JSON cannot hold \(.*float.*\), expected dicts", dict(tools=[WEATHER | {"parameters": {"default": float("nan")}}])),
                (r"tools: found '\\ud800', expected text that UTF-8 can hold", dict(tools=[WEATHER | {"description": "\ud800"}])),
                ("tool_choice: found 'required', expected 'auto' or 'none'", dict(tools=[WEATHER], tool_choice="required")),
                ("tool_choice: found {'type': 'function'}, expected 'auto' or 'none'", dict(tools=[WEATHER], tool_choice={"type": "function"})),
                (r"prompt\[1\].tool_call_id: it is missing", dict(prompt=[hi, result])),
                (r"prompt\[1\].tool_call_id: found no call of that id in the messages before it", dict(prompt=[hi, result | {"tool_call_id": "a"}, call()])),
                (r"prompt\[1\].name: found 'weather', expected the function of a call before it that has no result yet", dict(prompt=[hi, result | {"name": "weather"}])),
                (r"prompt\[3\].name: found 'weather', expected the function of a call before it", dict(prompt=[hi, call(), result | {"tool_call_id": "a"}, result | {"name": "weather"}])),
                (r"prompt\[1\].tool_calls\[0\].function.arguments: found .*, expected a string", dict(prompt=[hi, call(arguments={})])),
                (r"prompt\[1\].tool_calls\[0\].function.name: found '', expected 1 to 128", dict(prompt=[hi, call(name="")])),
                (r"prompt\[0\].tool_calls\[0\]: found .*, expected an object", dict(prompt=[{"role": "assistant", "tool_calls": [5]}])),
                (r"prompt\[0\].tool_calls: found it in a message by user, expected a list in one by assistant", dict(prompt=[hi | {"tool_calls": call()["tool_calls"]}])),
                (r"prompt\[0\].content: found none, and no tool_calls, expected one of them", dict(prompt=[{"role": "assistant", "content": None}])),
                (r"tools: found \[.*\], expected None with raw=True", dict(tools=[WEATHER], raw=True))):
            with self.assertRaisesRegex(ValueError, "^engine: " + message) as raised:
                gpt_oss.generate(**({"prompt": "Hi."} | GREEDY | options))
            self.assertNotIn("\n", str(raised.exception))

    def test_a_format_without_functions_refuses_them_by_its_name(self):
        call = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]}
        for chat_format in ("smollm2", "chatml", "llama3", "gemma3"):
            model, _ = self.of(chat_format)
            for message, options in (("functions that the model may call", dict(prompt="Hi.", tools=[WEATHER])),
                                     ("a call of a function or its result", dict(prompt=[{"role": "user", "content": "Hi."}, call, {"role": "tool", "tool_call_id": "a", "content": ""}]))):
                for ask in (model.generate, model.prompt_ids, lambda **more: list(model.stream(**more))):
                    with self.assertRaisesRegex(ValueError, f"^engine: found {message}, which the chat format {chat_format} does not support$"):
                        ask(**options)
            self.assertEqual(model.generate("Hi.", tools=[WEATHER], tool_choice="none", **GREEDY).ids, model.generate("Hi.", **GREEDY).ids)


if __name__ == "__main__":
    unittest.main()
