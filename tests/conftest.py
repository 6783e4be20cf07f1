"""Shared by all tests: the real target and the base drafter, built once."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402

from eagle3_lib.targets import targets  # noqa: E402


@pytest.fixture(scope="session")
def target_folder():
    return targets.resolve(targets.SMOLLM2)


@pytest.fixture(scope="session")
def target(target_folder):
    return targets.load(target_folder)


@pytest.fixture(scope="session")
def tokenizer(target_folder):
    return targets.load_tokenizer(target_folder)
