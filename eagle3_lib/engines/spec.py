"""What the project knows of an engine, as data: one ``EngineSpec`` an engine, in the ``spec.py`` of its package.

It imports nothing beside the standard library, so that whoever asks for a figure of an engine starts no HTTP client.
"""

import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from .definitions import Definitions
from .settings import Setting

if TYPE_CHECKING:
    from .protocol import EngineRunning, EngineServer

Release = tuple[int, ...]


def version_tuple(version: str) -> Release:
    """The release numbers of a version: "0.5.16.post1+cu130" -> (0, 5, 16)."""
    release = re.match(r"[\d.]*\d", version)
    assert release is not None, version
    return tuple(int(number) for number in release[0].split("."))


@dataclass(frozen=True)
class EngineSpec:
    """One engine.

    What it is:
        name: as params files have it, and the name of its package. distributions: the packages on an index that bring it,
        in order of preference. cpu_build: the one of them that needs no GPU, "" for none.
    What was read:
        read: the first and the last version whose source was read. definitions: what it counts, oldest first.
        settings: what changes the meaning of an accepted count. settings_in: options whose JSON holds these settings; () where
        each is an option. made_up_by: environment variables that make up what is accepted. remarks: setting -> the sentence
        that a report says where it is given.
    Its command line:
        help_words: what asks it for its options, the best first. optional: options without which a run measures the same,
        only less is known of it, or it is slower to look at. tensor_parallel_options, prefill_chunk_options: those that name the
        number of ranks, and the most tokens of one step of prefill. memory_share_option, memory_share: the one that names the
        share of a GPU's memory that it takes, and the usual share.
    What it does with a target and a drafter:
        vocabulary_padding: tensor parallelism divides the vocabulary, rounded up to a multiple of this; 0: it may be any size.
        ids_in_eagle_config: it takes the ids of captured layers from ``eagle_config`` alone. outer_boundaries: its hidden
        states may be the embedding's output and the last layer's too. chat_gives_ids: its chat completions are known to take
        return_token_ids. runner_variable: the environment variable that chooses between its two model runners, "" for one.
    Its source and its compiled code:
        models_folder: where its target models lie, in its package. eagle3_interface: the class or method by which a target
        lets boundaries be captured. kernel_packages: the packages that have its GPU code. main_libraries: how the names of
        those of their libraries begin without which nothing runs. kernel_build: the command that builds them,
        with {arch}, the variable that names the architecture, and {version}.
    """

    name: str
    distributions: tuple[str, ...]
    read: tuple[Release, Release]
    cpu_build: str = ""
    definitions: tuple[Definitions, ...] = (Definitions(),)
    settings: tuple[Setting, ...] = ()
    settings_in: tuple[str, ...] = ()
    made_up_by: tuple[str, ...] = ()
    remarks: tuple[tuple[str, str], ...] = ()
    help_words: tuple[str, ...] = ("--help",)
    optional: frozenset[str] = frozenset()
    tensor_parallel_options: tuple[str, ...] = ()
    prefill_chunk_options: tuple[str, ...] = ()
    memory_share_option: str = ""
    memory_share: float = 0.9
    vocabulary_padding: int = 0
    ids_in_eagle_config: bool = False
    outer_boundaries: bool = True
    chat_gives_ids: bool = False
    runner_variable: str = ""
    models_folder: str = ""
    eagle3_interface: str = ""
    kernel_packages: tuple[str, ...] = ()
    main_libraries: tuple[str, ...] = ()
    kernel_build: str = ""

    def is_read(self, version: str) -> bool:
        """Whether a version lies within those whose sources were read."""
        first, last = self.read
        release = version_tuple(version)[: len(first)]
        return first <= release <= last

    def definitions_in(self, version: str) -> Definitions:
        """The definitions of one version."""
        release = version_tuple(version)
        return [row for row in self.definitions if row.since <= release][-1]


@dataclass(frozen=True)
class Engine:
    """An engine: its data, and the modules that start it and speak to it, which are imported when they are first needed.

    module: ``server.py`` of its package, beside which ``told.py`` lies.
    """

    spec: EngineSpec
    module: str

    @property
    def server(self) -> "EngineServer":
        return cast("EngineServer", importlib.import_module(self.module))

    @property
    def running(self) -> "EngineRunning":
        """What reads the configuration of a server that runs already."""
        return cast("EngineRunning", importlib.import_module(f"{self.module.rpartition('.')[0]}.told"))
