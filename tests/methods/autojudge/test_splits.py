"""How many folds a judge's figures are of, and that folds share out the problems with important tokens."""

import numpy as np
import pytest

from hf_lossy_assist.methods.autojudge.classifiers import FOLDS, choose_folds, split


def tokens(problems, each, important):
    """`each` tokens of every problem; the first `important` problems have one important token each."""
    problem = np.arange(problems).repeat(each)
    return problem, (np.arange(len(problem)) % each == 0) & (problem < important)


def test_one_split_where_it_holds_out_enough_of_both():
    problem = np.arange(100).repeat(12)
    half = np.arange(len(problem)) % 2 == 0  # 10 problems of 6 and 6 are held out: 60 of each
    assert choose_folds(problem, half, 0) == 0
    rare = np.arange(len(problem)) % 4 == 0  # 30 of one
    assert choose_folds(problem, rare, 0) == choose_folds(problem, ~rare, 0) == FOLDS


@pytest.mark.parametrize(("important", "folds"), [(0, 0), (1, 0), (2, 2), (3, 3), (9, FOLDS)])
def test_as_many_folds_as_problems_with_each_label(important, folds):
    problem, labels = tokens(40, 3, important)
    assert choose_folds(problem, labels, 0) == folds
    for seed in range(5 if folds else 0):
        for training, held in split(problem, folds, seed, labels):
            assert labels[held].any() and labels[training].any() and not labels[held].all()


def test_too_few_problems_are_left_to_the_split():
    problem, labels = tokens(7, 3, 3)
    assert choose_folds(problem, labels, 0) == 0
    with pytest.raises(ValueError, match="in 7 problems; at least 8"):
        split(problem, 0, 0, labels)


def test_folds_are_of_one_size_and_hold_each_problem_once():
    problem, labels = tokens(43, 2, 11)
    parts = split(problem, 4, 1, labels)
    assert (np.sum([held for _, held in parts], axis=0) == 1).all()
    sizes = [len(np.unique(problem[held])) for _, held in parts]
    shares = [int(labels[held].sum()) for _, held in parts]
    assert max(sizes) - min(sizes) <= 1 and max(shares) - min(shares) <= 1
