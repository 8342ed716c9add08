"""What synthetic rows are worth as training data. NOT PRIVATE: real rows are read without noise.

For each target column a classifier is trained on synthetic rows and another one on real rows; both are asked about the
same real test rows. Reported are accuracy and the macro F1 score: the mean, over the classes that the test rows hold,
of 2 / (1 / precision + 1 / recall). With several targets at once, none is a feature of another.

Reference: Vietri et al., Private synthetic data for multitask learning and marginal queries (2022), section 5 and
definition 14. Deviations: logistic regression with an L2 penalty, not L1; the mean of F1 scores is over the classes of
the test rows, so that both classifiers are measured by the same ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anamorph import progress
from anamorph.columns import OTHER, Categorical, Codes, Column, canonical
from anamorph.errors import DataError, ParameterError, ResourceError, suggestion
from anamorph.evaluation.features import Design, Examples, examples
from anamorph.evaluation.scoring import require_schema
from anamorph.evaluation.splitting import parts
from anamorph.release import Release
from anamorph.schema import Schema
from anamorph.tables import sample_rows

Labels = NDArray[np.int64]

MOST_CATEGORIES = 255
"""Columns of more codes are numbers to the trees: scikit-learn's limit."""
REMARK = (
    "the test rows are rows of the data, and so were part of the fit: write two files with `anamorph split`, fit the "
    "first, and name the second with --test"
)


@dataclass(frozen=True)
class Target:
    """What is to be predicted: a column, or whether it is one of some of its categories."""

    name: str
    column: Column
    group: tuple[int, ...] = ()
    """The codes of one class, against all others; none where every category is a class."""

    def known(self, rows: Examples) -> Examples:
        """Returns the rows that have a target: those where it is missing teach and test nothing."""
        if not self.column.missing:
            return rows
        return rows.take(np.flatnonzero(rows.codes[self.column.name] != self.column.empty_code))

    def labels(self, rows: Examples) -> Labels:
        """Returns the class of each row."""
        codes = rows.codes[self.column.name].astype(np.int64)
        return np.isin(codes, self.group).astype(np.int64) if self.group else codes


@dataclass(frozen=True)
class Usefulness:
    """How well one target is predicted after training on synthetic rows, and on real ones."""

    target: str
    classes: int
    """The classes that occur in the test rows."""
    f1: float
    accuracy: float
    f1_real: float
    accuracy_real: float
    ratio: float | None
    """f1 / f1_real; None where that is 0."""


def learn(
    release: Release,
    data: Any,  # noqa: ANN401 - a path, a URL or a frame
    schema: Schema,
    targets: Sequence[str],
    *,
    test: Any = None,  # noqa: ANN401
    learner: str = "logistic",
    seed: int = 0,
) -> dict[str, Any]:
    """Returns what rows of a release are worth as training data.

    Args:
        release: where the synthetic rows come from; as many as the data publicly had.
        data: the real rows for training; without `test`, 80% of them, and the others for testing.
        schema: the columns, those of the release.
        targets: columns, or `column:category+category` for these against all others.
        test: real rows that were no part of the fit.
        learner: logistic or boosting.
        seed: of the synthetic rows and of the split.
    """
    require_schema(release, schema)
    wanted = [parse_target(text, schema) for text in targets]
    require_learner(learner)
    synthetic = examples(sample_rows(release, seed=seed), schema)
    progress.report("read", 0, 1)
    train = examples(data, schema)
    if test is None:
        train, held = (train.take(part) for part in parts(train.rows, seed=seed))
    else:
        held = examples(test, schema)
    progress.report("read", 1, 1)
    figures: dict[str, Any] = {"private": False, "notice": "NOT PRIVATE: real rows were read", "learner": learner}
    figures |= {"train_rows": train.rows, "test_rows": held.rows, "synthetic_rows": synthetic.rows}
    figures |= {"test_rows_in_fit": test is None} | ({"remark": REMARK} if test is None else {})
    figures["ml"] = [asdict(found) for found in usefulness(synthetic, train, held, wanted, learner=learner)]
    return figures


def usefulness(
    synthetic: Examples, train: Examples, test: Examples, targets: Sequence[Target], *, learner: str = "logistic"
) -> list[Usefulness]:
    """Returns the figures of each target: what is learnt from synthetic rows, and what from real ones."""
    taken = {target.column.name for target in targets}
    features = [name for name in test.schema.names if name not in taken]
    if not features:
        raise ParameterError("targets must leave at least one column to predict them from")
    predict = require_learner(learner)
    found = []
    for done, target in enumerate(targets):
        progress.report("learn", done, len(targets))
        known = target.known(test)
        truth = required(target.labels(known), f"the test rows must hold {target.column.name!r}")
        scores = []
        for training, whose in ((synthetic, "synthetic"), (train, "real training")):
            rows = target.known(training)
            labels = required(target.labels(rows), f"the {whose} rows must hold {target.column.name!r}")
            scores.append(figures(truth, predict(rows, labels, known, features)))
        (f1, accuracy), (f1_real, accuracy_real) = scores
        ratio = f1 / f1_real if f1_real else None
        found.append(Usefulness(target.name, len(np.unique(truth)), f1, accuracy, f1_real, accuracy_real, ratio))
    progress.report("learn", len(targets), len(targets))
    return found


