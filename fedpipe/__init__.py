"""Federated-learning experiments as one declarative DAG of cached stages, on Snakemake and DVC."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from fedpipe.analysis.load import Results

__version__ = "0.2.0"


def load(path: str | Path = "params.yaml") -> Results:
    """A study's results as pandas frames, and its models as torch modules.

    Parameters
    ----------
    path
        A study's file, a folder that holds params.yaml, or a folder of results (``results``, ``results/studies/NAME``).

    Returns
    -------
    fedpipe.analysis.load.Results
        ``accuracies``, ``clients``, ``traffic``, ``times``, ``matrices``, ``partitions``, ``table``, ``fairness`` and
        ``provenance`` are frames. ``to_target(accuracy)`` is a frame of the rounds and bytes until this accuracy.
        ``model(algorithm, seed)`` is a torch module, ``state(algorithm, seed)`` has the tensors of the server or a
        client, and ``settings(algorithm, seed)`` all settings of a run.

    Raises
    ------
    SettingsError
        There is no such study.
    ArtifactError
        It has not run, or has been edited since.

    Examples
    --------
    >>> results = fedpipe.load("params.yaml")  # doctest: +SKIP
    >>> results.accuracies.query("round == 20").groupby(["algorithm", "protocol"])["accuracy"].mean()  # doctest: +SKIP
    """
    return importlib.import_module("fedpipe.analysis.load").load(path)  # with pandas, which takes a second
