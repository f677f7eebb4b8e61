"""Reads samples from .npz files and Parquet tables."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedpipe.core.errors import ArtifactError, format_error, suggest_name
from fedpipe.core.storage.files import decode_parquet
from fedpipe.data.samples import Column, Samples
from fedpipe.data.sources.images import read_images

if TYPE_CHECKING:
    import pyarrow as pa

MAX_CLASSES = 100_000  #: larger integers are probably codes
CHANNELS = (1, 3)  #: of gray and of color images
INPUT_COLUMNS = ("text", "image")  #: default columns of inputs in a table
CSV_SEPARATORS = {".csv": "", ".tsv": ", sep='\\t'"}  #: arguments of pandas by the suffix of a text table
NPZ_ARRAYS = ("x", "y", "test", "x_train", "y_train", "x_test", "y_test")  #: arrays of samples in an .npz file


def read_npz(path: Path) -> Samples:
    """Read ``x_train`` and ``y_train`` (with ``x_test`` and ``y_test``), or ``x`` and ``y`` (with ``test``, a mask).

    If ``x`` has dtype uint8, it contains images, shape (n, h, w), (n, h, w, c) or (n, c, h, w). Floats can have any
    shape. Other integers are token ids from 1, shape (n, length), with 0 as padding at the end of a text. Each other
    array with one value per sample is a column: ``writer``, or ``writer_train`` and ``writer_test``.

    Raises
    ------
    ArtifactError
        The file has another format.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files if name in NPZ_ARRAYS}
            other_arrays = _read_other_arrays(file)
    except Exception as error:  # any error of zip, NumPy or the system
        advice = " Save texts as arrays with dtype=str." if "Object arrays" in str(error) else ""
        raise ArtifactError(f"{path} can't be read as .npz ({format_error(error)}).{advice}") from error
    if unpaired := {"x_test", "y_test"} & arrays.keys() and {"x_test", "y_test"} - arrays.keys():
        raise ArtifactError(f"{path} lacks {unpaired.pop()}. Use both x_test and y_test, or neither.")
    if {"x_train", "y_train"} <= arrays.keys():
        splits = ["train", "test"] if {"x_test", "y_test"} <= arrays.keys() else ["train"]
        for split in splits:
            _require_equal_lengths(path, {name: arrays[name] for name in (f"x_{split}", f"y_{split}")})
        x, y = (
            _concatenate_splits(path, {f"{name}_{split}": arrays[f"{name}_{split}"] for split in splits})
            for name in "xy"
        )
        test = np.arange(len(y)) >= len(arrays["y_train"])
    elif {"x", "y"} <= arrays.keys():
        _require_equal_lengths(path, {name: arrays[name] for name in ("x", "y", "test") if name in arrays})
        x, y = arrays["x"], arrays["y"]
        test = _parse_test_mask(_flatten_column(arrays.get("test", np.zeros(len(y), dtype=np.bool_))), path)
    else:
        content = f"only {', '.join(sorted(arrays))}" if arrays else "none of the expected arrays"
        raise ArtifactError(
            f"{path} contains {content}. Use x_train and y_train (and x_test and y_test), or x and y (and test)."
        )
    labels, class_names = encode_labels(path, _flatten_column(y))
    tests = int(test.sum()) if "x_train" in arrays else 0
    columns, omitted_columns = _convert_other_arrays_to_columns(other_arrays, len(labels), tests)
    return Samples(_convert_and_validate_inputs(path, x), labels, test, columns, class_names, omitted_columns)


def load_table(path: Path) -> pa.Table:
    """Read a Parquet file.

    Raises
    ------
    ArtifactError
        The file has another format.
    """
    try:
        return decode_parquet(path)
    except Exception as error:  # any error of Arrow or the system
        advice = format_csv_advice(path) if path.suffix.lower() in CSV_SEPARATORS else "Use a Parquet file."
        raise ArtifactError(f"{path} can't be read as Parquet ({format_error(error)}). {advice}") from error


def explain_missing_column(source: str, names: Sequence[str], sample_columns: Sequence[str]) -> str | None:
    """Message about the first of these columns that a table lacks. None if it has all of them."""
    missing_columns = [name for name in sample_columns if name not in names]
    if not missing_columns:
        return None
    return f"{source} has no column '{missing_columns[0]}'. {suggest_name(missing_columns[0], names)}"


