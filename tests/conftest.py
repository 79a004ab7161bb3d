"""Tests use one thread: tiny models only lose by more, and a shared machine stays usable."""

import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=3, help="random moments of a kill -9 in the slow tests of ranks")
