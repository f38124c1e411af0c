"""A run on text from the hub trains in the image, from which unused parts of the libraries for it were removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docker.container import SMALL, THREAD, Container
from tests.docker.engine import Engine
from tests.swarm.hub import Hub

README = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/*.parquet
---
"""


@pytest.mark.timeout(300)
def test_run_on_parquet_files_of_the_hub_trains(docker: Engine, alone: Container, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: install the extra datasets")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "en").mkdir()
    (tmp_path / "README.md").write_text(README)
    texts = [f"Document {number} of the hub. " * 20 for number in range(2000)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "en" / "0.parquet")
    gateway = docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}")
    with Hub(tmp_path, "own/text", host=gateway) as hub:
        words = ("--run.data.sources=hub:own/text?config=en&split=train",)
        status = alone.run("run", THREAD, *SMALL, *words, env=hub.environment).until_round(3)
        assert hub.requests > 0
    assert status["training"]["loss"] < 3, "the text repeats itself"
