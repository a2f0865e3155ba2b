"""Tables of Lance namespaces in place of URIs: of a directory, and of a real REST service on this machine."""

import http.server
import pickle
import socket
import threading
from typing import Any

import pytest

import raylance
from raylance.errors import ConfigError, DatasetError
from raylance.namespaces import NamespaceTable
from tests.helpers.namespace_tables import ROWS, ids


@pytest.mark.parametrize(("table", "times"), [("numbers", 1), (["nested", "numbers"], 2)])
def test_a_table_of_a_directory_is_read_like_its_uri(root: str, table: Any, times: int) -> None:
    named = NamespaceTable(table, "dir", {"root": root})
    uri, options = named.locate()
    assert options is None
    data = pickle.loads(pickle.dumps(raylance.dataset(named, seed=3)))
    assert sorted(ids(data)) == sorted(times * [*range(ROWS)])
    assert ids(data) == ids(raylance.dataset(uri, seed=3))


def test_a_checkpoint_holds_the_place_and_not_the_name(root: str) -> None:
    named = NamespaceTable("numbers", "dir", {"root": root})
    with raylance.dataset(named).loader(runtime="threads") as loader:
        batches = loader.iter_batches(global_batch_size=50)
        seen = [number for _ in range(4) for number in next(batches)["id"].tolist()]
        state = loader.state_dict()
    with raylance.dataset(named.locate()[0]).loader(runtime="threads") as loader:
        loader.load_state_dict(state)
        seen += [number for batch in loader.iter_batches(global_batch_size=50) for number in batch["id"].tolist()]
    assert sorted(seen) == [*range(ROWS)]


def test_a_service_that_does_not_answer_is_an_error_after_the_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        port = taken.getsockname()[1]
        monkeypatch.setattr("raylance.source.retrying.OPENING_S", 0.5)
        with pytest.raises(DatasetError, match=f"{port}"):
            raylance.dataset(NamespaceTable("numbers", "rest", {"uri": f"http://127.0.0.1:{port}"}))


def test_a_gateway_that_refuses_is_not_asked_again() -> None:
    """Lance's client counts its answer, which is none of a namespace, as an error inside of the service."""

    class Gateway(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(401)

    gateway = http.server.HTTPServer(("127.0.0.1", 0), Gateway)
    threading.Thread(target=gateway.serve_forever, daemon=True).start()
    with pytest.raises(DatasetError, match="401"):
        raylance.dataset(NamespaceTable("numbers", "rest", {"uri": f"http://127.0.0.1:{gateway.server_port}"}))
    gateway.shutdown()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (([], "dir", {"root": "/"}), "table_id"),
        ((["a", ""], "dir", {"root": "/"}), "table_id"),
        ((5, "dir", {"root": "/"}), "table_id"),
        (("a", "", {"root": "/"}), "namespace_impl"),
        (("a", "dir", {"root": 5}), "namespace_properties"),
        (("a", "rest", {"uri": "http://me:word@host"}), "header.Authorization"),
    ],
)
def test_what_names_no_table_is_refused(arguments: Any, names: str) -> None:
    with pytest.raises(ConfigError, match=names) as refused:
        NamespaceTable(*arguments)
    assert "word" not in str(refused.value).replace("password", "")


@pytest.mark.parametrize(("impl", "properties"), [("dir", {}), ("rest", {}), ("absent.Class", {"root": "/"})])
def test_a_client_that_cannot_be_made_is_refused(impl: str, properties: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=impl):
        raylance.dataset(NamespaceTable("numbers", impl, properties))
