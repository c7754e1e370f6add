"""Folders to share, loaded where nothing but transformers has been imported."""

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, dynamic_module_utils

import commands
import diff_transformer
import fresh
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.convert.shared_folder import export_folder
from diff_transformer.model.configuration import AUTO_CLASSES, auto_map, code_files
from diff_transformer.utils.suggestions import quoted

CODE = {"configuration_diff_transformer.py", "modeling_diff_transformer.py"}
PLAIN = {"README.md", "config.json", "generation_config.json", "model.safetensors", *CODE}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(29)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture
def model(ours: Callable[..., Path]) -> Any:
    return DiffTransformerForCausalLM.from_pretrained(ours("diff", num_hidden_layers=2))


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_plain_folder(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    target = tmp_path / "out"
    before = model.config.to_dict()
    files = export_folder(model, tokenizer, target, card="# A card, λ\n")
    assert model.config.to_dict() == before
    assert {file.name for file in files} == names(target) == PLAIN | TOKENIZER
    assert (target / "README.md").read_text(encoding="utf-8") == "# A card, λ\n"
    again = DiffTransformerForCausalLM.from_pretrained(target)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert (target.stat().st_mode & 0o777) == (tmp_path / "ours").stat().st_mode & 0o777


@pytest.mark.parametrize("size", ["big", "-1GB", "0.0001KB", "9" * 5000, 0, 5.0, None])
def test_what_is_no_size_is_refused_before_anything_is_written(size: Any, model: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"must be a number of bytes, 1 or more, or like '5GB', got {quoted(size)}")
    ):
        export_folder(model, None, tmp_path / "out", card="", max_shard_size=size)
    assert names(tmp_path) == {"ours"}


def test_a_folder_is_there_whole_or_not_at_all(model: Any, tmp_path: Path) -> None:
    with commands.largest_file(4000), pytest.raises(OSError, match=r"weights cannot be written: .*[Ff]ile too large"):
        export_folder(model, None, tmp_path / "out", card="")
    assert names(tmp_path) == {"ours"}
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="out' exists already"):
        export_folder(model, None, tmp_path / "out", card="")
    assert names(tmp_path / "out") == set()


def test_auto_map_names_every_class_that_is_registered() -> None:
    """A head that is added to the package and not to the table would be missing from shared folders."""
    known = {"AutoConfig": DiffTransformerConfig.__name__}
    for name in dir(transformers):
        if name.startswith("AutoModel"):
            mapping = getattr(getattr(transformers, name), "_model_mapping", None)
            if mapping is not None and DiffTransformerConfig in mapping:
                known[name] = mapping[DiffTransformerConfig].__name__
    assert known == AUTO_CLASSES
    assert AUTO_CLASSES.keys() - auto_map().keys() == {"AutoModelForMaskedLM"}
    assert AUTO_CLASSES.keys() - auto_map(is_causal=False).keys() == {"AutoModelForCausalLM"}


def test_a_subclass_with_code_of_its_own_is_shared_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from diff_transformer import DiffTransformerConfig\nclass Mine(DiffTransformerConfig): model_type = 'mine'"
    (tmp_path / "my_code.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for config in (importlib.import_module("my_code").Mine, DiffTransformerConfig):
        config.register_for_auto_class()
        config().save_pretrained(tmp_path / config.model_type)
    saved = tmp_path / "mine", tmp_path / "diff_transformer"
    assert [names(folder) for folder in saved] == [{"config.json", "my_code.py"}, {"config.json", *CODE}]
    assert json.loads((saved[0] / "config.json").read_text())["auto_map"] == {"AutoConfig": "my_code.Mine"}


# Every Auto class, the code of vLLM's transformers backend, the card's own lines, saving, all twice.
LOADING = r"""
import json, sys
from pathlib import Path
folder, again = map(Path, sys.argv[1:])
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module
transformers.utils.logging.set_verbosity_error()
assert "diff_transformer" not in sys.modules
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
assert get_class_from_dynamic_module(config.auto_map["AutoModel"], folder).is_backend_compatible()
ids = torch.arange(7)[None]
answers = []
for _ in range(2):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    answers.append(model(ids).logits[0, -1].tolist())
base = AutoModel.from_pretrained(folder, trust_remote_code=True)
answers.append(model.lm_head(base(ids).last_hidden_state)[0, -1].tolist())
built = AutoModel.from_config(config, trust_remote_code=True)
assert type(built) is type(base)
label = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True, num_labels=3, pad_token_id=0)
assert label(ids).logits.shape == (1, 3)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
assert tokenizer("w3 w4")["input_ids"] == [3, 4]
model.generate(ids, max_new_tokens=2, do_sample=False)
model.save_pretrained(again)
tokenizer.save_pretrained(again)
print(json.dumps(answers))
"""


def test_it_loads_where_this_package_was_not_imported(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    export_folder(model, tokenizer, tmp_path / "shared", card="")
    assert names(tmp_path / "shared") == PLAIN | TOKENIZER
    expected = model.eval()(torch.arange(7)[None]).logits[0, -1].tolist()
    first, second = tmp_path / "shared", tmp_path / "saved"
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    # What was saved is as good as what was loaded; and the package imported first changes nothing.
    imported_first = LOADING.replace('assert "diff_transformer" not in sys.modules', "import diff_transformer")
    for code, folder, saved in ((LOADING, first, second), (imported_first, second, tmp_path / "third")):
        done = fresh.run(code, folder, saved, environment=environment, warnings_are_errors=True)
        assert done.returncode == 0, done.stderr[-2000:]
        for answer in json.loads(done.stdout):
            assert answer == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert names(saved) == (PLAIN | TOKENIZER) - {"README.md"}
        assert json.loads((saved / "config.json").read_text())["auto_map"] == auto_map()
        assert {name: (saved / name).read_text(encoding="utf-8") for name in CODE} == code_files()


@pytest.fixture
def load(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Loads a class of a shared folder as transformers does; its copies and imports are gone after the test."""
    export_folder(model, None, tmp_path / "shared", card="")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    reference = auto_map()["AutoModel"]
    yield lambda: dynamic_module_utils.get_class_from_dynamic_module(reference, tmp_path / "shared")
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


def test_without_the_package_the_sentence_says_what_to_install(
    load: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "diff_transformer", None)
    with pytest.raises(ImportError) as error:
        load()
    assert str(error.value) == (
        "This model needs the package diff-transformer, which is not installed: "
        "pip install . in a checkout of the diff-transformer repository"
    )
    assert error.value.__suppress_context__


@pytest.mark.parametrize("old", ["0.0.9", "0.1.0.dev1"])
def test_an_old_package_is_named(old: str, load: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    needed = diff_transformer.__version__
    monkeypatch.setitem(sys.modules, "diff_transformer", SimpleNamespace(__version__=old))
    with pytest.raises(ImportError, match=re.escape(f"needs diff-transformer {needed} or later, but {old} is inst")):
        load()
    monkeypatch.setitem(sys.modules, "diff_transformer", SimpleNamespace(__version__="99.1"))
    assert load() is diff_transformer.DiffTransformerModel


def test_another_missing_package_is_not_taken_for_ours(
    load: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "path" / "diff_transformer"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("import no_such_module\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "diff_transformer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(broken.parent)
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"):
        load()
