"""Times of the attention explorer, in chromium: playwright and chromium have to be installed.

    python lab/benchmarks/explorer_speed.py                # on an idle machine; minutes

Each case types a text that the explorer has not seen, and waits until the page shows the heads of the differential
model, and then those of the other one, too. The page waits .35 s for more typing.
"""

import argparse
import platform
import shutil
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from playwright.sync_api import sync_playwright

from diff_lab.results_files import command_line, device_name
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.cli.explored_checkpoints import build_explorer, shipped_pairs
from diff_transformer.explorer import Example, ExploredModel, Explorer, Side, WordVocabulary
from diff_transformer.explorer.server import ExplorerServer
from diff_transformer.utils.servers import bound_socket, in_short_lived_thread

VOCABULARY = 257  # of the models with random weights: the multiply-adds of a large one have no part in the limits
# The time in ms, and from now on in `shown` that at which each grid of heads was finished last, 0 while it is not.
WATCH = """() => {
  const grids = [...document.querySelectorAll("[role=grid]")];
  window.shown = grids.map(() => 0);
  grids.forEach((grid, number) => new MutationObserver(() => {
    window.shown[number] = grid.getAttribute("aria-busy") === "false" ? performance.now() : 0;
  }).observe(grid, { attributes: true, attributeFilter: ["aria-busy"] }));
  return performance.now();
}"""


def random_pair(layers: int, heads: int, width: int, context: int) -> Explorer:
    """A DIFF Transformer with so many heads of so many layers beside a Transformer of its size, with random weights."""

    def side(kind: str) -> Side:
        torch.manual_seed(0)
        config = DiffTransformerConfig(
            attention_type=kind,
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=8 * width // 3 // 16 * 16,
            num_hidden_layers=layers,
            num_attention_heads=2 * heads,
            max_position_embeddings=context,
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = DiffTransformerForCausalLM(config).eval().to(device)
        return Side(ExploredModel(model, kind), WordVocabulary([f"w{number}" for number in range(VOCABULARY)]))

    return Explorer(side("diff"), side("softmax"), [Example("what the page opens with", "w1 w2 w3")])


def shipped_pair() -> Explorer:
    """The package's pair that reads words, any of which make a text."""
    return build_explorer(*shipped_pairs()["needles"], None, None)


def text_of(explorer: Explorer, length: int, number: int) -> str:
    """A text of so many tokens, another one for each number."""
    vocabulary, model = explorer.sides["left"].vocabulary, explorer.sides["left"].model
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, min(model.vocab_size, VOCABULARY), (length,), generator=generator).tolist()
    text = vocabulary.decode(tokens)
    if len(vocabulary.encode(text)) != length:
        raise SystemExit(f"A text of {length} tokens has {len(vocabulary.encode(text))} when it is read.")
    return text


@contextmanager
def page_of(explorer: Explorer) -> Iterator[tuple[Any, Counter[str]]]:
    """The explorer's page in chromium, at rest, and how many requests it makes."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    server = ExplorerServer({"": explorer}, bound_socket("127.0.0.1", 0))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(600_000)
            asked: Counter[str] = Counter()
            for event in ("request", "requestfinished"):
                page.on(event, lambda _, event=event: asked.update([event]))
            page.goto(server.address)
            wait_for_rest(page, asked)
            yield page, asked
            browser.close()
    finally:
        server.stop()
        thread.join()


def wait_for_rest(page: Any, asked: Counter[str]) -> None:
    """Until all that was asked is answered and nothing more is asked for a while."""
    quiet = 0
    while quiet < 20:
        page.wait_for_timeout(50)
        quiet = quiet + 1 if 0 < asked["request"] == asked["requestfinished"] else 0


def seconds_on_page(explorer: Explorer, length: int, page: Any, asked: Counter[str], number: int) -> list[float]:
    """From typing until the heads of the one model are shown, and those of both."""
    text = text_of(explorer, length, number)
    start = page.evaluate(WATCH)
    page.fill("textarea", text)
    shown = "words => document.querySelector('.flow').textContent.replaceAll(/\\s/g, '') === words"
    page.wait_for_function(shown, arg="".join(text.split()))
    page.wait_for_function("() => window.shown.every(time => time)")
    wait_for_rest(page, asked)
    return [(time_shown - start) / 1000 for time_shown in page.evaluate("() => window.shown")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=768, help="hidden size of the model of 28 × 12 heads")
    settings = parser.parse_args()
    width = settings.width
    shipped = in_short_lived_thread(shipped_pair)
    length = min(128, shipped.sides["left"].model.most_tokens)
    cases: list[tuple[str, Callable[[], Explorer], int]] = [
        (f"the package's {shipped.sides['left'].model.name}, {length} tokens", lambda: shipped, length),
        ("8 × 4 heads of 64, 128 tokens", lambda: random_pair(8, 4, 512, 2048), 128),
        (f"28 × 12 heads of {width // 24}, 512 tokens", lambda: random_pair(28, 12, width, 512), 512),
        ("8 × 4 heads of 64, 2,048 tokens", lambda: random_pair(8, 4, 512, 2048), 2048),
    ]
    print("| | grid on the page, s | both grids, s |\n|---|---|---|", flush=True)
    for name, make, length in cases:
        explorer = in_short_lived_thread(make)
        with page_of(explorer) as (page, asked):
            # The first round builds kernels and finds memory.
            times = [seconds_on_page(explorer, length, page, asked, n) for n in range(settings.rounds + 1)][1:]
        medians = [f"{statistics.median(values):.3g}" for values in zip(*times, strict=True)]
        print(f"| {name} | {' | '.join(medians)} |", flush=True)
    print(
        f"\nMedian of {settings.rounds} rounds; DIFF beside a Transformer, both of the same size, in float32. "
        f"{device_name()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"python {platform.python_version()}, `{command_line()}`."
    )


if __name__ == "__main__":
    main()
