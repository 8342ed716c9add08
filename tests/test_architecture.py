"""The rooms of the house and their doors: who may import what, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import anamorph

ROOT = Path(anamorph.__file__).parent
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}
PUBLIC = [
    "Budget",
    "Categorical",
    "Codes",
    "Curator",
    "Datetime",
    "Ledger",
    "Measurement",
    "Numeric",
    "Ordinal",
    "Release",
    "Schema",
    "Synthesizer",
    "Workload",
    "load",
    "mechanism",
    "open_source",
    "save",
    "workload",
]


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def running(node):
    """Every node below, but those that only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            for other in child.orelse:
                yield from [other, *running(other)]
        else:
            yield child
            yield from running(child)


def imports(tree):
    """The full names of all that is imported when the code runs, submodules told from names by the files."""
    for node in running(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner.removeprefix("anamorph.") in MODULES else str(node.module)


def parsed(module):
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def ours(module):
    """The modules of anamorph that a module imports."""
    found = {name for name in imports(parsed(module)) if name.split(".")[0] == "anamorph"}
    return {name.removeprefix("anamorph").removeprefix(".") or "__init__" for name in found}


def room(module):
    return module.split(".")[0]


def of(*rooms):
    return [module for module in MODULES if room(module) in rooms]


def test_the_reader_of_imports_sees_them_all():
    code = (
        "from __future__ import annotations\nimport os, anamorph.cli\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from anamorph.release import Release\nelse:\n    import late\n"
        "def f():\n    from anamorph import archive\n    from anamorph.schema import Schema\n"
        "    if not TYPE_CHECKING:\n        import never\n"
    )
    found = set(imports(ast.parse(code)))
    assert {"os", "anamorph.cli", "anamorph.archive", "anamorph.schema", "late"} <= found
    assert "anamorph.release" not in found


def test_the_rooms_are_found():
    for name in ("curator", "sources", "queries", "models", "mechanisms", "evaluation"):
        assert len(of(name)) > 1
    assert "curator.curator" in MODULES
    assert "schema" in ours("curator.curator")


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("errors", set()),
        ("table", {"errors"}),
        ("_yaml", set()),
        ("column", {"errors"}),
        ("ranges", {"errors", "column"}),
        ("columns", {"errors", "column", "ranges"}),
        ("schema", {"errors", "table", "columns", "_yaml"}),
    ],
)
def test_the_ground_stands_on_nothing(module, allowed):
    assert ours(module) <= allowed


def test_release_stands_on_the_ground():
    assert ours("release") <= {"errors", "schema", "table"}


@pytest.mark.parametrize("module", of("curator"))
def test_the_curator_imports_the_ground_and_itself(module):
    strangers = {
        name
        for name in ours(module)
        if room(name) not in ("curator", "schema", "columns", "table", "release", "errors")
    }
    assert strangers == set()


@pytest.mark.parametrize("module", of("queries", "models", "rounding", "release", "schema", "table", "progress"))
def test_the_public_side_sees_no_curator_and_no_rows(module):
    names = ("tallies", "residuals", "where", "bands", "cosines", "rowwise", "estimates")
    descriptions = {f"curator.{name}" for name in names}
    assert {name for name in ours(module) if room(name) == "curator"} <= descriptions
    assert not {room(name) for name in ours(module)} & {"sources", "evaluation", "mechanisms", "fitting", "cli"}


@pytest.mark.parametrize("module", of("queries", "models", "rounding"))
def test_the_public_side_runs_on_a_bare_machine(module):
    outside = {room(name) for name in imports(parsed(module)) if room(name) != "anamorph"}
    assert outside - set(sys.stdlib_module_names) <= {"numpy", "jax", "optax"}


@pytest.mark.parametrize("module", of("mechanisms"))
def test_mechanisms_see_no_rows_and_no_true_errors(module):
    assert not {room(name) for name in ours(module)} & {"sources", "evaluation", "fitting", "cli"}


def test_only_few_see_the_sources():
    seen = {room(module) for module in MODULES if any(room(name) == "sources" for name in ours(module))}
    assert seen <= {"sources", "evaluation", "fitting", "drafting", "cli"}
    doors = [
        node
        for node in ast.walk(parsed("cli"))
        if isinstance(node, ast.ImportFrom) and node.module == "anamorph.sources"
    ]
    assert {alias.name for node in doors for alias in node.names} <= {"check_structure"}  # column names, no rows


def test_only_evaluation_and_the_command_line_see_true_errors():
    seen = {room(module) for module in MODULES if any(room(name) == "evaluation" for name in ours(module))}
    assert seen <= {"evaluation", "cli"}


def test_nobody_imports_the_command_line():
    seen = {module for module in MODULES if any(room(name) == "cli" for name in ours(module))}
    assert seen <= {"__main__", "cli"}


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_pickled_and_nothing_evaluated(module):
    tree = parsed(module)
    assert not {room(name) for name in imports(tree)} & {
        "pickle",
        "cPickle",
        "dill",
        "cloudpickle",
        "shelve",
        "marshal",
        "joblib",
    }
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not calls & {"eval", "exec", "yaml.unsafe_load", "yaml.full_load"}
    assert "allow_pickle=True" not in MODULES[module].read_text(encoding="utf-8")


def random_names(node):
    """Attributes and imports by which a generator of numpy, jax or the standard library is reached."""
    for child in ast.walk(node):
        text = ast.unparse(child) if isinstance(child, ast.Attribute) else ""
        if text.startswith(("np.random.", "numpy.random.", "jax.random", "random.")):
            yield text
    yield from (name for name in imports(node) if name.startswith(("numpy.random", "jax.random", "random")))


@pytest.mark.parametrize("module", of("curator"))
def test_the_curator_has_no_seeded_noise_but_one(module):
    tree = parsed(module)
    seeded = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "SeededBits"]
    assert len(seeded) == (module == "curator.noise")
    allowed = {name for node in seeded for name in random_names(node)}
    used = list(random_names(tree))
    for node in seeded:
        for name in random_names(node):
            used.remove(name)
    assert used == []
    assert allowed <= {"np.random.Philox"}


def test_the_curator_uses_jax_for_functions_of_rows_alone():
    used = {module for module in of("curator") if "jax" in {room(name) for name in imports(parsed(module))}}
    assert used == {"curator.rowwise"}


@pytest.mark.parametrize("module", of("curator", "sources", "evaluation", "mechanisms", "fitting", "schema", "archive"))
def test_jax_makes_no_randomness_near_private_rows(module):
    assert "jax.random" not in MODULES[module].read_text(encoding="utf-8")


@pytest.mark.parametrize("module", MODULES)
def test_no_global_random_state_is_used(module):
    attributes = [node for node in ast.walk(parsed(module)) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if ast.unparse(node.value) in ("np.random", "numpy.random")}
    assert used <= {"default_rng", "Generator", "Philox"}


@pytest.mark.parametrize("name", ["anamorph", "anamorph.cli"])
def test_importing_costs_nothing(name):
    heavy = ("jax", "duckdb", "pyarrow", "sqlglot", "optax", "pandas", "polars", "safetensors")
    code = f"import {name}, sys; print(*[module for module in {heavy!r} if module in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_public_names_are_these():
    assert anamorph.__all__ == PUBLIC
    assert sorted(anamorph._HOMES) == PUBLIC
    for name in PUBLIC:
        found = getattr(anamorph, name)
        assert found.__name__ == name
        assert found.__module__.startswith(anamorph._HOMES[name])
    with pytest.raises(AttributeError, match="has no attribute 'Manager'"):
        anamorph.Manager  # noqa: B018
