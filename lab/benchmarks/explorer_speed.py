"""Times of the attention explorer, in chromium where playwright and chromium are installed.

    python lab/benchmarks/explorer_speed.py                # on an idle machine; minutes
    python lab/benchmarks/explorer_speed.py --rounds 5 --output lab/benchmarks/explorer-cpu.md

Each case types a text that the explorer has not seen, and waits. "numbers" is the first answer (next token, loss, KL),
"grid" the answer with the pictures and numbers of all heads, "map" one head in full with its size on the way to the
page: these three without a browser. "grid on the page" is from typing until the page shows the heads of the
differential model, and "both grids" until it shows those of the other one, too. The page waits .35 s for more typing.
"""

import argparse
import platform
import shutil
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from diff_lab.results_files import command_line, device_name
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.cli.explored_checkpoints import build_explorer, shipped_pairs
from diff_transformer.explorer import Example, ExploredModel, Explorer, Side, WordVocabulary
from diff_transformer.explorer.server import ExplorerServer
from diff_transformer.utils.bound_socket import bound_socket
from diff_transformer.utils.files import write_atomically
from diff_transformer.utils.short_lived_threads import in_short_lived_thread

VOCABULARY = 257  # of the models with random weights: the multiply-adds of a large one have no part in the limits
PICTURE_SIDE = 32
# The time in ms, and from now on in `shown` that at which each grid of heads was finished last, 0 while it is not.
WATCH = """() => {
  const grids = [...document.querySelectorAll("[role=grid]")];
  window.shown = grids.map(() => 0);
  grids.forEach((grid, number) => new MutationObserver(() => {
    window.shown[number] = grid.getAttribute("aria-busy") === "false" ? performance.now() : 0;
  }).observe(grid, { attributes: true, attributeFilter: ["aria-busy"] }));
  return performance.now();
}"""


@dataclass
class Case:
    """Two models, a number of tokens, and the time in seconds that the page may take, if there is a limit."""

    name: str
    make: Callable[[], Explorer]
    length: int
    limit: float | None
    times: dict[str, list[float]] = field(default_factory=dict)


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
    """The package's pair with the longest context."""
    explorers = [build_explorer(*pair, None, None) for pair in shipped_pairs().values()]
    return max(explorers, key=lambda explorer: explorer.sides["left"].model.most_tokens)


def text_of(explorer: Explorer, length: int, number: int) -> str:
    """A text of so many tokens, another one for each number."""
    vocabulary, model = explorer.sides["left"].vocabulary, explorer.sides["left"].model
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, min(model.vocab_size, VOCABULARY), (length,), generator=generator).tolist()
    text = vocabulary.decode(tokens)
    if len(vocabulary.encode(text)) != length:
        raise SystemExit(f"A text of {length} tokens has {len(vocabulary.encode(text))} when it is read.")
    return text


def timed(ask: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    answer = ask()
    return time.perf_counter() - start, answer


def measure_answers(case: Case, explorer: Explorer, rounds: int) -> None:
    """Measure the times of the three questions, each time of a text that is new."""
    heads = explorer.sides["left"].model.heads
    for number in range(rounds):
        question = {"text": text_of(explorer, case.length, number)}
        numbers, _ = timed(partial(explorer.run, question))
        grid, _ = timed(partial(explorer.run, {**question, "picture": PICTURE_SIDE}))
        head_map, data = timed(partial(explorer.head_map, {**question, "layer": 1, "head": heads}))
        times = {"numbers": numbers, "grid": grid, "map": head_map, "map, MB": len(data) / 1e6}
        for name, value in times.items():
            case.times.setdefault(name, []).append(value)


@contextmanager
def page_of(explorer: Explorer) -> Iterator[Any]:
    """The explorer's page in chromium, at rest, and how many requests it makes; None where there is no browser."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        yield None
        return
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


def measure_page(case: Case, explorer: Explorer, page: Any, asked: Counter[str], number: int) -> None:
    text = text_of(explorer, case.length, number)
    start = page.evaluate(WATCH)
    page.fill("textarea", text)
    shown = "words => document.querySelector('.flow').textContent.replaceAll(/\\s/g, '') === words"
    page.wait_for_function(shown, arg="".join(text.split()))
    page.wait_for_function("() => window.shown.every(time => time)")
    wait_for_rest(page, asked)
    for name, time_shown in zip(("page, grid", "page, both"), page.evaluate("() => window.shown"), strict=True):
        case.times.setdefault(name, []).append((time_shown - start) / 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=768, help="hidden size of the model of 28 × 12 heads")
    parser.add_argument("--output", type=Path, help="write the table there, too")
    settings = parser.parse_args()
    width = settings.width
    shipped = in_short_lived_thread(shipped_pair)
    length = min(128, shipped.sides["left"].model.most_tokens)
    cases = [
        Case(f"the package's {shipped.sides['left'].model.name}, {length} tokens", lambda: shipped, length, 1.0),
        Case("8 × 4 heads of 64, 128 tokens", lambda: random_pair(8, 4, 512, 2048), 128, 1.0),
        Case(f"28 × 12 heads of {width // 24}, 512 tokens", lambda: random_pair(28, 12, width, 512), 512, 3.0),
        Case("8 × 4 heads of 64, 2,048 tokens", lambda: random_pair(8, 4, 512, 2048), 2048, None),
    ]
    columns = ["numbers", "grid", "map", "map, MB", "page, grid", "page, both"]
    units = ["numbers, s", "grid, s", "map, s", "map, MB", "grid on the page, s", "both grids, s"]
    lines = [f"| | {' | '.join(units)} | limit, s |", "|---|" + "---|" * (len(columns) + 1)]
    print("\n".join(lines), flush=True)
    for case in cases:
        explorer = in_short_lived_thread(case.make)
        in_short_lived_thread(partial(measure_answers, case, explorer, settings.rounds + 1))
        with page_of(explorer) as opened:
            for number in range(settings.rounds + 1) if opened is not None else ():
                page, asked = opened
                measure_page(case, explorer, page, asked, 1000 + number)
        # The first round builds kernels and finds memory.
        medians = [f"{statistics.median(case.times[name][1:]):.3g}" if name in case.times else "–" for name in columns]
        lines.append(f"| {case.name} | {' | '.join(medians)} | {'–' if case.limit is None else f'{case.limit:g}'} |")
        print(lines[-1], flush=True)
    told = (
        f"Median of {settings.rounds} rounds; DIFF beside a Transformer, both of the same size, in float32. "
        f"{device_name()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"python {platform.python_version()}, `{command_line()}`."
    )
    print(f"\n{told}")
    if settings.output is not None:
        write_atomically(settings.output, "\n".join([*lines, "", told, ""]))


if __name__ == "__main__":
    main()