def format_csv_advice(path: Path) -> str:
    """Command that converts a text table to Parquet. A sentence."""
    parquet_path, separator = str(path.with_suffix(".parquet")), CSV_SEPARATORS.get(path.suffix.lower(), "")
    code = f"import pandas; pandas.read_csv({str(path)!r}{separator}).to_parquet({parquet_path!r})"
    return f'Type `python -c "{code}"`, and set dataset.path to {parquet_path}.'


def convert_table_to_samples(
    table: pa.Table, source: str, inputs: Sequence[str] = (), label: str = "label", image_size: int | None = None
) -> Samples:
    """Convert a table to samples, whose inputs are still texts (an array of Python objects) if the table has texts.

    Parameters
    ----------
    table
        One row per sample. Its metadata may contain class names, as Hugging Face writes them.
    source
        Name of the table for errors.
    inputs
        Columns of the inputs: one of texts or images (PNG or JPEG), or several of numbers. By default ``text`` or
        ``image``.
    label
        Column of the labels. The column ``split`` ("train", "test") marks test samples.
    image_size
        Width and height of the images. If None, they must have one size.

    Raises
    ------
    ArtifactError
        A column is missing or has values of another kind.
    """
    import pyarrow as pa

    names = table.column_names
    input_names = list(inputs) or [name for name in INPUT_COLUMNS if name in names][:1]
    sample_columns = [*input_names, label, *(["split"] if "split" in names else [])]
    if duplicates := [name for name in sample_columns if names.count(name) > 1]:
        raise ArtifactError(f"{source} has the column {min(duplicates)} more than once. Keep one of them.")
    if not inputs and (label not in names or not input_names):
        raise ArtifactError(
            f"{source} has the columns {', '.join(names)}. Use {label}, and text or image, or set dataset.input to the "
            "columns of the features."
        )
    if problem := explain_missing_column(source, names, sample_columns):
        raise ArtifactError(problem)
    if len(set(sample_columns)) < len(sample_columns):
        raise ArtifactError(
            f"dataset.input: {', '.join(input_names)} contains a column twice, or the column of labels. Use each once."
        )
    if incomplete_columns := sorted(name for name in sample_columns if table[name].null_count):
        is_missing = table[incomplete_columns[0]].is_null().to_numpy()
        raise ArtifactError(
            f"{source}: the column {incomplete_columns[0]} has no value in {is_missing.sum()} of {len(table)} rows, "
            f"first in row {is_missing.argmax()}. Give each row a value."
        )
    if pa.types.is_nested(label_type := table[label].type):
        raise ArtifactError(f"{source}: the column {label} contains {label_type}. Use one integer or text per sample.")
    labels, class_names = encode_labels(source, table[label].to_numpy())
    class_names = class_names or tuple(read_huggingface_class_names(table, label))
    split = table["split"].to_pylist() if "split" in names else ["train"] * len(table)
    if invalid_splits := sorted({str(value) for value in split} - {"train", "test"}):
        raise ArtifactError(f"{source}: the column split contains '{invalid_splits[0]}'. Use 'train' or 'test'.")
    test = np.array([value == "test" for value in split], dtype=np.bool_)
    columns, omitted_columns = _read_other_columns(table, sample_columns)
    if len(input_names) > 1 or _is_numeric_column(table[input_names[0]].type, input_names[0]):
        x = _read_numeric_columns(table, source, input_names)
    else:
        x = _read_texts_or_images(table, source, input_names[0], image_size)
    return Samples(x, labels, test, columns, class_names, omitted_columns)


def _read_texts_or_images(table: pa.Table, source: str, name: str, image_size: int | None) -> npt.NDArray[Any]:
    """Read a column of texts as Python objects, shape (n,), or of images, shape (n, channels, height, width)."""
    cells = table[name].to_pylist()
    if name == "text" or all(isinstance(cell, str) for cell in cells):
        if not all(isinstance(text, str) for text in cells):
            raise ArtifactError(f"{source}: the column text contains {table['text'].type}. Use strings.")
        return np.array(cells, dtype=object)
    cells = [cell.get("bytes") if isinstance(cell, dict) else cell for cell in cells]
    if not all(isinstance(cell, bytes) for cell in cells):
        raise _make_input_error(table, source, name)
    return read_images([(f"{source}, row {row}", partial(BytesIO, cell)) for row, cell in enumerate(cells)], image_size)


