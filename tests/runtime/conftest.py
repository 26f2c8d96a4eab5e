import pytest

from .pair import Pair


@pytest.fixture
def pair(tmp_path):
    with Pair(tmp_path) as pair:
        yield pair
