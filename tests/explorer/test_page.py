"""The page in a real browser: every feature, its numbers, and that it asks nobody but its own server."""

import base64
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from decoded_maps import decode_maps
from diff_lab.coordinates import Coordinates
from diff_lab.data import byte_tokenizer
from diff_lab.record import Result
from diff_lab.report.pages import build_run_report
from diff_lab.results_files import capture_results, write_json
from diff_transformer import attention_maps
from diff_transformer.explorer import (
    Example,
    ExploredModel,
    Explorer,
    Side,
    TokenizerVocabulary,
    WordVocabulary,
    explore,
)
from diff_transformer.explorer.page import recorded_page
from explored_models import ANSWER, TEXT, TOKENS, make, serving

pytest.importorskip("uvicorn")
playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium")]

Serve = Callable[..., str]
READY = ".explorer[data-ready=true]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watch:
    """Opens pages, and knows what went wrong in them and whom they asked."""

    def __init__(self, browser: Any) -> None:
        self.browser, self.wrong, self.asked = browser, [], set()
        self.contexts: list[Any] = []

    def open(self, address: str, width: int = 1280, height: int = 900, wait: bool = True, **settings: Any) -> Any:
        context = self.browser.new_context(viewport={"width": width, "height": height}, **settings)
        self.contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: self.wrong.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("dialog", lambda dialog: self.wrong.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: self.asked.add(request.url))
        page.goto(address)
        if wait:
            page.wait_for_selector(READY)
        return page


@pytest.fixture
def watch(browser: Any) -> Iterator[Watch]:
    """At the end of a test nothing may have gone wrong, and nothing beyond this machine may have been asked."""
    watch = Watch(browser)
    yield watch
    for context in watch.contexts:
        context.close()
    assert watch.wrong == []
    assert {url for url in watch.asked if not re.match(r"http://127\.0\.0\.1:\d+/|file://|data:|blob:", url)} == set()


@pytest.fixture(scope="module")
def served() -> Iterator[Callable[..., str]]:
    """(explorer, or several by their names) → the address of the first page."""
    with ExitStack() as stack:
        yield lambda explorer: stack.enter_context(serving(explorer)).address


@pytest.fixture(scope="module")
def address(served: Serve, explorer: Explorer) -> str:
    return served(explorer)