def encode_labels(path: Path | str, labels: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Convert labels to classes 0 to C-1, and return the names of the classes.

    Integers stay as they are and have no names. Other values are numbered in sorted order.
    """
    if not len(labels) or labels.ndim != 1:
        raise ArtifactError(f"{path} has labels of shape {labels.shape}. Use one label per sample.")
    if np.issubdtype(labels.dtype, np.integer):
        if labels.min() < 0:
            raise ArtifactError(f"{path}: label {labels.min()} can't be used. Number the classes from 0.")
        if labels.max() >= MAX_CLASSES:
            raise ArtifactError(
                f"{path}: label {labels.max()} can't be used, because integers are numbers of classes. Number the "
                "classes from 0, or store the labels as texts."
            )
        return labels.astype(np.int64), ()
    if labels.dtype.kind in "fcmM" and (is_nan := np.isnan(labels)).any():
        raise ArtifactError(
            f"{path}: the label is NaN for {is_nan.sum()} of {len(labels)} samples, first for sample "
            f"{is_nan.argmax()}. Give each sample a class."
        )
    values, classes = np.unique(labels, return_inverse=True)
    return classes.astype(np.int64), tuple(map(_format_label, values))


def _format_label(value: Any) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text.removesuffix(".0") if isinstance(value, (float, np.floating)) else text


def _convert_and_validate_inputs(path: Path | str, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if x.ndim == 4 and x.shape[-1] in CHANNELS:
        x = x.transpose(0, 3, 1, 2)
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[:, None]
    signed_dtype = np.promote_types(x.dtype, np.int8) if np.issubdtype(x.dtype, np.integer) else x.dtype
    has_tokens = np.issubdtype(signed_dtype, np.signedinteger) and x.ndim == 2 and x.dtype != np.uint8
    has_images = x.dtype == np.uint8 and x.ndim == 4 and x.shape[1] in CHANNELS
    has_floats = np.issubdtype(x.dtype, np.floating) and x.ndim > 1
    if not x.size or not (has_tokens or has_images or has_floats):
        raise ArtifactError(
            f"{path}: inputs of {x.dtype} with shape {x.shape} can't be used. Use images (uint8, gray or color), "
            "floating-point numbers, or token ids (signed integers, one row per sample)."
        )
    if has_tokens:
        if x.min() < 0:
            raise ArtifactError(
                f"{path}: token id {x.min()} can't be used. Number the words from 1, because 0 is padding."
            )
        return x.astype(signed_dtype, copy=False)
    if has_floats:
        with np.errstate(over="ignore"):
            x = x.astype(np.float32, order="C", copy=False)  # dtype of stored samples
        if (is_invalid := ~np.isfinite(x).reshape(len(x), -1).all(1)).any():
            raise ArtifactError(
                f"{path}: the inputs of {is_invalid.sum()} of {len(x)} samples contain NaN or infinity as float32, "
                f"first those of sample {is_invalid.argmax()}. Use finite numbers in the range of float32."
            )
    return x


def _read_other_arrays(file: Any) -> dict[str, npt.NDArray[Any] | None]:
    """Read the arrays of an .npz file that are not samples. Arrays of Python objects are not read, but None."""
    arrays: dict[str, npt.NDArray[Any] | None] = {}
    for name in file.files:
        if name not in NPZ_ARRAYS:
            arrays[name] = None
            with suppress(ValueError):
                array = _flatten_column(file[name])
                arrays[name] = np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array
    return arrays


def _convert_other_arrays_to_columns(
    other_arrays: Mapping[str, npt.NDArray[Any] | None], num_samples: int, num_tests: int
) -> tuple[dict[str, Column], dict[str, str]]:
    """Convert arrays with one value per sample, and pairs of training and test arrays, to columns.

    The second result explains why other arrays are left out, by the name of the column.
    """
    arrays = {
        name: array
        for name, array in other_arrays.items()
        if array is not None and array.ndim == 1 and array.dtype.kind in "iufbUM"
    }
    columns = {name: array for name, array in arrays.items() if len(array) == num_samples}
    for name in (key.removesuffix("_train") for key in arrays if key.endswith("_train")):
        parts = [arrays[f"{name}_train"], *([arrays[f"{name}_test"]] if f"{name}_test" in arrays else [])]
        if [len(part) for part in parts] == [num_samples - num_tests, *([num_tests] if num_tests else [])]:
            columns[name] = np.concatenate(parts)
            columns.pop(f"{name}_train", None)  # it has one value per sample if there is no test set
    reasons = {}
    for name, array in other_arrays.items():
        column = re.sub("_(train|test)$", "", name)
        if {name, column} & columns.keys():
            continue
        if array is None:
            reasons[column] = (
                f"the array {name} contains Python objects, or bytes that are not UTF-8. Save texts with dtype=str"
            )
        else:
            reasons[column] = (
                f"the array {name} has dtype {array.dtype} and shape {array.shape}, but there are {num_samples} "
                "samples. Save one text, number or date per sample"
            )
    return {name: Column.from_values(array) for name, array in columns.items()}, reasons


def _read_other_columns(table: pa.Table, sample_columns: Sequence[str]) -> tuple[dict[str, Column], dict[str, str]]:
    """Read the columns of a table that are neither inputs nor labels, with one text, number or date per row.

    The second result explains why columns with other values are left out.
    """
    import pyarrow as pa

    columns, reasons = {}, {}
    for name in table.column_names:
        kind = table.schema.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        # to_parquet writes it after a shuffle or selection.
        is_pandas_index = re.fullmatch(r"__index_level_\d+__", name)
        if name in sample_columns or is_pandas_index:
            continue
        if table.column_names.count(name) > 1:
            reasons[name] = "the table contains it more than once. Keep one of them"
        elif any(
            is_kind(kind)
            for is_kind in (pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary, pa.types.is_null)
        ):
            reasons[name] = f"it contains {kind}. Use texts, numbers or dates"
        else:
            column, class_names = Column.from_values(table[name]), read_huggingface_class_names(table, name)
            if all(value.isdecimal() and int(value) < len(class_names) for value in column.names):
                column = Column(column.codes, tuple(class_names[int(value)] for value in column.names))
            columns[name] = column
    return columns, reasons


def read_huggingface_class_names(table: pa.Table, name: str) -> Sequence[str]:
    """Read the names of the classes that Hugging Face stores with a column. Empty if there are none."""
    metadata = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    feature = ((metadata.get("info") or {}).get("features") or {}).get(name)
    return feature.get("names") or () if isinstance(feature, dict) else ()


def _is_numeric_column(column_type: pa.DataType, name: str) -> bool:
    """Whether a column has numbers for a feature. Text and image are read as such."""
    import pyarrow as pa

    return name not in INPUT_COLUMNS and (
        pa.types.is_integer(column_type) or pa.types.is_floating(column_type) or pa.types.is_boolean(column_type)
    )


def _read_numeric_columns(table: pa.Table, source: str, names: Sequence[str]) -> npt.NDArray[np.float32]:
    """Read columns of numbers as inputs, shape (n, len(names))."""
    import pyarrow as pa

    for name in names:
        if not _is_numeric_column(table[name].type, name):
            raise _make_input_error(table, source, name)
    inputs = np.stack([table[name].cast(pa.float64(), safe=False).to_numpy() for name in names], axis=1)
    return _convert_and_validate_inputs(source, inputs)


def _make_input_error(table: pa.Table, source: str, name: str) -> ArtifactError:
    return ArtifactError(
        f"dataset.input: column '{name}' of {source} contains {table[name].type}. Use columns of integers, "
        "floating-point numbers or Booleans, or one column of texts or images (bytes of PNG or JPEG)."
    )


def _require_equal_lengths(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    lengths = {array.shape[:1] for array in arrays.values()}
    if len(lengths) > 1 or () in lengths:
        shapes = ", ".join(f"{name} of shape {array.shape}" for name, array in arrays.items())
        raise ArtifactError(f"{path} contains {shapes}. Use arrays with one entry per sample.")


def _concatenate_splits(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Concatenate the arrays of training and test samples."""
    kinds = {(array.shape[1:], array.dtype.kind.replace("u", "i")) for array in arrays.values()}
    if len(kinds) > 1:
        descriptions = " and ".join(
            f"{name} of {array.dtype} and shape {array.shape}" for name, array in arrays.items()
        )
        raise ArtifactError(f"{path} contains {descriptions}. Use the same type and shape, except for the length.")
    return np.concatenate(list(arrays.values()))


def _parse_test_mask(values: npt.NDArray[Any], path: Path) -> npt.NDArray[np.bool_]:
    """Convert the array ``test`` of a file to Booleans."""
    if values.ndim != 1 or values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all():
        raise ArtifactError(
            f"{path}: the array test is {values.dtype} of shape {values.shape}. Use one Boolean, 0 or 1 per sample."
        )
    return values.astype(np.bool_)


def _flatten_column(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Flatten an array with one value per sample."""
    return array.ravel() if array.ndim and array.size == len(array) else array
