"""The README is true: its Python example runs, and it is as short as it says."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert example is not None
    assert len([line for line in example[1].splitlines() if line.strip()]) <= 15
    monkeypatch.chdir(tmp_path)
    exec(compile(example[1], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "-differentially private" in printed
    assert "fraction=" in printed


def test_every_page_it_names_exists():
    for page in re.findall(r"\]\(([^)#]+)\)", README):
        assert (Path(__file__).parents[1] / page).exists(), page


def test_every_mechanism_has_a_row_and_a_page():
    from anamorph.mechanisms.mechanism import NAMES

    for name in NAMES:
        assert f"| `{name}` |" in README
        assert f"docs/mechanisms/{name}.md" in README


def test_the_command_line_names_every_mechanism():
    from anamorph.cli import Name
    from anamorph.mechanisms.mechanism import NAMES

    (option,) = Name.__metadata__
    assert sorted(re.split(r", | or ", option.help.removesuffix("."))) == sorted(NAMES)
