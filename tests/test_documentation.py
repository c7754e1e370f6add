"""What the README and the pages of docs/ say of names, commands, files and numbers is true, and their code runs."""

import doctest
import functools
import importlib
import inspect
import os
import re
import runpy
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer

import diff_transformer
import fill_readme
from diff_lab.cli import app as lab_app
from diff_lab.data import byte_tokenizer
from diff_lab.experiments.definitions import EXPERIMENTS, SHOWN_BY
from diff_lab.measure.document_losses import WHOLE
from diff_lab.report.findings import findings
from diff_lab.results_files import read_results
from diff_lab.train import load_recipe, shipped_recipes
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.cli import app
from diff_transformer.cli.explored_checkpoints import read_examples
from diff_transformer.convert import convert_from
from diff_transformer.utils.files import read_json
from page_sections import replace_sections
from site_pages import pages_and_pictures
from tiny_model import make, tokens

ROOT = Path(__file__).resolve().parents[1]
# The site's, and not what a tutorial that was opened in Jupyter has written.
OF_THE_SITE = [name for name in pages_and_pictures(ROOT) if name.startswith("docs/") and name.endswith(".md")]
OTHERS = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "llms.txt")
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in (*OF_THE_SITE, *OTHERS)}
# Pages whose code needs files or a server, with the tests that run it.
WITH_TESTS_OF_THEIR_OWN = {
    "docs/training.md": "lab/tests/test_training_page.py",
    "docs/serving.md": "tests/test_serving_page.py",
    "docs/dex.md": "tests/test_documentation.py",  # below
    "docs/converting.md": "tests/test_documentation.py",
    "docs/explorer.md": "tests/test_documentation.py",
}
FENCES = [
    (page, language, code)
    for page, text in PAGES.items()
    for language, code in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
]
BLOCKS = [
    (page, code)
    for page, language, code in FENCES
    if language == "python" and page not in WITH_TESTS_OF_THEIR_OWN and "StaticCache" not in code  # as below
]
# Lines of indented code and of the README's blocks, which are commands; a backslash continues an indented one.
SHELL = [
    (page, line)
    for page, text in PAGES.items()
    for line in re.findall(
        r"^    ((?:diff-transformer|diff-lab|torchrun|accelerate|python|pip|make|npm) [^\n]*)",
        re.sub(r" *\\\n +", " ", text),
        flags=re.MULTILINE,
    )
]
README_SHELL = [code for page, language, code in FENCES if (page, language) == ("README.md", "bash")]
SHELL += [("README.md", line) for code in README_SHELL for line in code.splitlines()]
# The names that the API pages document, and of the library's those that have an example, by the last part of each.
DOCUMENTED = {name for text in PAGES.values() for name in re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE)}
PUBLIC = {name.rpartition(".")[2]: name for name in sorted(DOCUMENTED) if name.startswith("diff_transformer.")}
NOT_RUN = {
    "phi4flash_attention",  # reads a folder of gigabytes
    *("from_timm", "timm_state_dict"),  # timm does not load everywhere
    *("explore", "explore_images"),  # show a notebook's widget
    "export_onnx",  # takes seconds
}
PROGRAMS: dict[str, Any] = {"diff-transformer": app, "diff-lab": lab_app}


def code_of(page: str, language: str = "python") -> list[str]:
    return [code for one, other, code in FENCES if (one, other) == (page, language)]


def run_code(code: str, page: str, **names: Any) -> dict[str, Any]:
    namespace = {"__name__": "page", **names}
    exec(compile(code, page, "exec"), namespace)
    return namespace


def named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example_that_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = {"torch": torch, "transformers": transformers, "Path": Path, **{key: named(PUBLIC[key]) for key in PUBLIC}}
    text, printed = inspect.cleandoc(known[name].__doc__ or ""), []
    example = doctest.DocTestParser().get_doctest(text, known, name, None, None)
    outcome = doctest.DocTestRunner().run(example, out=printed.append)
    assert not outcome.failed, "".join(printed)
    assert example.examples
    assert outcome.attempted == (0 if name in NOT_RUN else len(example.examples))


