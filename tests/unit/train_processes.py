"""Training in processes of their own, forked from a server that has the imports behind it."""

import multiprocessing
import os
import socket

import torch

from eagle3_lib.stages import train

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train_processes"])


def start(*runs, processes=1) -> list:
    """Start processes that train with each of the parameters in turn, as torchrun would."""
    ports = [_free_port() for _ in runs]
    started = [
        FORKS.Process(target=_train, args=(rank, processes, ports, runs), daemon=True) for rank in range(processes)
    ]
    for process in started:
        process.start()
    return started


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _train(rank: int, processes: int, ports: list[str], runs: tuple) -> None:
    torch.set_num_threads(1)
    if processes > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    for params, port in zip(runs, ports, strict=True):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        train.run(params)
