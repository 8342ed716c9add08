"""Cache: counts that a curator has made before, for the same rows asked again. Private: it never leaves the curator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.bands import Bands, band_counts
from anamorph.curator.rowwise import Rowwise, sums
from anamorph.curator.tallies import Counts, Tally
from anamorph.curator.where import Where, where_counts

CACHE_BYTES = 256 << 20
"""How much memory the curator keeps for counts that are asked again."""

KEY_BYTES = 500
"""About what it takes to remember which test a count is of."""


class Cache:
    """Counts of marginals that were asked before, up to a cap; private, and never leaves the curator."""

    def __init__(self, source: Counts) -> None:
        self._source = source
        self._kept: dict[tuple[int, ...], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._functions: dict[Rowwise, NDArray[np.int64]] = {}
        self._tested: dict[tuple[object, ...], NDArray[np.int64]] = {}
        self._banded: dict[Bands, NDArray[np.int64]] = {}
        self._bytes = 0

    def prepare(self, tallies: Sequence[Tally]) -> None:
        """Counts the marginals of some tallies in one request, as far as they fit."""
        wanted = tuple({features: None for tally in tallies for features in tally.sets if features not in self._kept})
        for _ in self._count(wanted):
            if self._bytes > CACHE_BYTES:
                break

    def batches(self) -> Iterator[NDArray[np.int32]]:
        """Yields the encoded rows."""
        return self._source.batches()

    def values(self, function: Rowwise) -> NDArray[np.int64]:
        """Returns the sums of a function's values, evaluated once."""
        if function not in self._functions:
            self._functions[function] = sums(function, self._source.batches())
        return self._functions[function]

    def tested(self, tally: Where) -> NDArray[np.int64]:
        """Returns the counts of a tally of tests, each counted once as far as they fit."""
        keys = list(tally.identities())
        if all(key in self._tested for key in keys):
            return np.concatenate([self._tested[key] for key in keys])
        found = where_counts(tally, self._source).reshape(tally.tests, -1)
        if self._bytes <= CACHE_BYTES:
            self._tested.update(zip(keys, found, strict=True))
            self._bytes += found.nbytes + KEY_BYTES * tally.tests
        return found.ravel()

    def banded(self, tally: Bands) -> NDArray[np.int64]:
        """Returns the counts of a marginal of bands, counted once as far as they fit."""
        if tally in self._banded:
            return self._banded[tally]
        found = band_counts(tally, self._source)
        if self._bytes <= CACHE_BYTES:
            self._banded[tally] = found
            self._bytes += found.nbytes
        return found

    def counts(self, sets: tuple[tuple[int, ...], ...]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yields the non-empty cells of each marginal and their counts."""
        for features in sets:
            yield self._kept[features] if features in self._kept else next(self._count((features,)))

    def _count(self, sets: tuple[tuple[int, ...], ...]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        for features, found in zip(sets, self._source.counts(sets) if sets else (), strict=True):
            if self._bytes <= CACHE_BYTES:
                self._kept[features] = found
                self._bytes += found[0].nbytes + found[1].nbytes
            yield found