def test_the_api_has_every_public_name() -> None:
    assert all(named(name).__doc__ for name in DOCUMENTED)
    for package in ("diff_transformer", "diff_transformer.ops", "diff_transformer.nn"):
        assert set(importlib.import_module(package).__all__) - {"__version__"} <= PUBLIC.keys()


@pytest.mark.parametrize(("page", "code"), BLOCKS, ids=[page for page, _ in BLOCKS])
def test_code_runs(page: str, code: str) -> None:
    run_code(code, page)


def test_there_is_no_code_that_no_test_runs() -> None:
    assert {page for page, _ in BLOCKS} >= {"README.md", "docs/index.md", "docs/own-model.md", "docs/transformers.md"}
    for page, language, _ in FENCES:
        assert language == "python" or page in {*WITH_TESTS_OF_THEIR_OWN, "README.md"}, f"{page}: {language}"
    for page, file in WITH_TESTS_OF_THEIR_OWN.items():
        assert Path(page).name in (ROOT / file).read_text(encoding="utf-8")


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a page begins: a folder with that of a Llama, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, eos_token_id=256)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained("llama")
    byte_tokenizer().save_pretrained("llama")
    return tmp_path


def test_the_code_of_dex_runs(llama: Path) -> None:
    """With two steps in place of a hundred."""
    convert_from("llama", Path("llama"), Path("llama-dex"), attention_type="dex")
    code, freezing = code_of("docs/dex.md")
    shorter = code.replace("max_steps=100", "max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True")
    assert shorter != code
    tokens = torch.arange(8)
    names = run_code(shorter, "docs/dex.md", dataset=[{"input_ids": tokens, "labels": tokens}] * 4)
    assert (llama / "trained" / "model.safetensors").is_file()
    model = run_code(freezing, "docs/dex.md", **names)["model"]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"model.layers.0.self_attn.dex.{name}" for name in ("weight", "lam.learned")}


@pytest.mark.usefixtures("llama")
def test_what_was_converted_is_loaded(caplog: Any) -> None:
    convert_from("llama", Path("llama"), Path("DST"), attention_type="diff_v2")
    (code,) = code_of("docs/converting.md")
    names, ours = run_code(code, "docs/converting.md"), diff_transformer.DiffTransformerForCausalLM
    model = names["model"]
    assert names["text"].startswith("Call me")
    assert (type(model), model.config.attention_type, model.dtype) == (ours, "diff_v2", torch.bfloat16)
    auto = transformers.AutoModelForCausalLM
    assert type(auto.from_pretrained("DST", trust_remote_code=True)) is type(ours.from_pretrained("DST")) is ours
    # What the page warns of.
    assert type(auto.from_pretrained("llama")) is transformers.LlamaForCausalLM
    transformers.utils.logging.enable_propagation()
    try:
        assert ours.from_pretrained("llama").config.attention_type == "diff"
    finally:
        transformers.utils.logging.disable_propagation()
    assert "a model of type `llama`" in caplog.text


def test_the_examples_of_the_explorer_are_read(tmp_path: Path) -> None:
    (code,) = code_of("docs/explorer.md", "json")
    (tmp_path / "examples.json").write_text(code, encoding="utf-8")
    known = read_examples(tmp_path)
    (example,) = known.examples
    assert example.answer is not None
    words = example.text.split()
    assert (words[example.answer.query], words[example.answer.begin]) == ("k0", "v3")
    assert known.floor == 0.3


