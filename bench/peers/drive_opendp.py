"""Drives OpenDP's own AIM and MST (`opendp[mbi]`).

Bounds are public: `keys` lists the codes of each column (OpenDP adds a null to each, which no row has; where a
synthetic cell is null, the code of another row is put in). Neighbours differ by adding or removing one row. It works in
rho, found here from (epsilon, delta) by OpenDP's own conversion. Nothing is taken from the data unpaid: the number of
rows is measured too. The noise is OpenDP's and cannot be seeded; the seed is that of the rows alone.

Rows are drawn by `synthesize(method="sample")` (the setting `rows`). Its default, "round", is that of mbi 1.1, which
sorts the rows of each value of a parent alike for every column below it: columns that are independent in the model come
out as copies of each other.

OpenDP 0.16's MST divides its budget for selection into shares whose sum, rounded up, is often more than the budget by
the last digit, and is then refused by OpenDP itself; each share is made smaller by 1e-12 of itself here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import opendp.prelude as dp
import polars as pl
from opendp.extras.mbi import _mst
from protocol import Task, read_task

SHY = 1e-12
"""How much smaller a share of the budget is made."""


def rho_of(epsilon: float, delta: float) -> float:
    """Returns the largest rho whose zero-concentrated privacy is within (epsilon, delta)."""
    space = dp.atom_domain(T=float, nan=False), dp.absolute_distance(T=float)

    def noise(scale: float) -> Any:  # noqa: ANN401 - OpenDP's own type
        return dp.c.make_fix_delta(dp.c.make_zCDP_to_approxDP(dp.m.make_gaussian(*space, scale)), delta=delta)

    scale = dp.binary_search_param(noise, d_in=1.0, d_out=(epsilon, delta))
    return dp.m.make_gaussian(*space, scale).map(1.0)


def algorithm(task: Task) -> Any:  # noqa: ANN401 - OpenDP's own type
    """Returns the algorithm of a method; AIM is told the workload."""
    settings = {name: value for name, value in task.settings.items() if name != "rows"}
    if task.method == "mst":
        _mst.prior = lambda share: share * (1 - SHY)
        return dp.mbi.MST(**settings)
    return dp.mbi.AIM(queries=[dp.mbi.Count(columns) for columns in task.workload], **settings)


def run(task: Task) -> None:
    """Writes the rows of one method."""
    dp.enable_features("contrib", "floating-point")
    np.random.seed(task.seed)  # noqa: NPY002 - mbi samples rows by the global generator
    rho = rho_of(task.epsilon, task.delta)
    frame = pl.DataFrame(task.codes(), schema=dict.fromkeys(task.sizes, pl.Int64), orient="row").lazy()
    context = dp.Context.compositor(
        data=frame, privacy_unit=dp.unit_of(contributions=1), privacy_loss=dp.loss_of(rho=rho)
    )
    keys = {column: list(range(size)) for column, size in task.sizes.items()}
    asked = context.query(rho=rho).select(*task.sizes).contingency_table(keys=keys, algorithm=algorithm(task))
    made = asked.release().synthesize(method=task.settings.get("rows", "round"))
    task.write(made.select(*task.sizes).iter_rows())


if __name__ == "__main__":
    run(read_task())
