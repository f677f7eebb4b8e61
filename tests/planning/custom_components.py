"""Source of a module with a custom algorithm, partition scheme and model."""

CUSTOM_COMPONENTS = '''
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import ClassVar

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.data.partitions.iid import IID
from fedpipe.models.mlp import MLP


@dataclass(frozen=True, kw_only=True)
class Own(FedAvg):
    """FedAvg by another name."""


@dataclass(frozen=True, kw_only=True)
class Alike(IID):
    """IID by another name."""


@dataclass(frozen=True, kw_only=True)
class Layers(MLP):
    """MLP by another name."""
'''
