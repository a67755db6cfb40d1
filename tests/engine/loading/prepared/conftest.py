from pathlib import Path

import pytest

from tests.prepared_files import NAME, prepared, tensors


@pytest.fixture
def written(tmp_path) -> Path:
    assert prepared(tmp_path, tensors()).store()
    return tmp_path / NAME
