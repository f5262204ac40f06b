#!/usr/bin/env python3
"""Kills of the trainer on a GPU, by hand: at random moments (steps), inside saves, and by SIGTERM to a background process, whose SIGINT is
ignored; each run must continue to the parameter hash of the undisturbed run. Then kills -9 of `bench decode` while it decodes, by one kernel a
token and by a launch a phase: the GPU must give the next process the same ids of a small model, its memory and its speed. Last, runs that
the GPU's memory cannot hold.

    python3 tests/crash/gpu_kills.py build/cuda/ingot [--kills 6] [--saves 6] [--decodes 4] [--seed 1]

Some 60 s on one GPU, and 8 for each of the decodes (--kills 0 --saves 0 --decodes 4: these alone). One line for each; exits 1 where a run
ended elsewhere."""
import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
# preset: steps, a checkpoint every so many, and further options. golf-small begins to repeat layers half-way.
PRESETS = {"nano-golf": (600, 50, ()), "golf-small": (150, 15, ())}


class Kills:
    def __init__(self, ingot, folder, seed):
        self.ingot, self.folder, self.draw = str(ingot.resolve()), folder, random.Random(seed)
        self.failed, self.began = 0, time.monotonic()
        pages = b"\n".join(p.read_bytes() for p in sorted((ROOT / "docs").rglob("*.md")))
        (folder / "text.txt").write_bytes(pages.decode("utf-8", "ignore").encode("ascii", "ignore"))

    def say(self, ok, *words):
        self.failed += not ok
        print(f"[{time.monotonic() - self.began:5.1f}] {'' if ok else 'FAILED: '}" + " ".join(map(str, words)), flush=True)

    def start(self, preset, out, *more, background=False, steps=None):
        all_steps, every, settings = PRESETS[preset]
        line = [self.ingot, "train", "--preset", preset, "--data", self.folder / "text.txt", "--out", out, "--device", "cuda", "--steps", str(steps or all_steps),
                "--checkpoint-every", str(every), "--set", "train.log_every=1", *settings, *more]
        ignored = (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if background else None
        return subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True, preexec_fn=ignored)

    @staticmethod
    def finish(process, limit=60):
        try:
            err = process.communicate(timeout=limit)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            err = process.communicate()[1] + "\nran past its time"
        return process.returncode, ([""] + [line for line in re.split(r"[\r\n]+", err) if line])[-1]

    def hash_of(self, out):
        done = subprocess.run([self.ingot, "info", out, "--json"], capture_output=True, text=True)
        return json.loads(done.stdout)["parameter_hash"] if done.returncode == 0 else done.stderr.strip()[-200:]

    def steps_of(self, out):
        try:
            return (out / "log.jsonl").read_text(encoding="utf-8").count('"event":"step"')
        except OSError:
            return 0

    def goes_on(self, preset, out, want, what):
        code, last = self.finish(self.start(preset, out))
        got = self.hash_of(out)
        self.say(code == 0 and got == want, f"{preset}: {what}; resumed:", "the same bits" if got == want else f"{got} for {want}, {code}, {last}")

    def random_kills(self, preset, want, name, seconds):
        out, at = self.folder / name, []
        for _ in range(2):
            process = self.start(preset, out)
            try:
                process.wait(timeout=self.draw.uniform(*seconds))
                break
            except subprocess.TimeoutExpired:
                process.kill()
            process.communicate()
            at.append(self.steps_of(out))
        self.goes_on(preset, out, want, f"kill -9 after steps {at}")

    def kill_in_a_save(self, preset, want, name):
        out, skip = self.folder / name, self.draw.randint(0, 3)
        process = self.start(preset, out)
        wait, found, last = self.draw.uniform(0, 0.004), False, ""
        while process.poll() is None and not found:
            new = [n for n in (os.listdir(out) if out.is_dir() else []) if n.startswith(".tmp-step-")]
            if new and new[0] != last:
                last, skip = new[0], skip - 1
                if skip < 0:
                    time.sleep(wait)
                    process.kill()
                    found = True
        process.communicate()
        left = [n for n in os.listdir(out) if n.startswith(".tmp-")]
        self.goes_on(preset, out, want, f"kill -9 in a save ({'left ' + left[0] if left else 'just after it'})")

    def terminate(self, preset, want, name):
        out = self.folder / name
        process = self.start(preset, out, background=True)
        while process.poll() is None and self.steps_of(out) < PRESETS[preset][0] // 3:
            time.sleep(0.002)
        process.terminate()
        code, last = self.finish(process)
        self.say(code == 130, f"{preset}: SIGTERM in the background after step {self.steps_of(out)}: status {code}: {last}")
        self.goes_on(preset, out, want, "SIGTERM")

    def bench(self, *more):
        line = [self.ingot, "bench", "decode", "--synthetic", "20b", *more]
        return subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def decoded(self, model):
        """Greedy ids of a small model, and the time of a token of a large one with the time of its process."""
        line = [self.ingot, "generate", "--model", model, "--device", "cuda", "--ids", self.folder / "ids.jsonl", "--tokens", "100", "--temperature", "0", "--past-end"]
        ids = subprocess.run(line, capture_output=True, text=True, timeout=60)
        began = time.monotonic()
        process = self.bench("--tokens", "50", "--json")
        out, err = process.communicate(timeout=120)
        if ids.returncode or process.returncode:
            return None, f"status {ids.returncode} and {process.returncode}: {ids.stderr.strip()[-200:]} {err.strip()[-200:]}", 0
        return ids.stdout, {path: t["p50_ms"] for path, t in json.loads(out)["token"].items()}, time.monotonic() - began

    def decode_kills(self, count):
        model = self.folder / "small.ingot"
        subprocess.run([self.ingot, "convert", "--synthetic", "small", model], check=True, capture_output=True)
        (self.folder / "ids.jsonl").write_text("[1, 2, 3]\n")
        want, speed, took = self.decoded(model)
        self.say(want is not None, f"bench decode: undisturbed in {took:.1f} s: {speed}")
        for i in range(count if want is not None else 0):
            path = ("--megakernel", "--phased")[i % 2]
            process = self.bench(path, "--tokens", "50000")
            try:  # after a whole run's time the process decodes
                process.wait(timeout=took + self.draw.uniform(0, 1))
                self.say(False, f"bench decode {path}: ended before it was killed: status {process.returncode}: {process.communicate()[1].strip()[-200:]}")
                continue
            except subprocess.TimeoutExpired:
                process.kill()
            process.communicate()
            ids, now, _ = self.decoded(model)
            self.say(ids == want and all(now.get(p, 1e9) < 1.2 * ms for p, ms in speed.items()),
                     f"bench decode {path}: kill -9 while it decodes; next: {'the same ids' if ids == want else 'other ids'}, {now}")

    def no_room(self):
        """A batch that the GPU cannot hold, and the batch size that the refusal names."""
        code, last = self.finish(self.start("golf-small", self.folder / "room", "--batch-tokens", str(1 << 23)))
        fits = re.search(r"found [\d.]+ \w+ available, expected train.batch_tokens of at most (\d+)", last)
        self.say(code == 7 and fits, f"golf-small with 8,388,608 tokens at once: status {code}: {last}")
        if fits:
            code, last = self.finish(self.start("golf-small", self.folder / "fits", "--batch-tokens", fits[1], steps=2), 120)
            self.say(code == 0, f"golf-small with {int(fits[1]):,} tokens at once: status {code}{'' if code == 0 else ': ' + last}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("ingot", type=pathlib.Path)
    p.add_argument("--kills", type=int, default=6, help="runs killed at random, twice each (default: 6)")
    p.add_argument("--saves", type=int, default=6, help="runs killed in a save (default: 6)")
    p.add_argument("--decodes", type=int, default=4, help="decodes killed (default: 4)")
    p.add_argument("--seed", type=int, default=1)
    o = p.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder, concurrent.futures.ThreadPoolExecutor(5) as pool:
        kills, work = Kills(o.ingot, pathlib.Path(folder), o.seed), []
        for preset in PRESETS if o.kills + o.saves else ():
            began = time.monotonic()
            code, last = kills.finish(kills.start(preset, kills.folder / preset))
            took, want = time.monotonic() - began, kills.hash_of(kills.folder / preset)
            kills.say(code == 0, f"{preset}: undisturbed in {took:.1f} s: {want[:16]}, {last}")
            work += [pool.submit(kills.random_kills, preset, want, f"{preset}-kill-{i}", (0.3 * took, 1.2 * took)) for i in range(o.kills)]
            work += [pool.submit(kills.kill_in_a_save, preset, want, f"{preset}-save-{i}") for i in range(o.saves)]
            work += [pool.submit(kills.terminate, preset, want, f"{preset}-term")]
        for done in work:
            done.result()
        if o.decodes:
            kills.decode_kills(o.decodes)
        if o.kills + o.saves:
            kills.no_room()
    print(f"{kills.failed} failed")
    sys.exit(1 if kills.failed else 0)


if __name__ == "__main__":
    main()