@pytest.fixture(scope="module")
def saved(explorer: Explorer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page in one file."""
    file = tmp_path_factory.mktemp("saved") / "page.html"
    file.write_text(recorded_page(explorer), encoding="utf-8")
    return file


def explorer_of(left: Any, right: Any = None, text: str = TEXT) -> Explorer:
    """Models that read words, with one text."""
    words = WordVocabulary([f"w{number}" for number in range(29)])
    sides = [Side(ExploredModel(model, name), words) for name, model in (("one", left), ("other", right)) if model]
    return Explorer(*sides[:2], examples=[Example("a text", text)])


def percents(page: Any, selector: str) -> list[float]:
    return [float(text.replace("%", "").replace("−", "-")) for text in page.locator(selector).all_inner_texts()]


def measure(page: Any, name: str) -> tuple[str, str]:
    """A measure of the left model: now, and with the learned λ."""
    row = page.locator(".measures tr", has_text=name).first
    return row.locator("td").nth(0).inner_text(), row.locator("td").nth(1).inner_text()


def weights(page: Any) -> list[float]:
    """The weights that the strip of tokens shows, of the row that is chosen."""
    titles = page.locator(".flow .token").evaluate_all("tokens => tokens.map(token => token.title)")
    return [float(title.rpartition(": ")[2].replace("−", "-")) for title in titles]


def expected_weights(explorer: Explorer, question: dict[str, Any]) -> list[Any]:
    """The weights of the first row that a question asks for, as :func:`weights` may show them.

    They come through the explorer, which lets one thread at a time use its models.
    """
    maps, first_row = decode_maps(explorer.head_map(question))
    return [pytest.approx(weight, abs=1.1e-3) for weight in maps.difference[0, 0, : first_row + 1].tolist()]


def chosen_row(page: Any) -> int:
    return int(page.locator(".flow .token.on").get_attribute("data-token"))


def settled(page: Any, check: Callable[[], bool], message: str = "") -> None:
    for _ in range(1000):  # 50 s: a busy machine is no failure
        if check():
            return
        page.wait_for_timeout(50)
    pytest.fail(message or "the page did not come to show what it should")


def test_it_opens_with_the_first_example_and_its_numbers(watch: Watch, address: str, explorer: Explorer) -> None:
    page = watch.open(address)
    expected = explorer.run({"text": TEXT, "answer": ANSWER, "picture": 16})
    assert page.locator("textarea").input_value() == TEXT
    grids = page.locator(".grid-card")
    assert grids.count() == 2
    assert grids.nth(0).locator(".head").count() == 8
    assert grids.nth(1).locator(".head").count() == 16
    removed = [round(100 * number) for row in expected["heads"]["removed"] for number in row]
    shown = [abs(number) for number in percents(page, ".grid-card:first-child .numbers span:first-child")]
    assert shown == removed
    probabilities = [entry["probability"] for entry in expected["next"][:10]]
    assert percents(page, ".bars .value:nth-child(3)") == [pytest.approx(100 * p, abs=0.051) for p in probabilities]
    assert page.locator(".bars th[scope=row]").all_inner_texts() == [e["piece"] for e in expected["next"][:10]]
    assert float(measure(page, "Loss on the text")[0]) == pytest.approx(expected["loss"], abs=6e-4)

    # The head that is opened is the one where λ = 0 changes most, and its row is the question's.
    def change(lambdas: dict[str, Any]) -> float:
        return float(explorer.run({"text": TEXT, "lambdas": lambdas})["divergence"])

    layer = max((0, 1), key=lambda layer: change({"layers": {str(layer + 1): 0}}))
    head = max(range(4), key=lambda head: change({"heads": {f"{layer + 1}.{head + 1}": 0}}))
    settled(page, lambda: page.locator("h2#head-title").inner_text().startswith(f"Layer {layer + 1}, head {head + 1}"))
    maps = attention_maps(make("diff"), torch.tensor([TOKENS]))[layer].difference[0, head]
    settled(page, lambda: weights(page) == [pytest.approx(weight, abs=1.1e-3) for weight in maps[10].tolist()])
    assert chosen_row(page) == 10
    assert page.locator("figure.map figcaption").all_inner_texts()[:3] == ["A₁", "A₂", "A₁ − λA₂"]
    labels = page.locator("canvas[role=img]").evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
    assert len(labels) == 4
    assert all("11 by 11 weights. The largest after the first row: token" in label for label in labels)


@pytest.mark.parametrize(
    ("slider", "settings"),
    [
        pytest.param("factor", {"factor": 0.3}, marks=pytest.mark.all),
        pytest.param("layer", {"layers": {"2": 0.3}}, marks=pytest.mark.all),
        ("head", {"heads": {"2.3": 0.3}}),
    ],
)
def test_lambda_moves_everything(
    watch: Watch, address: str, explorer: Explorer, slider: str, settings: dict[str, Any]
) -> None:
    page = watch.open(address)
    page.locator('[data-head="2.3"]').first.click()
    if slider != "factor":
        page.locator("summary").click()
    page.fill(f"#lambda-{slider}", "0.3")
    expected = explorer.run({"text": TEXT, "lambdas": settings, "answer": ANSWER, "picture": 16})
    settled(page, lambda: measure(page, "KL to")[0] == f"{expected['divergence']:.3f} nats")
    now, learned = measure(page, "Loss on the text")
    assert float(now) == pytest.approx(expected["loss"], abs=6e-4)
    assert float(learned) == pytest.approx(expected["learned_loss"], abs=6e-4)
    now, learned = measure(page, "Attention on the answer")
    assert float(now.strip(" %")) == pytest.approx(100 * expected["answer_share"], abs=0.051)
    assert float(learned.strip(" %")) == pytest.approx(100 * expected["learned_answer_share"], abs=0.051)
    removed = [round(100 * number) for row in expected["heads"]["removed"] for number in row]
    cells = ".grid-card:first-child .numbers span:first-child"
    settled(page, lambda: [abs(number) for number in percents(page, cells)] == removed)
    row = expected_weights(explorer, {"text": TEXT, "lambdas": settings, "layer": 2, "head": 3, "first_row": 10})
    settled(page, lambda: weights(page) == row)

    page.locator(f".slider:has(#lambda-{slider})").get_by_role("button", name="set λ to 0").click()
    off = "λ × 0.00" if slider == "factor" else "λ = 0.00"
    settled(page, lambda: page.locator(f".slider:has(#lambda-{slider}) output").inner_text() == off)
    page.locator(f".slider:has(#lambda-{slider})").get_by_role("button", name="back to").click()
    settled(page, lambda: measure(page, "KL to")[0] == "0.000 nats")
    settled(page, lambda: "lambda" not in page.url)


# The colour, on the grid's canvas, of the middle of each weight of each head's picture: (heads, P · P, 3).
DRAWN = """(grid, side) => {
  const canvas = grid.querySelector("canvas"), frame = canvas.getBoundingClientRect();
  const scale = canvas.width / frame.width, copy = new OffscreenCanvas(canvas.width, canvas.height);
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  return [...grid.querySelectorAll(".picture")].map((picture) => {
    const box = picture.getBoundingClientRect();
    return Array.from({ length: side * side }, (_, i) => {
      const x = box.left - frame.left + ((i % side + 0.5) * box.width) / side;
      const y = box.top - frame.top + ((Math.floor(i / side) + 0.5) * box.height) / side;
      return [...context.getImageData(Math.floor(x * scale), Math.floor(y * scale), 1, 1).data.slice(0, 3)];
    });
  });
}"""


STRIP = ".strip circle:not(.now)"


@pytest.mark.all
def test_the_strip_follows_the_slider(watch: Watch, address: str, explorer: Explorer) -> None:
    """Of a text without a task it is the probability of the answer; each factor's point is a run's with that factor."""
    page = watch.open(address)
    settled(page, lambda: page.locator(STRIP).count() == 8)
    asked = {"text": TEXT, "answer": ANSWER}
    values = [
        100 * explorer.run({**asked, "lambdas": {"factor": factor}})["answer_probability"]
        for factor in (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2)
    ]
    title = page.locator(".strip svg").get_attribute("aria-label")
    assert [float(x) for x in re.findall(r": ([\d.]+) %", title)] == [pytest.approx(x, abs=0.051) for x in values]
    assert page.locator(".strip h2").inner_text() == "Probability of w7 by λ, in %"
    sentence = page.locator(".strip p").first.inner_text().replace("\u00a0", " ")
    assert sentence.endswith(f"the probability of “w7” goes from {values[4]:.1f} % to {values[0]:.1f} %.")

    for number, factor in enumerate((0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2)):
        page.fill("#lambda-factor", str(factor))
        point = page.locator(STRIP).nth(number).get_attribute("cx")
        settled(page, lambda point=point: page.locator(".strip circle.now").get_attribute("cx") == point)
    page.fill("#lambda-factor", "-0.3")
    settled(page, lambda: page.locator(".strip circle.now").count() == 0)
    assert page.locator(".strip line.now").count() == 1
    assert "below 0 adds the second map" in page.locator(".finer").inner_text()
    page.locator("summary").click()
    page.fill("#lambda-head", "0.5")
    settled(page, lambda: page.locator(".strip line.now").count() == 0)
    page.fill("textarea", "w1 w2 w3")
    settled(page, lambda: page.locator(".strip h2").inner_text() != "Probability of w7 by λ, in %")
    settled(page, lambda: page.locator(STRIP).count() == 8)


@pytest.mark.all
def test_a_model_of_a_task_guesses_without_the_second_map(
    watch: Watch, served: Serve, explorer: Explorer, questions: list[Example], tmp_path: Path
) -> None:
    """In the page of a server and in one that is saved; the numbers are the task's, whatever the text is."""
    left = explorer.sides["left"]
    task = Explorer(left, None, explorer.examples, questions, floor=0.0)
    off, learned = (task.strip({"factor": factor})["value"] for factor in (0.0, 1.0))
    task.floor = off
    saved = tmp_path / "page.html"
    saved.write_text(recorded_page(task), encoding="utf-8")
    for address in (served(task), saved.as_uri()):
        page = watch.open(address)
        settled(page, lambda page=page: page.locator(STRIP).count() == 8)
        words = page.locator(".strip").inner_text().replace("\u00a0", " ")
        assert "Right answers by λ" in words
        shares = f"{100 * off:.0f} % of its answers are right, {100 * learned:.0f} % with the learned λ (30 questions)"
        assert f"the model guesses: {shares}." in words
        assert f"A guess among the values in the text gives {100 * off:.0f} %." in words


@pytest.mark.all
def test_each_head_of_the_grid_has_its_picture(watch: Watch, address: str, explorer: Explorer) -> None:
    """In its place, also after a line of numbers came or went; blue where weights are positive, orange where not."""
    page = watch.open(address)

    def is_drawn(side: str, number: int) -> bool:
        grid = page.locator(".grid-card").nth(number)
        heads = explorer.run({"side": side, "text": TEXT, "picture": 48})["heads"]
        pictures = torch.frombuffer(bytearray(base64.b64decode(heads["pictures"])), dtype=torch.int8)
        colours = torch.tensor(grid.evaluate(DRAWN, heads["picture_size"])).flatten(0, 1)
        blue = colours[:, 2] - colours[:, 0]
        empty = (colours - torch.tensor([250, 249, 246])).abs().amax(1) == 0
        weights = pictures.int()
        return bool(empty[weights == 0].all() and (blue[weights > 30] > 0).all() and (blue[weights < -30] < 0).all())

    for _ in range(2):
        for number, side in enumerate(("left", "right")):
            settled(
                page, partial(is_drawn, side, number), f"the pictures of the {side} model are not those of its heads"
            )
        if page.get_by_text("Attention on the answer").count():
            page.locator(".flow .token").nth(1).click()
            page.get_by_role("button", name="No longer the answer").click()
            settled(page, lambda: not page.locator(".on-answer").count())


def test_tokens_by_mouse_and_keyboard(watch: Watch, address: str, explorer: Explorer) -> None:
    page = watch.open(address)
    page.locator(".flow .token").nth(4).hover()
    assert chosen_row(page) == 4
    assert "Row of token 5 w7" in page.locator(".curve figcaption").inner_text()
    page.mouse.move(0, 0)
    assert chosen_row(page) == 10
    page.locator(".flow .token").nth(6).click()
    page.mouse.move(0, 0)
    assert chosen_row(page) == 6
    settled(page, lambda: "row=6" in page.url)
    page.locator(".flow").focus()
    page.keyboard.press("ArrowLeft")
    assert chosen_row(page) == 5
    page.keyboard.press("Home")
    assert chosen_row(page) == 0
    page.keyboard.press("Escape")
    assert chosen_row(page) == 10
    assert "Attention on the answer" in page.locator(".measures").inner_text()
    page.locator(".flow .token").nth(1).click()
    page.get_by_role("button", name="No longer the answer").click()
    settled(page, lambda: "Attention on the answer" not in page.locator(".measures").inner_text())
    page.locator(".flow .token").nth(5).click()
    page.get_by_role("button", name="Mark as the answer").click()
    share = explorer.run({"text": TEXT, "answer": {"query": 10, "begin": 5, "end": 6}})["answer_share"]
    settled(page, lambda: measure(page, "Attention on the answer")[0] == f"{100 * share:.1f} %")
    settled(page, lambda: "answer=10%2C5%2C6" in page.url)
    canvas = page.locator('canvas[data-map="net"]')
    box = canvas.bounding_box()
    canvas.click(position={"x": 5, "y": box["height"] * 2.5 / 11})
    page.mouse.move(0, 0)
    assert chosen_row(page) == 2
    page.locator('.grid-card:first-child [aria-selected="true"]').focus()
    before = page.locator("#head-title").inner_text()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert page.locator("#head-title").inner_text() != before
    assert page.evaluate_handle("document.activeElement").get_attribute("aria-selected") == "true"


@pytest.mark.all
def test_both_models_write_on_in_step(watch: Watch, address: str) -> None:
    page = watch.open(address)
    expected = {
        kind: [f"w{token}" for token in make(kind).generate(
            torch.tensor([TOKENS]), max_new_tokens=8, do_sample=False, pad_token_id=0
        )[0, 11:].tolist()]
        for kind in ("diff", "softmax")
    }  # fmt: skip

    def written(side: int) -> list[str]:
        return page.locator(".written").nth(side).inner_text().split()[1:]

    page.get_by_role("button", name="Step").click()
    settled(page, lambda: page.locator(".flow .token").count() == 12 and page.locator(".written").count() == 2)
    assert written(0) == expected["diff"][:1]
    assert written(1) in ([], expected["softmax"][:1])  # which answers later
    settled(page, lambda: written(1) == expected["softmax"][:1])
    settled(page, lambda: chosen_row(page) == 11)
    page.get_by_role("button", name="Play").click()
    settled(page, lambda: page.locator(".flow .token").count() >= 14)
    page.get_by_role("button", name="Pause").click()
    page.wait_for_timeout(700)
    count = page.locator(".flow .token").count() - 11
    assert written(0) == expected["diff"][:count]
    assert written(1) == expected["softmax"][:count]
    page.wait_for_timeout(700)
    assert page.locator(".flow .token").count() - 11 == count
    assert page.locator(".flow .token.new").count() == count
    settled(page, lambda: len(page.url.split("left-added=")[-1].split("&")[0].split("%2C")) == count)
    again = watch.open(page.url)
    settled(again, lambda: again.locator(".flow .token").count() == 11 + count)
    # An answer is marked for what was written, in the strip too, and goes with it.
    page.locator(".flow .token").nth(3).click()
    page.get_by_role("button", name="Mark as the answer").click()
    settled(page, lambda: page.locator(".strip h2").inner_text() == "Probability of w12 by λ, in %")
    page.get_by_role("button", name="Begin again").click()
    settled(page, lambda: page.locator(".flow .token").count() == 11)
    settled(page, lambda: "Probability of w12" not in page.locator(".strip").inner_text())
    assert page.locator(".refusal").count() == 0


def test_a_link_gives_the_same_view_again(watch: Watch, address: str) -> None:
    page = watch.open(address)
    page.fill("textarea", "w5 w6 w5 w6 w8 w5")
    settled(page, lambda: page.locator(".flow .token").count() == 6)
    page.locator('.grid-card:nth-child(1) [data-head="1.4"]').click()
    page.locator('.grid-card:nth-child(2) [data-head="2.7"]').click()
    page.locator("summary").click()
    page.fill("#lambda-layer", "0.15")
    page.fill("#lambda-head", "-0.2")
    page.locator(".flow .token").nth(3).click()
    page.mouse.move(0, 0)
    settled(page, lambda: measure(page, "KL to")[0] != "0.000 nats")
    settled(page, lambda: "row=3" in page.url)
    again = watch.open(page.url)
    settled(again, lambda: again.locator("main").inner_text() == page.locator("main").inner_text())
    settled(again, lambda: again.url == page.url)
    again.context.grant_permissions(["clipboard-read", "clipboard-write"])
    again.get_by_role("button", name="Copy link").click()
    assert again.evaluate_handle("navigator.clipboard.readText()").json_value() == page.url
    assert again.locator("textarea").input_value() == "w5 w6 w5 w6 w8 w5"
    again.goto(f"{address}#text=w1+w2+w3&left=2.2&lambda=factor:0.25&row=1")  # in the page that is open
    settled(again, lambda: again.locator(".flow .token").count() == 3 and chosen_row(again) == 1)
    settled(again, lambda: again.locator(".slider.main output").inner_text() == "λ × 0.25")
    assert again.locator(".token.pinned").count() == 1
    again.goto(f"{address}#text=w1+w2")
    settled(again, lambda: again.locator(".flow .token").count() == 2)
    assert again.locator(".token.pinned").count() == 0
    # A link that makes no sense opens the page all the same.
    watch.open(f"{address}#text=w1+w2&left=99.x&lambda=factor:x,all:0.5,7&row=-3&answer=1&left-added=x")


@pytest.mark.all
def test_needles_and_refusals(watch: Watch, address: str) -> None:
    page = watch.open(address)
    page.fill("textarea", "w5")
    page.get_by_role("button", name="an example").click()  # which is shown already
    assert page.locator("textarea").input_value() == TEXT
    page.get_by_role("button", name="Another question").click()
    settled(page, lambda: page.locator(".flow .token").count() == 8)
    page.fill("textarea", "w5 <script>alert(1)</script>")
    for sentence in (".refusal", ".refused"):
        assert "no token '<script>alert(1)</script>'" in page.locator(sentence).inner_text()
    playwright.expect(page.locator(".refused")).to_be_in_viewport()
    for part in (".strip", ".predictions", ".head-view", ".grids"):  # they are of the text before
        playwright.expect(page.locator(part)).to_have_css("opacity", "0.3")
    page.fill("textarea", "w5 w6")
    settled(page, lambda: page.locator(".refusal, .refused, .stale").count() == 0)
    assert page.locator(".flow .token").count() == 2
    page = watch.open(f"{address}#text=w1+w2&answer=7,0,1")  # which lies past the text
    settled(page, lambda: "answer" not in page.url and page.locator(".refusal").count() == 0)
    # The browser notes each answer that refuses.
    assert all("400 (Bad Request)" in message for message in watch.wrong)
    watch.wrong.clear()


def test_hostile_text_is_shown_as_text(watch: Watch, served: Serve) -> None:
    tokenizer = byte_tokenizer()
    text = "<img src=x onerror=alert(1)>\x00\u202e&é<שלום"
    side = Side(ExploredModel(make("diff", vocab_size=len(tokenizer)), "<b>bytes"), TokenizerVocabulary(tokenizer))
    page = watch.open(served(Explorer(side, None, [Example("<i>", text)])))
    assert page.locator(".flow").inner_text().startswith("<img src=x onerror=alert(1)>␀")
    assert "\u202e" not in page.locator(".flow").inner_text()
    assert page.locator(".flow img, .explorer b b, .chip i").count() == 0
    assert "<b>bytes" in page.locator("footer").inner_text()
    frames = page.locator(".flow .token").evaluate_all("all => all.map(one => one.getBoundingClientRect().toJSON())")
    assert all(one["right"] < two["left"] + 1 or one["bottom"] <= two["top"] + 1 for one, two in pairwise(frames))
    for part in ("head-view", "grid-card", "predictions"):  # what is saved is well-formed, whatever the labels are
        with page.expect_download() as download:
            page.locator(f".{part}").get_by_role("button", name="SVG").click()
        root = ElementTree.parse(download.value.path()).getroot()
        assert "<b>bytes" in root.findall(".//{http://www.w3.org/2000/svg}text")[0].text
    page.fill("textarea", "   ")  # which the tokenizer reads
    settled(page, lambda: page.locator(".flow .token").count() == 3)


@pytest.mark.all
@pytest.mark.parametrize("width", [390, 820, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_window(watch: Watch, address: str, width: int, scheme: str) -> None:
    page = watch.open(address, width, 900, color_scheme=scheme)
    assert page.evaluate_handle("document.documentElement.scrollWidth").json_value() <= width
    background = page.locator(".explorer").evaluate("one => getComputedStyle(one).backgroundColor")
    assert background == {"light": "rgb(251, 250, 247)", "dark": "rgb(18, 20, 25)"}[scheme]
    # 0 has the colour of the page, so that no theme makes noise of it: the corner above the diagonal.
    corner = page.locator('canvas[data-map="net"]').evaluate(
        "canvas => [...canvas.getContext('2d').getImageData(canvas.width - 1, 0, 1, 1).data]"
    )
    assert corner[:3] == {"light": [250, 249, 246], "dark": [22, 24, 29]}[scheme]


@pytest.mark.all
def test_heads_are_named(watch: Watch, served: Serve, llama: Any) -> None:
    """Of six signal heads in groups, heads 4 to 6 share the map of noise head 2."""
    page = watch.open(served(explorer_of(make("diff_v2"), llama)))
    title = page.locator("#head-title").inner_text()
    assert "shares key/value head" in title
    assert "a λ for every token" in title
    assert "Llama" in page.locator(".grid-card").nth(1).inner_text()
    assert "8 heads over 4 key/value heads" in page.locator("footer").inner_text()
    page = watch.open(served(explorer_of(make("diff_grouped"))))
    page.locator('[data-head="2.5"]').first.click()
    settled(page, lambda: "signal head 2 of noise head 2" in page.locator("#head-title").inner_text())
    captions = ["A₁", "A₂ of noise head 2", "A₁ − λA₂"]
    settled(page, lambda: page.locator("figure.map figcaption").all_inner_texts() == captions)
    assert "signal head 3 of noise head 1" in str(page.locator('[data-head="1.3"]').first.get_attribute("title"))
    many = explorer_of(make("diff", num_attention_heads=64, num_key_value_heads=64, hidden_size=256))
    page = watch.open(f"{served(many)}#text={TEXT}&left=2.28")
    frame, head = (page.locator(one).bounding_box() for one in (".scroll", ".chosen"))
    assert frame["x"] < head["x"] < head["x"] + head["width"] < frame["x"] + frame["width"]
    assert page.evaluate_handle("scrollY").json_value() == 0


def test_the_saved_page_works_without_a_server(watch: Watch, explorer: Explorer, saved: Path) -> None:
    page = watch.open(saved.as_uri())
    page.locator('[data-head="2.3"]').first.click()
    page.fill("#lambda-factor", "0.35")
    expected = explorer.run({"text": TEXT, "lambdas": {"factor": 0.35}, "answer": ANSWER})
    settled(page, lambda: measure(page, "Loss on the text")[0] == f"{expected['loss']:.3f}")
    maps = attention_maps(make("diff"), torch.tensor([TOKENS]))[1]
    assert maps.first is not None
    assert maps.second is not None
    lam = 0.35 * make("diff").model.layers[1].self_attn.lam().item()
    row = maps.first[0, 2, 10] - lam * maps.second[0, 2, 10]
    settled(page, lambda: weights(page) == [pytest.approx(weight, abs=1.1e-3) for weight in row.tolist()])
    overlap = torch.minimum(maps.first[0], lam * maps.second[0]).sum(-1).clamp(min=0).mean(-1)
    cells = ".grid-card:first-child .grid-row:nth-child(2) .numbers span:first-child"
    settled(page, lambda: [abs(x) for x in percents(page, cells)] == [round(100 * x) for x in overlap.tolist()])
    assert watch.asked == {saved.as_uri()}


@pytest.mark.all
@pytest.mark.parametrize(("slider", "place"), [("layer", {"layers": {"2": 0.25}}), ("head", {"heads": {"2.3": 0.25}})])
def test_a_saved_page_knows_what_one_moved_lambda_predicts(
    watch: Watch, explorer: Explorer, saved: Path, slider: str, place: dict[str, Any]
) -> None:
    """At the recorded step next to it, which it names; of two that are moved it says that it does not know."""
    page = watch.open(saved.as_uri())
    page.locator('[data-head="2.3"]').first.click()
    page.locator("summary").click()
    page.fill(f"#lambda-{slider}", "0.29")
    expected = explorer.run({"text": TEXT, "lambdas": place, "answer": ANSWER})
    settled(page, lambda: measure(page, "Loss on the text")[0] == f"{expected['loss']:.3f}")
    assert measure(page, "KL to")[0] == f"{expected['divergence']:.3f} nats"
    assert "was recorded at λ = 0.25" in page.locator(".finer").inner_text()
    page.locator('[data-head="1.1"]').first.click()
    page.fill("#lambda-head", "0.5")
    settled(page, lambda: "was not recorded in this saved page" in page.locator(".predictions").inner_text())
    assert page.locator(".bars").count() == 0
    page.get_by_role("button", name="All as learned").click()
    settled(page, lambda: page.locator(".bars").count() == 1)


@pytest.mark.all
def test_both_models_write_on_in_a_saved_page(watch: Watch, explorer: Explorer, saved: Path) -> None:
    page = watch.open(saved.as_uri())
    step = page.get_by_role("button", name="Step")
    for count in (12, 13):
        step.click()
        settled(page, lambda count=count: page.locator(".flow .token").count() == count)
    tokens = make("diff").generate(torch.tensor([TOKENS]), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert page.locator(".written").nth(0).inner_text().split()[1:] == [
        f"w{token}" for token in tokens[0, 11:].tolist()
    ]
    layer, head = map(int, re.findall(r"\d+", page.locator("#head-title").inner_text())[:2])
    maps = attention_maps(make("diff"), tokens)[layer - 1].difference[0, head - 1]
    settled(page, lambda: weights(page) == [pytest.approx(weight, abs=1.1e-3) for weight in maps[12].tolist()])
    loss = explorer.run({"tokens": tokens[0].tolist()})["loss"]
    assert measure(page, "Loss on the text")[0] == f"{loss:.3f}"
    settled(page, lambda: re.search(r"left-added=\d+%2C\d+&", page.url) is not None)  # both tokens
    again = watch.open(page.url)
    settled(again, lambda: again.locator(".flow .token").count() == 13)
    again.fill("#lambda-factor", "0.1")  # what was written belongs to the learned λ
    settled(again, lambda: again.locator(".flow .token").count() == 11)
    assert again.get_by_role("button", name="Step").is_disabled()
    # A link cannot put another text beside the recorded maps, nor other tokens.
    other = watch.open(f"{saved.as_uri()}#text=w1+w2&left-added=1,2,3&answer=1,0,1")
    assert other.locator("textarea").input_value() == TEXT
    settled(other, lambda: other.locator(".flow .token").count() == 14)
    assert other.locator(".flow .token").nth(11).inner_text() == f"w{tokens[0, 11]}"
    for count in range(14, 11 + 16 + 1):
        step.click()
        settled(page, lambda count=count: page.locator(".flow .token").count() == count)
    settled(page, step.is_disabled)


@pytest.mark.all
def test_one_page_leads_to_every_pair_of_models(watch: Watch, served: Serve, explorer: Explorer) -> None:
    page = watch.open(served({"first": explorer, "second": explorer_of(make("diff_v2"), text="w1 w2")}))
    assert page.locator(".pairs [aria-current=page]").inner_text() == "first"
    page.get_by_role("link", name="second").click()
    page.wait_for_selector(READY)
    assert "one" in page.locator("footer").inner_text()
    assert page.locator(".pairs [aria-current=page]").inner_text() == "second"
    settled(page, lambda: page.locator(STRIP).count() == 8)  # it asks nothing any more


WIDGET = """
<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<body data-jp-theme-light="false"><style id="css"></style><div id="cell"></div>
<script>
async function begin(esm, css, described) {
  document.getElementById("css").textContent = css;
  const { default: widget } = await import(URL.createObjectURL(new Blob([esm], { type: "text/javascript" })));
  const listeners = [];
  const model = {
    get: (name) => ({ described })[name],
    on: (event, listener) => event === "msg:custom" && listeners.push(listener),
    send: async (message) => {
      const { content, bytes } = await window.kernel(message);
      const buffers = bytes ? [new DataView(Uint8Array.from([0, 0, 0, ...bytes]).buffer, 3)] : [];
      listeners.forEach((listener) => listener(content, buffers));
    },
  };
  window.clean = widget.render({ model, el: document.getElementById("cell") });
  window.again = () => {
    const el = document.body.appendChild(document.createElement("div"));
    const clean = widget.render({ model, el });
    window.cleanAgain = () => {
      clean();
      el.remove();
    };
  };
}
</script>
"""


@pytest.mark.all
def test_answers_that_come_late_belong_to_the_text_that_was_asked_for(watch: Watch, address: str) -> None:
    """They neither hide that the text is empty now, nor add a token to another text."""
    page, held = watch.open(address), list[Any]()
    page.route("**/api/run", lambda route: held.append(route), times=1)
    page.fill("textarea", "w1 w2")
    settled(page, lambda: len(held) > 0)
    page.fill("textarea", " ")
    page.wait_for_timeout(400)  # until it is asked for
    held.pop().continue_()
    settled(page, lambda: page.locator(".stale .flow .token").count() == 2)
    page.wait_for_load_state("networkidle")
    assert "The text has no tokens" in page.locator(".refusal").inner_text()
    watch.wrong.clear()  # the refusals

    page = watch.open(address)
    page.route("**/api/next", lambda route: held.append(route))
    held.clear()
    page.get_by_role("button", name="Step").click()
    settled(page, lambda: len(held) == 2)
    page.fill("textarea", "w1 w2")
    settled(page, lambda: page.locator(".flow .token").count() == 2)
    with page.expect_response("**/api/next"):
        for route in held:
            route.continue_()
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(400)  # until the address is written
    assert page.locator(".flow .token").count() == 2
    assert "added" not in page.url


@pytest.mark.all
def test_no_numbers_of_another_text_stay_beside_a_new_one(watch: Watch, served: Serve) -> None:
    """Where the model on the right refuses what the one on the left takes; and where nothing is written."""
    explorer = explorer_of(make("diff").float(), make("softmax", max_position_embeddings=12).float())
    page = watch.open(served(explorer))
    assert page.locator(".flow .token").count() == 11
    before = page.locator(".panels canvas[data-map]").count()
    page.fill("textarea", " ".join(["w1", "w2"] * 7))
    page.wait_for_selector(".refusal")
    settled(page, lambda: page.locator(".flow .token").count() == 14)
    settled(page, lambda: page.locator(".panels canvas[data-map]").count() == before - 1, "the other text's map stays")
    assert "the context of other holds 12" in page.locator(".refusal").inner_text()
    assert watch.wrong.pop().startswith("Failed to load resource")  # the refusals
    watch.wrong.clear()
    page.fill("textarea", TEXT)
    settled(page, lambda: page.locator(".panels canvas[data-map]").count() == before)
    settled(page, lambda: page.locator(".refusal").count() == 0)
    page.fill("textarea", " ")
    settled(page, lambda: "The text has no tokens" in page.locator(".refusal").inner_text())
    watch.wrong.clear()


def test_an_image_under_its_patches(watch: Watch, served: Serve, image_pair: Explorer, tmp_path: Path) -> None:
    page = watch.open(served(image_pair))
    assert page.locator("textarea, #next-token").count() == 0
    page.locator(".thumb").nth(1).click()
    page.locator(".flow .patches .token").nth(2).click()  # patch 2,1, after two other tokens
    page.mouse.move(0, 0)  # a token under the pointer would be shown in its place
    layer, head = map(int, re.findall(r"\d+", page.locator("h2#head-title").inner_text())[:2])
    place = {"layer": layer, "head": head}
    maps, _ = decode_maps(image_pair.head_map({"text": "Image 2", **place}))
    settled(page, lambda: weights(page) == [pytest.approx(w, abs=1.1e-3) for w in maps.difference[0, 4].tolist()])
    assert chosen_row(page) == 4
    assert page.locator("#next-title").inner_text() == "Class"
    patches = page.locator(".flow .patches")
    assert patches.evaluate("one => one.style.gridTemplateColumns") == "repeat(2, 1fr)"
    assert image_pair.examples[1].picture in patches.evaluate("one => one.style.backgroundImage")
    first, _ = decode_maps(image_pair.head_map({"text": "Image 2", **place}))
    read = "one => [...one.getContext('2d').getImageData(0, 0, 8, 8).data].filter((_, i) => i % 4 === 0)"
    reds = torch.tensor(page.locator("canvas[data-map=first]").evaluate(read)).view(8, 8)
    # Of a blue scale the larger weight has less red, above the diagonal as well.
    weight, red = first.first[0][0].argsort(), reds[0].argsort(descending=True)
    assert weight.tolist() == red.tolist()
    for side in ("left", "right"):
        answer = image_pair.run({"side": side, "text": "Image 2", "picture": 8})
        page.locator(f"[data-rollout={side}]").wait_for()  # that of the image before is hidden
        shares = page.locator(f"[data-rollout={side}] .token").evaluate_all("all => all.map(one => Number(one.title))")
        assert shares == [pytest.approx(share, abs=6e-4) for share in answer["heads"]["rollout"][4][2:]]
    for key, row in {"ArrowDown": 6, "ArrowUp": 4, "Home": 0}.items():  # patches 3,1 and 2,1, and another token
        page.locator(".flow").press(key)
        settled(page, partial(lambda row: chosen_row(page) == row, row))
    page.locator(".flow").press("ArrowDown")
    settled(page, lambda: chosen_row(page) == 2)  # the first patch
    file = tmp_path / "images.html"
    file.write_text(recorded_page(image_pair), encoding="utf-8")
    saved = watch.open(file.as_uri())
    maps, _ = decode_maps(image_pair.head_map({"text": "Image 1", **place}))
    settled(saved, lambda: weights(saved) == [pytest.approx(w, abs=1.1e-3) for w in maps.difference[0, 0].tolist()])
    assert saved.locator("[data-rollout]").count() == 2


@pytest.mark.all
def test_the_widget_of_a_notebook(watch: Watch, tmp_path: Path, explorer: Explorer) -> None:
    """In a page that does what anywidget does: it hands over the code, the state and messages with buffers."""
    pytest.importorskip("anywidget")
    widget = explore(make("diff"), [f"w{number}" for number in range(29)], TEXT, compare=make("softmax"))
    sent: list[Any] = []
    widget.send = lambda content, buffers=(): sent.append({"content": content, "bytes": [*b"".join(buffers)]})

    def kernel(message: Any) -> Any:
        widget._handle_custom_msg(message, [])
        answer = sent.pop()
        return answer if answer["bytes"] else {"content": answer["content"]}

    file = tmp_path / "cell.html"
    file.write_text(WIDGET, encoding="utf-8")
    page = watch.open(file.as_uri(), wait=False)
    page.expose_function("kernel", kernel)
    page.evaluate("([esm, css, described]) => begin(esm, css, described)", [widget._esm, widget._css, widget.described])
    page.wait_for_selector(READY)
    page.fill("[id$=lambda-factor]", "0.3")
    expected = explorer.run({"text": TEXT, "lambdas": {"factor": 0.3}})
    settled(page, lambda: measure(page, "Loss on the text")[0] == f"{expected['loss']:.3f}")
    page.get_by_role("button", name="Step").click()
    settled(page, lambda: page.locator(".flow .token").count() == 12)
    assert page.url == file.as_uri()  # the address is the notebook's
    assert page.locator("#cell").get_attribute("data-theme") == "dark"
    page.evaluate("() => window.again()")  # another view of it
    page.wait_for_function("document.querySelectorAll('.explorer[data-ready=true]').length === 2")
    ids = page.evaluate("() => [...document.querySelectorAll('.explorer [id]')].map(({ id }) => id)")
    assert len(set(ids)) == len(ids)
    labelled = "area => area.labels[0].closest('.explorer').contains(area)"
    assert [area.evaluate(labelled) for area in page.locator("textarea").all()] == [True, True]
    page.evaluate("() => window.cleanAgain()")
    page.fill("textarea", "nothing")
    page.wait_for_selector(".refusal")
    page.evaluate("clean()")
    assert page.locator("#cell").inner_text() == ""


@pytest.mark.all
def test_the_demos_report_holds_the_saved_page(watch: Watch, saved: Path, tmp_path: Path) -> None:
    """Also where it is sent alone; the report itself can run nothing, and its frame cannot reach it."""
    run = tmp_path / "diff"
    run.mkdir()
    (tmp_path / "sent").mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 0.9}\n', encoding="utf-8")
    view = {"words": ["k1", "v1", "k1"], "answer": 1, "layer": 1, "head": 1}
    view |= {key: [[1, 0, 0], [0.5, 0.5, 0], [0, 1, 0]] for key in ("learned", "without")}
    shared = {"name": "noise/accuracy_by_lambda", "variant": "diff", "value": 0.5}
    records = [Result(**shared, coordinates=Coordinates(factor=factor)) for factor in (0.0, 1.0)]
    write_json(tmp_path / "results.json", capture_results("A demo", {"view": view}, records, "cpu"))
    shutil.copy(saved, tmp_path / "explorer.html")
    sent = build_run_report([tmp_path]).rename(tmp_path / "sent" / "report.html")
    page = watch.open(sent.as_uri(), wait=False)
    frame = page.frame_locator("iframe")
    page.locator("iframe").scroll_into_view_if_needed()
    frame.locator(READY).wait_for()
    before = frame.locator(".measures").inner_text()
    frame.locator("input[type=range]").first.fill("0")
    settled(page, lambda: frame.locator(".measures").inner_text() != before)
    assert frame.get_by_role("button", name="Copy link").count() == 0, "the address is the report's"
    with page.expect_download() as download:
        frame.get_by_role("button", name="PNG").first.click()
    assert Path(download.value.path()).stat().st_size > 1000
    (inner,) = [each for each in page.frames if each != page.main_frame]
    assert inner.evaluate("() => { try { return parent.document.title } catch (error) { return error.name } }") == (
        "SecurityError"
    )
    assert page.evaluate("() => document.scripts.length") == 0
    page.context.route("https://arxiv.org/**", lambda route: route.abort())
    with page.context.expect_page():  # and not in the frame, where the report's policy would block it
        frame.get_by_role("link").click()
    assert frame.locator(READY).count() == 1
