"""The page at / in a real browser: a question is asked, the answer comes, also Chinese and emoji; nothing is loaded from elsewhere."""

from __future__ import annotations

import shutil

import pytest

from tercet.inference.generate import stream
from tests.e2e.test_serve import Running
from tests.served_tiny import save_served

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        system = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        try:
            browser = playwright.chromium.launch(executable_path=system, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no browser starts here (apt install chromium, or playwright install chromium): {error}")
        yield browser.new_page()
        browser.close()


def test_one_asks_and_the_model_answers(page, tmp_path):
    from tercet.inference.batch import Batch
    from tercet.inference.sampling import Sampling

    with Running(save_served(tmp_path / "tiny")) as server:
        errors, asked = [], []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(server.url)
        page.wait_for_function("document.getElementById('name').textContent == 'tiny'")
        for question in ("the for 模型🙂", "<b>and</b>"):
            page.fill("#text", question)
            page.press("#text", "Enter")
            page.wait_for_function("document.getElementById('send').textContent == 'Send' && !going", timeout=100_000)
            talk = [{"role": "user", "content": question}]
            batch = Batch(server.served.model, 1, vocabulary=server.served.vocabulary)
            ids = server.served.chat_ids(talk)
            expected = "".join(stream(server.served, batch, ids, 256 - len(ids), Sampling(), ()))
            talk.append({"role": "assistant", "content": expected})
            shown = page.evaluate("[...document.querySelectorAll('.m')].map(e => [e.className, e.textContent])")
            assert [text for _, text in shown] == [m["content"] for m in talk]
            assert not any("error" in kind for kind, _ in shown)
            page.click("#clear")  # a random model talks until its context is full
            assert page.evaluate("document.querySelectorAll('.m').length") == 0
        assert not errors and all(url.startswith(server.url) for url in asked)


def test_a_model_without_a_template_continues_what_one_writes(page, tmp_path):
    with Running(save_served(tmp_path / "plain", template=None)) as server:
        page.goto(server.url)
        page.wait_for_function("document.getElementById('name').textContent == 'plain'")
        assert "continues the text" in page.inner_text("#note")
        page.fill("#text", "the for")
        page.press("#text", "Enter")
        page.wait_for_function("document.getElementById('send').textContent == 'Send' && !going", timeout=100_000)
        shown = page.evaluate("[...document.querySelectorAll('.m')].map(e => [e.className, e.textContent])")
        assert [kind for kind, _ in shown] == ["m user", "m assistant"] and shown[1][1]
