"""The page of `ingot serve` in a headless Chromium, which is driven through a pipe: sends, reads, stops, fails, reloads.

    python3 tests/page_test.py BINARY [unittest options]

Without Chromium the script prints a message and ends with status 77. PAGE_SCREENSHOTS=DIR keeps pictures.
"""
import base64
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    print("no Chromium: the page is not tested")
    sys.exit(77)
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import serve_test


class Browser:
    """Chrome's DevTools protocol: JSON between zero bytes."""

    def __init__(self, profile):
        to_read, self.write = os.pipe()
        self.read, to_write = os.pipe()

        def descriptors():
            os.dup2(to_read, 63), os.dup2(to_write, 64)
            os.dup2(63, 3), os.dup2(64, 4)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}"]
        self.process = subprocess.Popen([CHROMIUM, *flags], preexec_fn=descriptors, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read), os.close(to_write)
        self.waiting, self.number, self.events, self.session = b"", 0, [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self.number += 1
        message = dict(id=self.number, method=method, params=params) | ({"sessionId": self.session} if self.session else {})
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.waiting:
                part = os.read(self.read, 1 << 16)
                assert part, "the browser has ended"
                self.waiting += part
            text, self.waiting = self.waiting.split(b"\0", 1)
            answer = json.loads(text)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def js(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression, seconds=30):
        deadline = time.monotonic() + seconds
        while not self.js(f"!!({expression})"):
            assert time.monotonic() < deadline, f"never: {expression}; the page says {self.js('document.body.innerText')!r}"
            time.sleep(0.05)

    def close(self):
        os.close(self.write)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.read)


# A fetch() that answers with a stream of these events; the stream never ends where `ends` is false.
FAKE = """
window.realFetch = window.realFetch || window.fetch;
window.fetch = (address, options) => {
  if (String(address).endsWith('models')) return realFetch(address, options);
  window.asked = JSON.parse(options.body);
  const encoder = new TextEncoder();
  let timer;
  return Promise.resolve(new Response(new ReadableStream({
    start(c) {
      options.signal.addEventListener('abort', () => { clearInterval(timer); window.aborted = true; c.error(new DOMException('', 'AbortError')); });
      const said = TEXT.match(/[^]{1,3}/gu) || [];
      timer = setInterval(() => {
        if (said.length) c.enqueue(encoder.encode('data: ' + JSON.stringify({choices: [{delta: {content: said.shift()}}]}) + '\\n\\n'));
        else if (ENDS) { clearInterval(timer); c.enqueue(encoder.encode('data: [DONE]\\n\\n')); c.close(); }
      }, 1);
    }})));
};0
"""
HOSTILE = """<script>window.broken = 1</script><img src=x onerror="window.broken = 1"> <b>bold</b>
[click](javascript:window.broken=1) [data](data:text/html,x) [good](https://a.example/x?y) ![picture](https://a.example/p.png)
# <img src=x onerror=alert(1)>
- one **strong** `</code><script>`
- two
```html
<script>window.broken = 1</script>
```
1. first
"""


