"""The demonstration: a fictional survey, and all that a user does with one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from anamorph import fitting
from anamorph.curator.budget import Budget
from anamorph.datasets import survey, survey_schema
from anamorph.errors import ParameterError, ResourceError
from anamorph.mechanisms.auto import Auto
from anamorph.questions import ask
from anamorph.release import Release
from anamorph.tables import replace_file, sample_rows, write_table

QUESTIONS = (
    "age < 30 and sex = 'F'",
    "work = 'retired' and owns_home = 'yes'",
    "income >= 50000 and education in ('degree', 'doctorate')",
    "region = 'islands' and income is null",
)


@dataclass(frozen=True)
class Demonstration:
    """What was made, and where it lies."""

    release: Release
    paths: dict[str, Path]


def demonstrate(directory: Path, rows: int, said: Callable[[str], None]) -> Demonstration:
    """Returns the paths of a survey, its schema, a private release, synthetic rows and answers."""
    if rows < 1:
        raise ParameterError(f"rows ({rows}) must be at least 1")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ParameterError(f"out ({str(directory)!r}) must be an empty directory, or new: name another")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"out ({str(directory)!r}) cannot be made: {error.strerror}") from None
    paths = {
        name: directory / file
        for name, file in {
            "data": "survey.csv",
            "schema": "survey.yaml",
            "release": "release",
            "rows": "rows.csv",
            "answers": "answers.csv",
            "ledger": "survey.ledger",
        }.items()
    }
    said(f"a fictional survey of {rows} people")
    write_table(survey(rows), paths["data"])
    schema = survey_schema()
    replace_file(
        paths["schema"],
        overwrite=False,
        write=lambda fresh: fresh.write_text(schema.to_yaml(), encoding="utf-8"),
    )
    release = fitting.run(
        fitting.Fit(
            data=paths["data"],
            schema=schema,
            workload="marginals:k=2",
            mechanism=Auto(),
            budget=Budget(epsilon=1.0, delta=1e-6),
            ledger=paths["ledger"],
            output=paths["release"],
        ),
        said,
    )
    write_table(sample_rows(release), paths["rows"])
    write_table(answers(release), paths["answers"])
    return Demonstration(release, paths)


def answers(release: Release):  # noqa: ANN201 - a pyarrow table
    """Returns the answers to a few questions."""
    import pyarrow as pa  # noqa: PLC0415

    return pa.Table.from_pylist([asdict(ask(release, question)) for question in QUESTIONS])
