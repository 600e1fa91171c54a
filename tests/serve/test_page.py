"""The page in a real browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .process import Server, until

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs the extra dejavu-llm[dev] (playwright)"
)
expect = playwright.expect
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"needs a browser ({', '.join(BROWSERS)}), which is not here")
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """The page, loaded; nothing may go elsewhere, and no script may fail."""
    context = browser.new_context(viewport={"width": 1200, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(30_000)
    elsewhere, faults = [], []
    page.on("request", lambda r: r.url.startswith(server.url) or elsewhere.append(r.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(server.url)
    expect(page.locator("#model option")).to_have_count(2)
    yield page
    context.close()
    assert (elsewhere, faults) == ([], [])


def send(page: Any, prompt: str, mode: str = "sparse", tokens: int = 12) -> None:
    page.get_by_label("Text to continue").fill(prompt)
    page.get_by_label(mode, exact=True).check()
    page.get_by_label("Tokens").fill(str(tokens))
    page.get_by_role("button", name="Send").click()


def done(page: Any) -> None:
    expect(page.get_by_role("status")).to_contain_text("Done")


@pytest.mark.parametrize(("mode", "level"), [("sparse", "careful"), ("dense", "dense")])
def test_an_answer_streams_with_its_figures(
    mode: str, level: str, page: Any, expected: Callable[..., str]
) -> None:
    seen = set()
    page.on("response", lambda r: seen.add(r.headers.get("content-type", "")))
    send(page, "Once upon a time", mode)
    done(page)
    answer = page.locator(".answer")
    expect(answer.locator("h3")).to_have_text(level)
    assert answer.locator(".text").inner_text() == expected(
        "Once upon a time", level, max_tokens=12
    )
    assert any(kind.startswith("text/event-stream") for kind in seen)
    assert answer.locator(".token").count() == 12
    figures = answer.locator("dd").all_inner_texts()
    assert figures[0].endswith(" ms")
    assert float(figures[1]) > 0
    assert figures[2] == "12"
    assert figures[3].endswith("%") if mode == "sparse" else figures[3] == "-"


def test_the_strip_tells_layers_blocks_and_heads(page: Any) -> None:
    send(page, "Once upon a time")
    done(page)
    canvas, detail = page.locator("canvas"), page.locator(".detail")
    assert canvas.evaluate("c => [c.width, c.height]") == [32 + 1 + 16, 8]
    painted = canvas.evaluate(
        "c => new Set([...c.getContext('2d').getImageData(0, 0, 32, 8).data]"
        ".filter((_, i) => i % 4 == 3)).size"
    )
    assert painted > 10, "blocks differ in how much of them was used"
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 3, box["y"] + box["height"] - 3)
    expect(detail).to_contain_text("layer 8, head 15: computed")
    page.mouse.move(box["x"] + 3, box["y"] + 3)
    expect(detail).to_contain_text("layer 1, neurons 0 to 63:")
    canvas.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(detail).to_contain_text("layer 2, neurons 64 to 127:")
    page.locator(".token").first.hover()
    expect(detail).to_contain_text("computed dense")
    assert page.locator("meter").count() == 8
    assert canvas.get_attribute("aria-label").startswith("token 1")


def test_side_by_side_marks_where_they_part(page: Any, expected: Callable[..., str]) -> None:
    prompt = "Once upon a time"
    page.get_by_label("Level").select_option("fast")
    send(page, prompt, "side by side", tokens=40)
    done(page)
    texts = page.locator(".answer .text").all_inner_texts()
    want = [expected(prompt, level, max_tokens=40) for level in ("dense", "fast")]
    assert texts == want
    assert want[0] != want[1]
    same = next(i for i, pair in enumerate(zip(*want, strict=False)) if len(set(pair)) > 1)
    for place, text in enumerate(texts):
        marked = page.locator(".answer").nth(place).locator(".token.differs").all_inner_texts()
        before = text[: len(text) - len("".join(marked))]
        assert 0 <= same - len(before) < 20, "from the token of the first difference on"
    expect(page.get_by_role("status")).to_contain_text("differ from token")


def test_errors_are_shown_and_the_page_goes_on(page: Any, server: Server) -> None:
    send(page, "word " * 1000)
    expect(page.get_by_role("alert")).to_contain_text("512")
    send(page, "Once")
    done(page)
    expect(page.get_by_role("alert")).to_be_hidden()


def test_stop_ends_the_answer_on_the_server_too(page: Any, server: Server) -> None:
    send(page, "Once", tokens=500)
    expect(page.locator(".token").nth(3)).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("status")).to_have_text("Stopped.")
    until(server.idle, 5)


def test_a_chat_model_remembers_and_has_no_levels(page: Any) -> None:
    page.get_by_label("Model").select_option("org/chatty")
    assert page.get_by_label("sparse", exact=True).is_disabled()
    asked = []
    page.on("request", lambda r: asked.append(r.post_data_json) if r.method == "POST" else None)
    for place in range(2):
        page.get_by_label("Message").fill(f"Hi {place}")
        page.get_by_label("Tokens").fill("3")
        page.keyboard.press("Tab")
        page.get_by_label("Message").press("Enter")
        expect(page.locator(".answer")).to_have_count(place + 1)
        done(page)
    roles = [[message["role"] for message in body["messages"]] for body in asked]
    assert roles == [["user"], ["user", "assistant", "user"]]
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".answer")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_narrow_window(scheme: str, page: Any) -> None:
    page.set_viewport_size({"width": 320, "height": 640})
    page.emulate_media(color_scheme=scheme)
    send(page, "Once upon a time", "side by side")
    done(page)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 320, "nothing sticks out at the side"
    ink, ground = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    light = [sum(map(int, color[4:-1].split(","))) for color in (ink, ground)]
    assert (light[0] < light[1]) == (scheme == "light")


def test_the_keyboard_reaches_everything(page: Any) -> None:
    reached = []
    for _ in range(9):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.name"))
    settings = ["model", "mode", "level", "tokens", "temperature", "key"]
    assert reached == [*settings, "prompt", "send", "clear"]
    for control in page.locator("select, input, textarea, button").all():
        assert control.evaluate("c => c.labels?.length > 0 || c.innerText.length > 0")


def test_a_picture_for_the_documents(page: Any, tmp_path: Path) -> None:
    """DEJAVU_SCREENSHOT names where to keep it."""
    page.get_by_label("Level").select_option("fast")
    send(page, "The old house at the end of the road", "side by side", tokens=40)
    done(page)
    page.locator(".token").nth(20).hover()
    path = Path(os.environ.get("DEJAVU_SCREENSHOT", tmp_path / "page.png"))
    page.screenshot(path=path)
    assert path.read_bytes().startswith(b"\x89PNG")
