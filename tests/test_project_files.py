"""The files that GitHub, PyPI and pre-commit read are valid, and say the same as the rest of the project."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import check_jsonschema
import pytest
import yaml
from click.testing import CliRunner

from diff_transformer._version import __version__

ROOT = Path(__file__).resolve().parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
URLS = dict(re.findall(r'^(\w+) = "(https://[^"]+)"$', PROJECT.partition("[project.urls]")[2], flags=re.MULTILINE))
SCHEMAS = {
    "CITATION.cff": "citation-file-format",
    ".github/dependabot.yml": "dependabot",
    ".github/ISSUE_TEMPLATE/config.yml": "github-issue-config",
    **{f".github/ISSUE_TEMPLATE/{name}.yml": "github-issue-forms" for name in ("bug", "idea", "result")},
    **{f".github/workflows/{name}.yml": "github-workflows" for name in ("docs", "release", "tests")},
}


def read(path: str) -> Any:
    loaded = yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
    if "on" not in loaded and True in loaded:  # YAML 1.1 takes `on` for a truth value
        loaded["on"] = loaded.pop(True)
    return loaded


@pytest.mark.parametrize("schema", sorted(set(SCHEMAS.values())))
def test_files_are_as_their_readers_want_them(schema: str) -> None:
    files = [str(ROOT / path) for path, wanted in SCHEMAS.items() if wanted == schema]
    done = CliRunner().invoke(check_jsonschema.main, ["--builtin-schema", f"vendor.{schema}", *files])
    assert done.exit_code == 0, done.output
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / ".github").rglob("*.yml")}
    assert found == {path for path in SCHEMAS if path.startswith(".github")}


def test_the_repository_has_one_address_and_one_version() -> None:
    """That of pyproject.toml, which the site reads as well."""
    assert set(URLS) == {"Repository", "Documentation", "Changelog", "Issues"}
    repository = URLS["Repository"]
    assert all(URLS[name].startswith(repository) for name in ("Changelog", "Issues"))
    citation = read("CITATION.cff")
    assert (citation["repository-code"], citation["url"]) == (repository, URLS["Documentation"])
    assert citation["version"] == __version__
    assert f'license = "{citation["license"]}"' in PROJECT
    for path in ("SECURITY.md", "CODE_OF_CONDUCT.md", ".github/ISSUE_TEMPLATE/config.yml"):
        named = re.findall(r"https://github\.com/[\w-]+/[\w-]+", (ROOT / path).read_text(encoding="utf-8"))
        assert set(named) == {repository}, path


def test_the_style_of_a_commit_is_that_of_make_test() -> None:
    (ruff,) = read(".pre-commit-config.yaml")["repos"]
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"\nruff=={ruff['rev'].removeprefix('v')}\n" in constraints
    commands = re.findall(r"\$\(BIN\)/(ruff \w+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert [hook["id"].replace("-", " ") for hook in ruff["hooks"]] == commands


def test_a_release_is_tested_and_trusted() -> None:
    jobs = read(".github/workflows/release.yml")["jobs"]
    assert [jobs[name]["needs"] for name in ("build", "wheels", "publish")] == ["test", "test", ["build", "wheels"]]
    # No password: PyPI trusts this workflow, and nothing else may ask for such a token.
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert not any("permissions" in jobs[name] for name in ("test", "build", "wheels"))
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    (check,) = (step["run"] for step in jobs["build"]["steps"] if step.get("run", "").startswith("grep"))
    for tag, code in ((f"v{__version__}", 0), ("v999", 1)):
        environment = {"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"}
        assert subprocess.run(["bash", "-c", check], cwd=ROOT, env=environment, check=False).returncode == code


def test_the_documentation_can_be_built_with_the_versions_that_are_pinned() -> None:
    (extra,) = re.findall(r"^docs = \[\n(.*?)^\]", PROJECT, flags=re.MULTILINE | re.DOTALL)
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for name in re.findall(r'"([\w-]+)>=', extra):
        assert f"\n{name}==" in constraints, name
        if sys.version_info >= (3, 11):
            assert f"\n{name}=={metadata.version(name)}" in constraints, name