class Page(serve_test.WithServer):
    OPTIONS = ("--context", "4000")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        holder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        cls.addClassCleanup(holder.cleanup)
        cls.browser = Browser(holder.name)
        cls.addClassCleanup(cls.browser.close)

    def setUp(self):
        super().setUp()
        self.browser.js("try { sessionStorage.clear() } catch {}")
        self.browser.events.clear()
        self.load()

    def load(self):
        self.browser.call("Page.navigate", url=f"http://127.0.0.1:{self.server.port}/")
        self.browser.until("document.readyState === 'complete' && document.getElementById('model').textContent === 'tiny'")

    def tearDown(self):
        # Neither an exception nor a violation of the policy.
        bad = [e for e in self.browser.events if e.get("method") == "Runtime.exceptionThrown" or
               (e.get("method") == "Log.entryAdded" and "Content Security Policy" in e["params"]["entry"]["text"])]
        self.assertEqual(bad, [])
        if directory := os.environ.get("PAGE_SCREENSHOTS"):
            picture = self.browser.call("Page.captureScreenshot", format="png")["data"]
            pathlib.Path(directory, self._testMethodName + ".png").write_bytes(base64.b64decode(picture))

    def send(self, text):
        self.browser.js(f"document.getElementById('input').value = {json.dumps(text)}; 0")
        self.browser.js("document.getElementById('input').dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', cancelable: true})); 0")

    def idle(self):
        self.browser.until("running === null && turns.length > 0")

    def test_a_question_is_answered_and_its_answer_survives_a_reload(self):
        self.browser.js("$('seed').value = 4; $('tokens').value = 40; 0")
        self.send("Hi \u65e5")
        self.idle()
        said = self.browser.js("[turns[1].content, turns[1].reasoning]")
        status, text, _ = self.server.request("POST", "/v1/chat/completions", dict(messages=[dict(role="user", content="Hi \u65e5")], seed=4, max_tokens=40))
        message = json.loads(text)["choices"][0]["message"]
        self.assertEqual(said, [message["content"], message.get("reasoning_content", "")])
        self.assertRegex(self.browser.js("turns[1].speed || '0 tokens/s'"), r"tokens/s")
        self.load()
        self.assertEqual(self.browser.js("[turns[1].content, turns[1].reasoning]"), said)
        self.assertEqual(self.browser.js("document.querySelectorAll('article').length"), 2)
        self.browser.js("$('new').click(); 0")
        self.assertEqual(self.browser.js("turns.length + document.querySelectorAll('article').length"), 0)

    def test_the_text_of_a_model_is_shown_as_text(self):
        self.browser.js(FAKE.replace("TEXT", json.dumps(HOSTILE)).replace("ENDS", "true"))
        self.send("x <img src=x onerror='window.broken = 1'>")
        self.idle()
        self.browser.until("document.querySelector('.assistant .text ol')")
        self.assertIsNone(self.browser.js("window.broken"))
        self.assertEqual(self.browser.js("[...document.querySelectorAll('main script, main img, main b, main iframe')].length"), 0)
        self.assertEqual(self.browser.js("[...document.querySelectorAll('main a')].map(a => a.href)"), ["https://a.example/x?y", "https://a.example/p.png"])
        self.assertEqual(self.browser.js("[...document.querySelectorAll('.assistant .text > *')].map(e => e.localName)"), ["p", "h3", "ul", "div", "ol"])
        self.assertEqual(self.browser.js("document.querySelector('main pre').textContent"), "<script>window.broken = 1</script>")
        self.assertIn("<script>window.broken = 1</script><img", self.browser.js("document.querySelector('.assistant .text').textContent"))

    def test_lists_tables_code_and_quotations_have_their_form(self):
        text = "1. one\n   - deep **bold `code`**\n   - deep too\n\n     more of it\n2. two\n   ```py\n   x = 1\n     y\n   ```\n\n| a | b |\n|---|--:|\n| `1` | 2 |\n| [x](javascript:1) | \\| |\n\n> said\n> twice\n\n---\nSee https://a.example/b."
        self.browser.js(FAKE.replace("TEXT", json.dumps(text)).replace("ENDS", "true"))
        self.send("x")
        self.idle()
        self.browser.until("document.querySelector('.assistant hr')")
        of = lambda selector, what="textContent": self.browser.js(f"[...document.querySelectorAll('.assistant .text {selector}')].map(e => e.{what})")
        self.assertEqual(of("> *", "localName"), ["ol", "div", "blockquote", "hr", "p"])
        self.assertEqual(of("> ol > li", "childElementCount"), [1, 1])
        self.assertEqual(of("ol ul > li"), ["deep bold code", "deep toomore of it"])
        self.assertEqual((of("li pre"), of("td"), of("td.right"), of("blockquote")), (["x = 1\n  y"], ["1", "2", "x", "|"], ["2", "|"], ["said\ntwice"]))
        self.assertEqual(of("a", "href"), ["https://a.example/b"])

    def test_a_text_made_to_be_slow_is_rendered_quickly(self):
        for part in ("[", "[a](", "*", "**a", "`", "| ", "- ", "> ", "  - a\n" + " ", "https://a", "|-|\n", "~~~\n", "1. "):
            took = self.browser.js(f"(() => {{ const start = performance.now(); markdown({json.dumps(part)}.repeat(60000 / {len(part)})); return performance.now() - start; }})()")
            self.assertLess(took, 3000, part)

    def test_settings_but_not_the_key_survive_a_reload(self):
        self.browser.js("$('seed').value = 7; $('key').value = 'secret'; $('theme').value = 'dark'; $('settings').dispatchEvent(new Event('change')); 0")
        self.load()
        self.assertEqual(self.browser.js("[$('seed').value, $('key').value, document.documentElement.dataset.theme, JSON.stringify(sessionStorage).includes('secret')]"), ["7", "", "dark", False])

    def test_an_answer_is_stopped_edited_and_asked_again(self):
        self.browser.js(FAKE.replace("TEXT", '"it begins"').replace("ENDS", "false"))
        self.send("first")
        self.browser.until("turns[1] && turns[1].content === 'it begins'")
        self.assertEqual(self.browser.js("$('send').textContent"), "Stop")
        self.browser.js("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'})); 0")
        self.browser.until("window.aborted && turns[1].note === 'Stopped.' && $('send').textContent === 'Send'")
        self.browser.js(FAKE.replace("TEXT", '"done"').replace("ENDS", "true"))
        self.send("second")
        self.idle()
        self.assertEqual(self.browser.js("asked.messages.map(m => m.content)"), ["first", "it begins", "second"])
        self.browser.js("document.querySelectorAll('.assistant button')[2].click(); 0")  # again
        self.idle()
        self.assertEqual(self.browser.js("[turns.length, asked.messages.length]"), [4, 3])
        self.browser.js("document.querySelectorAll('.user button')[1].click(); 0")  # edit
        self.assertEqual(self.browser.js("[turns.length, $('input').value]"), [2, "second"])

    def test_errors_are_shown(self):
        self.browser.js("$('temperature').value = 3; 0")
        self.send("Hi")
        self.idle()
        self.browser.until("document.querySelector('.error')")
        self.assertIn("temperature: found number 3", self.browser.js("document.querySelector('.error').textContent"))

    def test_the_page_fits_a_phone_and_has_both_colour_schemes(self):
        self.browser.call("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=1, mobile=True)
        self.browser.js(FAKE.replace("TEXT", json.dumps("Some `code` and **words**.\n\n```\n" + "x" * 300 + "\n```\n" + "y" * 300)).replace("ENDS", "true"))
        self.send("Hi")
        self.idle()
        self.assertLessEqual(self.browser.js("document.documentElement.scrollWidth"), 360)
        back = "getComputedStyle(document.body).backgroundColor"
        colours = []
        for theme in ("dark", "light"):
            self.browser.js(f"$('theme').value = '{theme}'; $('theme').onchange(); 0")
            colours.append(self.browser.js(back))
        self.assertEqual(colours, ["rgb(25, 24, 23)", "rgb(251, 250, 248)"])
        self.browser.call("Emulation.clearDeviceMetricsOverride")

    def test_the_page_s_policy_admits_nothing_and_each_answer_has_its_own_nonce(self):
        pages = [self.server.request("GET", "/") for _ in range(2)]
        policies = [p[2]["Content-Security-Policy"] for p in pages]
        self.assertNotEqual(policies[0], policies[1])
        for (_, text, headers), policy in zip(pages, policies):
            self.assertTrue(policy.startswith("default-src 'none'; script-src 'nonce-"))
            self.assertNotIn("unsafe", policy)
            self.assertNotIn("@NONCE@", text)
            self.assertNotRegex(text, r"innerHTML|insertAdjacentHTML|document\.write|localStorage|eval\(|https?://")
            self.assertEqual(headers["X-Content-Type-Options"], "nosniff")


setUpModule, tearDownModule = serve_test.setUpModule, serve_test.tearDownModule
if __name__ == "__main__":
    unittest.main()
