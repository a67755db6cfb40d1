import pytest

from tests.engine.server.harness import RunningServer, make_core, serving


@pytest.fixture(scope="module")
def shared_server():
    with serving() as running:
        yield running


@pytest.fixture
def server(shared_server: RunningServer) -> RunningServer:
    """The module's server with a core that remembers nothing of the tests before."""
    core, fresh = shared_server.core, make_core()
    assert not core.running
    for name in (
        "default_script",
        "tokens_per_step",
        "num_cached_tokens",
        "num_draft_tokens",
        "num_accepted_tokens",
        "generation_defaults",
        "max_model_len",
    ):
        setattr(core, name, getattr(fresh, name))
    core.scripts.clear()
    core.requests.clear()
    core.aborted.clear()
    return shared_server
