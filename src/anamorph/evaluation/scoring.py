"""Scoring a release against its data. NOT PRIVATE."""

from __future__ import annotations

from typing import Any

from anamorph import progress
from anamorph.errors import ParameterError, SchemaError
from anamorph.evaluation.errors import merged, model_errors, row_errors
from anamorph.queries.spec import workload as parse_workload
from anamorph.release import Release
from anamorph.schema import Schema
from anamorph.sources import TableSource, open_source
from anamorph.tables import measured_sets

OVERSAMPLING = 5
"""Rows scored for each relaxed row: the paper's choice."""


def score(release: Release, data: Any, schema: Schema, spec: str, *, seed: int = 0) -> dict[str, Any]:  # noqa: ANN401
    """Returns the errors of the model's answers, and of rows drawn from it where it has rows."""
    require_schema(release, schema)
    workload = parse_workload(spec, schema)
    figures: dict[str, Any] = {"private": False, "notice": "NOT PRIVATE: true errors", "workload": spec}
    progress.report("read", 0, 1)
    with open_source(data, schema) as truth:
        progress.report("read", 1, 1)
        found = model_errors(truth, release.model, workload)
        figures |= merged(found).to_dict()
        if len(found) > 1:
            names = [name.strip() for name in workload.spec.split(";")]
            if len(names) != len(found):  # a column's name has a semicolon
                names = [f"part {number}" for number in range(1, len(found) + 1)]
            figures["parts"] = [{"workload": name} | part.to_dict() for name, part in zip(names, found, strict=True)]
        try:
            count = max(round(release.total), OVERSAMPLING * 1000)
            table = release.model.sample(count, seed=seed, keep=measured_sets(release))
        except ParameterError:
            return figures
        rows = merged(row_errors(truth, TableSource(table, schema), workload)).to_dict()
        figures["rows"] = {"count": table.rows} | {name: rows[name] for name in ("max_error", "mean_error", "tv")}
    return figures


def require_schema(release: Release, schema: Schema) -> None:
    """Refuses a schema whose columns are not those of the release."""
    mine, other = ((each.sizes, each.names, each.knots) for each in (schema, release.schema))
    if mine != other:
        raise SchemaError("the schema must be the one of the release; its columns are others")
