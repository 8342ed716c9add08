"""The descent that the fits of relaxed rows share: Adam steps, the best point kept, a stop by tolerance.

A problem is a frozen description: equal problems share their compiled steps. What changes from round to round, the
aims, is data, in shapes that seldom change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import Array

from anamorph import progress
from anamorph.models.simplex import Layout
from anamorph.models.tiles import beside

DISPATCH = 50
"""Steps between two returns to Python, so that progress shows and an interrupt is heard."""

WARM = 100
"""Steps before a loss that stays the same is believed: far from any answer it does so too."""

SMALLEST = 1e-20
"""Added to the root of Adam's second moment: where answers are products of many small shares, gradients are small."""

KEEP = 10
"""Steps between two comparisons with the best point so far."""

Point = Any
"""What Adam moves: a tree of arrays."""


class Settings(Protocol):
    """How far and how fast a descent goes: fields of an estimator."""

    @property
    def steps(self) -> int: ...
    @property
    def rate(self) -> float: ...
    @property
    def tolerance(self) -> float: ...


def as_it_is(_settings: object, _point: Point, gradient: Point) -> Point:
    """Returns the gradient."""
    return gradient


def anywhere(_settings: object, _layout: Layout, _aims: object, _point: Point, moved: Point) -> Point:
    """Returns the point that Adam moved to."""
    return moved


def never(_settings: object, _loss: Array, _gradient: Point, _aims: object) -> Array:
    """Returns that the descent may not end yet."""
    return jnp.array(False)


class Problem(NamedTuple):
    """What is minimised: functions of the settings, the layout and points."""

    settings: Settings
    layout: Layout
    objective: Callable[[Any, Layout, Point, Any], Array]
    """The loss of a point, given the aims."""
    direction: Callable[[Any, Point, Point], Point] = as_it_is
    """What Adam takes for the gradient at a point."""
    settle: Callable[[Any, Layout, Any, Point, Point], Point] = anywhere
    """Where a step ends, given the aims, where it began and where Adam moved."""
    enough: Callable[[Any, Array, Point, Any], Array] = never
    """Whether the descent may end, given the loss, its gradient and the aims."""


class State(NamedTuple):
    """A descent under way."""

    point: Point
    optimiser: optax.OptState
    step: Array
    loss: Array
    stopped: Array
    best: Point
    best_loss: Array


def descend(problem: Problem, point: Point, aims: object) -> tuple[Point, bool]:
    """Returns the best point of a descent from a point, and whether the loss stayed a number."""
    steps = problem.settings.steps
    state = start(problem, beside(aims, point))
    for done in range(0, steps, DISPATCH):
        state = advance(problem, state, aims, min(done + DISPATCH, steps))
        progress.report("project", done + DISPATCH, steps)
        if bool(state.stopped):
            break
    progress.report("project", steps, steps)
    return state.best, bool(jnp.isfinite(state.loss))


@partial(jax.jit, static_argnums=0)
def start(problem: Problem, point: Point) -> State:
    """Returns the state before the first step."""
    infinite = jnp.array(jnp.inf)
    optimiser = optax.adam(problem.settings.rate, eps=SMALLEST).init(point)
    return State(point, optimiser, jnp.array(0), infinite, jnp.array(False), point, infinite)


@partial(jax.jit, static_argnums=0)
def advance(problem: Problem, state: State, aims: object, until: int) -> State:
    """Returns the state after Adam steps up to number `until`, or where the descent stops by itself."""
    settings, layout = problem.settings, problem.layout
    adam = optax.adam(settings.rate, eps=SMALLEST)
    slope = jax.value_and_grad(partial(problem.objective, settings, layout))

    def step(now: State) -> State:
        loss, gradient = slope(now.point, aims)
        updates, optimiser = adam.update(problem.direction(settings, now.point, gradient), now.optimiser)
        settled = (jnp.abs(now.loss - loss) < settings.tolerance * now.loss) | (loss == 0)
        done = (settled & jnp.isfinite(now.loss) & (now.step >= WARM)) | problem.enough(settings, loss, gradient, aims)
        stopped = done | ~jnp.isfinite(loss)
        last = stopped | (now.step + 1 == settings.steps)
        better = (loss < now.best_loss) & ((now.step % KEEP == 0) | last)
        best, best_loss = jax.lax.cond(better, lambda: (now.point, loss), lambda: (now.best, now.best_loss))
        moved = problem.settle(settings, layout, aims, now.point, jax.tree.map(jnp.add, now.point, updates))
        return State(moved, optimiser, now.step + 1, loss, stopped, best, best_loss)

    return jax.lax.while_loop(lambda now: (now.step < until) & ~now.stopped, step, state)
