"""One cluster for all tests that leave it as they found it: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster_process import ClusterProcess, started
from tests.tiny_models import tiny_llama


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    """A tiny Llama with a context of 16,384 tokens, split over shared memory, computed in small chunks."""
    directory = tmp_path_factory.mktemp("shared")
    model = tiny_llama(directory / "model", seed=6, max_position_embeddings=16384)
    with started(model, directory / "run", "--chunk-tokens=32", "--pool-bytes=64MiB") as running:
        yield running