def required(labels: Labels, rule: str) -> Labels:
    """Returns labels; refuses none."""
    if not labels.size:
        raise DataError(f"{rule}: there is no row that does")
    return labels


def figures(truth: Labels, guess: Labels) -> tuple[float, float]:
    """Returns macro F1, over the classes of the truth, and accuracy."""
    scores = []
    for label in np.unique(truth):
        right = np.sum((truth == label) & (guess == label))
        scores.append(2 * right / (np.sum(truth == label) + np.sum(guess == label)))
    return float(np.mean(scores)), float(np.mean(truth == guess))


def logistic(training: Examples, labels: Labels, test: Examples, features: Sequence[str]) -> Labels:
    """Returns the classes that logistic regression gives to the test rows."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

    design = Design.of(training, features)
    return answers(LogisticRegression(max_iter=500), design.linear(training), labels, design.linear(test))


def boosting(training: Examples, labels: Labels, test: Examples, features: Sequence[str]) -> Labels:
    """Returns the classes that gradient boosted trees give to the test rows."""
    from sklearn.ensemble import HistGradientBoostingClassifier  # noqa: PLC0415

    design = Design.of(training, features)
    matrix, categories = design.trees(training, MOST_CATEGORIES)
    settings: Any = {"categorical_features": categories, "early_stopping": False, "random_state": 0}
    asked, _ = design.trees(test, MOST_CATEGORIES)
    return answers(HistGradientBoostingClassifier(**settings), matrix, labels, asked)


def answers(model: Any, matrix: Any, labels: Labels, asked: Any) -> Labels:  # noqa: ANN401 - what scikit-learn has
    """Returns the classes that a model gives after training; all the same where the training rows hold but one."""
    from threadpoolctl import threadpool_limits  # noqa: PLC0415

    if len(np.unique(labels)) == 1:
        return np.full(asked.shape[0], labels[0])
    # One thread: on a machine that is busy otherwise, more of them wait for each other ten times as long.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")  # a fit that is cut short is good enough to be compared
        return model.fit(matrix, labels).predict(asked)


Learner = Callable[[Examples, Labels, Examples, Sequence[str]], Labels]
LEARNERS: dict[str, Learner] = {"logistic": logistic, "boosting": boosting}


def require_learner(name: str) -> Learner:
    """Returns the learner of a name; refuses an unknown one, and any where scikit-learn is not installed."""
    if name not in LEARNERS:
        raise ParameterError(f"learner ({name!r}) must be {' or '.join(LEARNERS)}.{suggestion(name, LEARNERS)}")
    try:
        import sklearn  # noqa: F401, PLC0415
    except ImportError:
        raise ResourceError("scikit-learn must be installed to train models: pip install 'anamorph[eval]'") from None
    return LEARNERS[name]


def parse_target(text: str, schema: Schema) -> Target:
    """Returns the target that a text names: `column`, or `column:category+category` for these against all others."""
    column, group = named(text, schema)
    if not isinstance(column, Categorical | Codes):
        raise ParameterError(f"target ({column.name!r}) must be categorical, ordinal or codes: it is {column.kind}")
    if group is None:
        return Target(text, column)
    codes = tuple(sorted(set(group_codes(group, column))))
    if len(codes) == column.size - column.missing:
        raise ParameterError(f"target ({text!r}) must leave a category to the other class")
    return Target(text, column, codes)


def named(text: str, schema: Schema) -> tuple[Column, str | None]:
    """Returns the column that a text begins with, and what follows its colon; names may hold colons themselves."""
    if text in schema.names:
        return schema.columns[schema.index(text)], None
    for place in (place for place, mark in enumerate(text) if mark == ":"):
        if text[:place] in schema.names:
            return schema.columns[schema.index(text[:place])], text[place + 1 :]
    return schema.columns[schema.index(text.partition(":")[0])], None  # refuses the name


def group_codes(text: str, column: Column) -> list[int]:
    """Returns the codes of categories joined by +; a category with a + in it is read whole."""
    words = text.split("+")
    for stop in range(len(words), 0, -1):
        code = category_code("+".join(words[:stop]), column)
        if code is not None:
            return [code, *(group_codes("+".join(words[stop:]), column) if stop < len(words) else ())]
    known = [str(category) for category in column.categories] if isinstance(column, Categorical) else []
    raise ParameterError(
        f"target: category ({words[0]!r}) must be one of column {column.name!r}.{suggestion(words[0], known)}"
    )


def category_code(text: str, column: Column) -> int | None:
    """Returns the code of a category, or nothing."""
    label = canonical(text)
    if isinstance(column, Categorical):
        return (column.spellings | ({OTHER: column.regular} if column.other else {})).get(label)
    return int(label) if label.isdecimal() and int(label) < column.regular else None