def page_commands() -> list[Any]:
    """Every command of ours on a page, as its words; of launchers from where ours begins."""
    found = []
    for page, line in SHELL:
        for part in line.split(" && "):
            # A part in brackets may be left out; what stands for one of several things is only text.
            words = shlex.split(part.replace("[", "").replace("]", ""), comments=True)
            if "diff_lab.train" in words:
                words = ["diff-lab", "train", *words[words.index("diff_lab.train") + 1 :]]
            if words[0] in PROGRAMS and len(words) > 1:
                found.append(pytest.param(words, id=f"{page}: {part.split('  ')[0]}"))
    return found


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the recipes of docs/training.md, which its commands name."""
    for name, recipe in zip(("mine", "further"), code_of("docs/training.md", "yaml"), strict=True):
        (tmp_path / f"{name}.yaml").write_text(recipe, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("recipes")
@pytest.mark.parametrize("words", page_commands())
def test_commands_are_as_the_page_has_them(words: list[str]) -> None:
    program, name, *arguments = words
    assert name in PROGRAMS[program].COMMANDS
    group: Any = typer.main.get_command(PROGRAMS[program].app)
    command = group.get_command(None, name)
    if name == "tokenizer":
        command = command.commands[arguments.pop(0)]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in arguments if word.startswith("-")} <= options
    positional = [word for word in arguments if not word.startswith("-")]
    if name == "reproduce" and positional and positional[0] != "NAME":
        assert positional[0] in {*EXPERIMENTS, *SHOWN_BY, "all"}
    if name in ("train", "plan", "prepare") and positional[0] != "RECIPE":
        load_recipe(positional[0], [word for word in positional[1:] if re.match(r"(model|data|train)\.\w+=", word)])


def test_every_command_is_on_its_page() -> None:
    listed = re.findall(r"^    diff-transformer (\w+)", PAGES["docs/command-line.md"], flags=re.MULTILINE)
    assert set(listed) == set(app.COMMANDS)


def test_other_programs_find_what_they_are_given() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    extras = {}
    for folder in (".", "./lab"):
        project = (ROOT / folder / "pyproject.toml").read_text(encoding="utf-8")
        listed = project.partition("[project.optional-dependencies]")[2]
        extras[folder] = set(re.findall(r"^([\w]+) = \[", listed, flags=re.MULTILINE))
    for page, line in SHELL:
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert words[1] in targets, f"{page}: {line}"
        if words[0] == "python" and words[1].endswith(".py") and "/" in words[1]:
            assert (ROOT / words[1]).is_file(), f"{page}: {line}"
        for folder, names in re.findall(r"\"(\.|\./lab)\[([\w,]+)\]\"", line):
            assert set(names.split(",")) <= extras[folder], f"{page}: {line}"


TUTORIALS = [file.relative_to(ROOT).as_posix() for file in ROOT.glob("docs/tutorials/*.py")]


@pytest.mark.parametrize("page", [*PAGES, *TUTORIALS])
def test_links_lead_to_files(page: str) -> None:
    for link in re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", (ROOT / page).read_text(encoding="utf-8")):
        if link != "explorer-page.html":  # made when the site is built
            assert (ROOT / page).parent.joinpath(link).exists(), link


def test_filled_in_numbers_are_those_that_were_measured(tmp_path: Path) -> None:
    """fill_readme.py, on a copy of what it reads and writes, changes nothing."""
    for name in ("docs", "lab/benchmarks", "lab/results"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "README.md", tmp_path)
    runpy.run_path(str(tmp_path / "lab" / "benchmarks" / "fill_readme.py"), run_name="__main__")
    for copy in tmp_path.rglob("*.md"):
        page = copy.relative_to(tmp_path)
        # The trained models are not copied: links to them lead out of the copy.
        text = copy.read_text(encoding="utf-8").replace(os.path.relpath(ROOT, copy.parent), "..")
        assert text == (ROOT / page).read_text(encoding="utf-8"), f"run lab/benchmarks/fill_readme.py for {page}"
    with pytest.raises(ValueError, match="must hold <!-- none --> … <!-- /none --> once"):
        replace_sections(tmp_path / "README.md", {"none": ""})


def test_no_number_is_of_a_checkout_with_changes() -> None:
    operator, model = read_json(fill_readme.OPERATOR), read_json(fill_readme.MODEL)
    dirty = {**model, "commit": f"{model['commit']}-dirty"}
    table = fill_readme.costs([(operator, model), (operator, dirty)], [None, None])
    assert "dirty" not in PAGES["README.md"] + table
    # Two of a checkout with changes, and those that no other library was measured beside.
    assert len(re.findall(r"\| – \|(?! – \|)", table)) == 2 + 3


def test_the_operator_is_also_relative_to_the_fastest_of_others() -> None:
    rows = [
        {"candidate": name, "ratio": ratio, "dtype": dtype, "pass": "forward", "shape": {"keys": 2048}}
        for dtype, ratios in (("float32", (0.6, 0.8, 1.5)), ("bfloat16", (0.6, 1.2, 1.5)))
        for name, ratio in zip(("auto", "softmax vLLM", "softmax zentorch"), ratios, strict=True)
    ]
    assert fill_readme._over_fastest({"rows": rows}, 2048) == "0.75 / 0.60"
    assert fill_readme._over_fastest({"rows": rows}, 512) == fill_readme._over_fastest(None, 2048) == "–"


def test_a_compiled_token_is_that_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    (_, code), model, prompt = code_of("docs/transformers.md"), make("diff").eval(), tokens()
    meant = model.generate(prompt, max_new_tokens=102, min_new_tokens=102, do_sample=False)[:, prompt.shape[1] :]
    written = run_code(code, "docs/transformers.md", torch=torch, model=model, prompt=prompt)["written"]
    assert torch.equal(torch.cat(written, 1), meant)


def test_decoding_is_relative_to_each_other_way() -> None:
    case = {"dtype": "int8", "shape": {"length": 2048}, "milliseconds": 12.34}
    ratios = {("diff", "softmax"): 0.9, ("diff", "Llama"): 1.5, ("Llama", "softmax"): 0.7, ("DiffLlama", "Llama"): 2.0}
    ratios |= {("diff, compiled", "softmax"): 0.6, ("diff, compiled", "Llama, compiled"): 1.1}
    ratios |= {("diff, compiled", "CTranslate2"): 1.2}
    rows = [
        {**case, "candidate": name, "against": against, "ratio": ratio} for (name, against), ratio in ratios.items()
    ]
    document = {**read_json(fill_readme.MODEL), "rows": rows}
    header, _, *lines = fill_readme.decoding(document).splitlines()[:4]
    assert lines[0] == "| int8, 2,048 keys | 0.90 | 1.50 | – | 12.3 |"
    assert lines[1] == "| int8, 2,048 keys, compiled | – | 1.10 | 1.20 | 12.3 |"
    assert {header.count("|")} == {line.count("|") for line in lines}


def verdicts(experiment: str, name: str, variant: str, against: str = "softmax") -> set[str]:
    file = read_results(ROOT / "lab" / "results" / "cpu" / f"{experiment}.json")
    rows = fill_readme.as_defined(file).comparisons
    return {str(row.verdict) for row in rows if (row.name, row.variant, row.against) == (name, variant, against)}


def test_what_the_choice_rests_on_was_found() -> None:
    """The sentences of docs/concepts/which-one.md: if a result changes its verdict, they have to change."""
    assert verdicts("v2", WHOLE, "diff_v2") == {"reproduced"}
    assert verdicts("language", WHOLE, "diff_v2") == {"reproduced"}
    assert verdicts("table6", WHOLE, "diff") == {"contrary"}
    headlines = {one.results.name: one.row for one in findings(fill_readme.measured_experiments())}
    assert (headlines["fig3"].verdict, headlines["noise"].verdict) == ("contrary", "reproduced")
    # What a correction for their number leaves is known, as the README says, and noise is told beside it.
    known = re.search(r"<!-- known -->(.*)<!-- /known -->", PAGES["README.md"], flags=re.DOTALL)
    assert known is not None
    assert re.findall(r"^- \[([^\]]+)\]", known[1], flags=re.MULTILINE) == ["V2", "Noise"]


def test_the_choice_names_every_attention_type() -> None:
    rows = re.findall(r"^\|[^|]*\| `(\w+)`", PAGES["docs/concepts/which-one.md"], flags=re.MULTILINE)
    assert set(rows) == set(ATTENTION_TYPES)


def test_the_paper_s_page_names_every_experiment_and_files_that_exist() -> None:
    page = PAGES["docs/concepts/paper.md"]
    of_the_paper = {name for name in (*EXPERIMENTS, *SHOWN_BY) if re.match(r"table|fig|appendix", name)}
    assert set(re.findall(r"`diff-lab reproduce (\w+)`", page)) == of_the_paper
    for file in re.findall(r"`([\w/]+\.py)`", page):
        assert any((ROOT / house / file).is_file() for house in ("src/diff_transformer", "lab/src")), file
    assert set(re.findall(r"`(paper-[\w.]+)`", page)) <= set(shipped_recipes())
