"""Weights in the published formats of torchvision and timm, with random values, and a server for these files."""

import functools
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedpipe.core.storage.files import compute_file_sha256
from fedpipe.models.torchvision import Torchvision

TIMM_REPOSITORY = "timm/test_vit.r160_in1k"


class MaliciousPickle:
    """Reading this object from a pickle writes a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("mischief"),)


def randomize(network: nn.Module, seed: int = 4) -> dict[str, Tensor]:
    """Return a state dict of a network with random numbers and positive variances."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(value.shape, generator=random) / 10 + 0.01 if value.is_floating_point() else value
        for name, value in network.state_dict().items()
    }


def write_torchvision_weights(architecture: str, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Write a state dict of torchvision's network of 1000 classes, with the start of its hash in its name."""
    from torchvision import models

    tensors = randomize(models.get_model(architecture, weights=None))
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / "part.pth")
    path = folder / f"{architecture}-{compute_file_sha256(folder / 'part.pth')[:8]}.pth"
    (folder / "part.pth").rename(path)
    return path, tensors


def publish(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let torchvision publish weights V1 at this address. Their hash differs from that of the real weights."""
    entries = [SimpleNamespace(name="IMAGENET1K_V1", url=address, meta={"min_size": (1, 1)})]
    monkeypatch.setattr(Torchvision, "_list_weights_entries", lambda _: entries)


def write_timm_weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Write the weights of timm's smallest vision transformer as a file of safetensors."""
    import timm
    from safetensors.torch import save_file

    tensors = randomize(timm.create_model("test_vit"))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors", tensors


def write_timm_cache(cache: Path) -> tuple[Path, dict[str, Tensor]]:
    """Write these weights into a cache of Hugging Face's hub."""
    repository = cache / f"models--{TIMM_REPOSITORY.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("0" * 40)
    return write_timm_weights(repository / "snapshots" / ("0" * 40))


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve the files of a folder, and yield the address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
