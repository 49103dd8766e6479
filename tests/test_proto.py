"""The generated code is what the committed proto says, written by the pinned generator."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "protos" / "hetsplit" / "v1"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert version("grpcio-tools").startswith("1.76."), "another generator writes other bytes"
    out = tmp_path_factory.mktemp("pb")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", f"--python_out={out}", f"--pyi_out={out}"]
    done = subprocess.run([*command, "hetsplit.proto"], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return out


def test_the_committed_files_are_those_the_proto_gives(generated: Path) -> None:
    committed = ROOT / "hetsplit" / "_pb"
    names = {path.name for path in generated.iterdir()}
    assert names == {"hetsplit_pb2.py", "hetsplit_pb2.pyi"}
    for name in names:
        assert (generated / name).read_text() == (committed / name).read_text(), f"{name}: run `make proto`"


def test_every_call_of_the_proto_is_served() -> None:
    from hetsplit._pb import hetsplit_pb2 as pb
    from hetsplit.wire.server import Service, _Router
    from hetsplit.wire.shared import SERVICE

    service = pb.DESCRIPTOR.services_by_name["Worker"]
    assert f"/{service.full_name}/" == SERVICE

    class Nothing:
        def __getattr__(self, name: str) -> object:
            return None

    router = _Router(Nothing(), None, 30.0)  # type: ignore[arg-type]
    assert {SERVICE + method.name for method in service.methods} == router._handlers.keys()
    assert {method.name.lower() for method in service.methods} <= set(dir(Service))
    for method in service.methods:
        handler = router._handlers[SERVICE + method.name]
        assert (handler.request_streaming, handler.response_streaming) == (
            method.client_streaming,
            method.server_streaming,
        )
