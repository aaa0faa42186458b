from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist._forked import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Runs jobs of ``lightning-cpr run`` without starting processes anew for each."""
    zygote = Zygote()
    yield zygote
    zygote.close()
